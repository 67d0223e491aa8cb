"""Keys of a GGUF file's tokenizer, and the defaults of files that lack them, give the ids that llama.cpp makes."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from sojourn.engine.token.gguf.file import GGUFFile
from sojourn.engine.token.gguf.tokenizer import WHOLE_ENTRIES, tokenizer_config, tokenizer_json
from sojourn.metrics.errors import ModelError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = ["<s>", "</s>", *ALPHABET, "ab", "abc", "12", "123"]  # no merge makes abc
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]


def made(tokens=BYTES, model="gpt2", **keys):
    """The tokenizer of these keys behind `tokenizer.ggml.`; None drops one."""
    merges = ["a b", "1 2", "12 3"]
    values = {"model": model, "tokens": tokens, "merges": merges, "bos_token_id": 0, "eos_token_id": 1}
    values["token_type"] = [3, 3] + [1] * (len(tokens) - 2) if model == "gpt2" else [2, 3, 3, *[6] * 256, *[1] * 6]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (values | keys).items() if value is not None}
    return GGUFFile(Path("m.gguf"), metadata, ())


def ids(text, **keys):
    return Tokenizer.from_str(tokenizer_json(made(**keys))).encode(text).ids


def pieces(text, **keys):
    return Tokenizer.from_str(tokenizer_json(made(**keys))).encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize(
    ("keys", "begins", "ends"),
    [
        ({"pre": "qwen2"}, False, False),
        ({"pre": "gpt-2"}, False, False),
        ({"pre": None}, False, False),
        ({"pre": "smaug-bpe"}, False, False),
        *(({"pre": name}, True, False) for name in sorted(WHOLE_ENTRIES)),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"pre": "qwen2", "add_bos_token": True}, True, False),
        ({"pre": "qwen2", "add_eos_token": True}, False, True),
        ({"pre": "llama-bpe", "add_eos_token": True}, True, True),
        ({"pre": "llama-bpe", "add_bos_token": False, "add_eos_token": True}, False, True),
        ({"pre": "qwen2", "add_sep_token": True, "add_space_prefix": True}, False, False),  # only other kinds read them
        ({"pre": "qwen2", "add_bos_token": True, "add_eos_token": True, "eos_token_id": 0}, True, True),
    ],
)
def test_byte_level_texts_begin_and_end_as_the_keys_and_the_kind_of_split_say(keys, begins, ends):
    end = keys.get("eos_token_id", 1)
    assert ids("a", **keys) == [*[0] * begins, BYTES.index("a"), *[end] * ends]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1, 264]),  # SentencePiece begins with <s> and a blank
        ({"add_bos_token": False}, [264]),
        ({"add_eos_token": True}, [1, 264, 2]),
        ({"add_space_prefix": False}, [1, 263]),
        ({"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}, [263, 2]),
        ({"bos_token_id": 0}, [0, 264]),
        ({"bos_token_id": 0, "eos_token_id": 1, "add_eos_token": True}, [0, 264, 1]),
        ({"remove_extra_whitespaces": True, "add_sep_token": True}, [1, 264]),
    ],
)
def test_sentencepiece_texts_begin_with_a_blank_and_bos_unless_a_key_says_otherwise(keys, expected):
    unnamed = {"bos_token_id": None, "eos_token_id": None, "merges": None}
    assert ids("ab", tokens=PIECES, model="llama", scores=[0.0] * len(PIECES), **unnamed | keys) == expected


def test_sentencepiece_without_named_ids_has_the_usual_ones():
    file = made(tokens=PIECES, model="llama", bos_token_id=None, eos_token_id=None)
    assert tokenizer_config(file) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("role", ["bos", "eos"])
@pytest.mark.parametrize("number", [None, 10**6, -1])
def test_token_that_is_to_be_added_and_is_none_is_refused(role, number):
    with pytest.raises(ModelError, match=rf"m\.gguf begins or ends .*{role}_token_id={number}; put tokenizer\.json"):
        ids("a", pre="qwen2", **{f"add_{role}_token": True, f"{role}_token_id": number})


@pytest.mark.parametrize("name", ["llama-bpe", "llama3", "tekken-like", "qwen2", "smaug-bpe"])
def test_entry_of_the_vocabulary_is_one_token_where_merges_do_not_count(name):
    if name == "tekken-like":
        with pytest.raises(ModelError, match="splits texts as 'tekken-like', which is not known"):
            pieces("abc", pre=name)
        return
    assert pieces("abc", pre=name) == (["abc"] if name in WHOLE_ENTRIES else ["ab", "c"])


@pytest.mark.parametrize("name", [None, "default"])
def test_file_without_a_split_is_split_as_llama_cpp_does_by_default(name):
    whole = Tokenizer.from_str(tokenizer_json(made(pre=name))).pre_tokenizer
    split = [piece.replace("Ġ", " ") for piece, _ in whole.pre_tokenize_str("it's $12345, (ab) x-y")]
    assert split == ["it", "'", "s", " ", "$", "123", "45", ",", " ", "(", "ab", ")", " x", "-", "y"]


def test_names_of_ends_are_control_tokens_whatever_their_type():
    tokens = [*BYTES, "<|eot_id|>"]
    assert pieces("a<|eot_id|>", tokens=tokens, pre="qwen2") == ["a", "<|eot_id|>"]
    loaded = Tokenizer.from_str(tokenizer_json(made(tokens=tokens, pre="qwen2")))
    assert loaded.decode(loaded.encode("a<|eot_id|>").ids) == "a"
