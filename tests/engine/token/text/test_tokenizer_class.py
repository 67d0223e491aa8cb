"""Ids of a text are those of transformers' AutoTokenizer, whatever tokenizer_config.json says beside tokenizer.json."""

import json

import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.errors import ModelError

BLANK = "\u2581"
PIECES = [BLANK, "h", "e", "l", "o", "he", "ll", "hell", "hello", BLANK + "hello", "x", BLANK + "x"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEXTS = ["hello", " hello", "</s>hello", "</s> hello x", "hello</s>", "", "  x", "<s>hello</s>x"]
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
STYLES = {  # normalizer, pre-tokenizer and whether the first blank goes
    "prepend": ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": BLANK}, REPLACE]}, None, True),
    "plain": (REPLACE, None, False),
    "first": (None, "first", True),
    "always": (None, "always", True),
    "never": (None, "never", False),
}


def begins_with(token, token_id):
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    single = [special, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def sentencepiece(style):
    normalizer, scheme, strips = STYLES[style]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    steps = [{"type": "Replace", "pattern": {"String": BLANK}, "content": " "}, {"type": "ByteFallback"},
             {"type": "Fuse"}, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * strips)]  # fmt: skip
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], "special": True} | flags for i in range(3)],
        "normalizer": normalizer,
        "pre_tokenizer": scheme
        and {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": scheme, "split": False},
        "post_processor": begins_with("<s>", 1),
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], [BLANK, "hello"], [BLANK, "x"]],
        },
    }  # fmt: skip


def byte_level(*, begins=False, prefix=False):
    said = json.loads((model_folder("tiny-model") / "tokenizer.json").read_text())
    said["pre_tokenizer"]["add_prefix_space"] = prefix
    return said | ({"post_processor": begins_with("<|endoftext|>", 0)} if begins else {})


def ids(folder, document, said, kind="llama", texts=TEXTS):
    """Ours, and those of transformers."""
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    ours, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    encoded = [ours.encode(text) for text in texts]
    whole = [ours.decode(each, skip_special_tokens=False) for each in encoded]
    spelt = [theirs.decode(theirs.encode(text)) for text in texts]
    return (encoded, whole), ([theirs.encode(text) for text in texts], spelt)


KEYS = [
    {}, {"add_prefix_space": True}, {"add_prefix_space": False}, {"add_prefix_space": None}, {"legacy": True},
    {"legacy": False}, {"legacy": True, "add_prefix_space": False}, {"add_bos_token": False, "add_eos_token": True},
    {"add_bos_token": True}, {"split_special_tokens": True},
]  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("kind", "named", "some"), [
    ("llama", "LlamaTokenizerFast", KEYS), ("llama", "PreTrainedTokenizerFast", KEYS[1:2]), ("llama", None, KEYS[2:3]),
    ("mistral", "LlamaTokenizer", KEYS[1:2]), ("deepseek_v3", "LlamaTokenizer", KEYS[:1]),
    ("qwen3", "LlamaTokenizer", KEYS[2:3]),
])  # fmt: skip
def test_sentencepiece_is_split_as_transformers_does(tmp_path, style, kind, named, some):
    for keys in some:
        said = NAMED | keys | ({} if named is None else {"tokenizer_class": named})
        ours, theirs = ids(tmp_path, sentencepiece(style), said, kind)
        assert ours == theirs, keys


@pytest.mark.parametrize(("kind", "named"), [
    ("llama", "LlamaTokenizerFast"), ("llama", "PreTrainedTokenizerFast"), ("llama", None), ("qwen3", "Qwen2Tokenizer"),
    ("qwen3", None), ("qwen2", "LlamaTokenizerFast"), ("qwen3", "PreTrainedTokenizerFast"), ("gpt_oss", None),
    ("llama", "GPT2Tokenizer"), ("mpt", "GPTNeoXTokenizerFast"), ("mistral", "LlamaTokenizerFast"),
])  # fmt: skip
@pytest.mark.parametrize("begins", [False, True])
def test_byte_level_is_split_as_transformers_does(tmp_path, kind, named, begins):
    texts = ["a b", " a", "hello there", "", "<|im_end|>a b", "a<|endoftext|>"]
    absent = {"add_prefix_space": None}  # with which some classes of transformers fail
    keys_of = [keys for keys in KEYS if keys != absent and "legacy" not in keys]
    for keys, prefix in [*((keys, False) for keys in keys_of), *((keys, True) for keys in keys_of[:3])]:
        said = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"} | keys
        said |= {} if named is None else {"tokenizer_class": named}
        ours, theirs = ids(tmp_path, byte_level(begins=begins, prefix=prefix), said, kind, texts)
        assert ours[0] == theirs[0], (keys, prefix)


@pytest.mark.parametrize(
    "said",
    [
        {}, {"eos_token": "</s>"}, {"eos_token": {"content": "</s>", "__type": "AddedToken", "special": True}},
        {"pad_token": "hello"}, {"additional_special_tokens": ["</s>", "x"]}, {"extra_special_tokens": ["x"]},
        {"extra_special_tokens": {"image_token": "</s>"}}, {"image_token": "x"}, {"extra_special_tokens": {"a": "x"}},
        {"extra_special_tokens": {"image_token": "</s>"}, "additional_special_tokens": ["x"]},
        {"extra_special_tokens": ["x"], "additional_special_tokens": ["</s>"]}, {"image_token": {"content": "x"}},
        {"image_token": {"content": "x", "__type": "AddedToken"}}, {"model_specific_special_tokens": {"a_token": "x"}},
        {"model_specific_special_tokens": {"a_token": "x"}, "b_token": "</s>"},
        {"mask_token": "<unk>", "bos_token": "<s>"}, {"eos_token": None, "additional_special_tokens": []},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_tokens_that_the_config_names_are_special_as_in_transformers(tmp_path, said, kept):
    """Of the tokens of tokenizer.json `kept` are added ones, and none is special."""
    transformers = pytest.importorskip("transformers")
    document = sentencepiece("plain")
    document["added_tokens"] = [token | {"special": False} for token in document["added_tokens"][:kept]]
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "architectures": ["MistralForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    ours, theirs = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        encoded = ours.encode(text)
        assert encoded == theirs.encode(text)
        for skips in (False, True):
            assert ours.decode(encoded, skip_special_tokens=skips) == theirs.decode(encoded, skip_special_tokens=skips)


@pytest.mark.parametrize("key", ["add_prefix_space", "legacy", "split_special_tokens"])
@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_flag_that_is_none_is_named(tmp_path, key, value):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text(json.dumps(sentencepiece("plain")))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json has {key}=.*; it must be true or false"):
        Tokenizer(tmp_path)
