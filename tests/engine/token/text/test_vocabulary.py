"""Single tokens spell the text that they make together, whatever alphabet the tokenizer writes its entries in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sojourn.engine.config import model_folder
from sojourn.engine.token.text.decoders import Decoder
from sojourn.engine.token.text.vocabulary import Vocabulary

CORPUS = ["The function returns a list.", "Grüße, naïve 日本語 🙂 and\n\ttabs", "x = [1, 2, 3]"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen spell: every byte a printing character."""
    return Tokenizer.from_file(str(model_folder("tiny-model") / "tokenizer.json"))


def byte_fallback() -> Tokenizer:
    """As SentencePiece, Llama 2 and Mistral spell: blanks as a mark, unknown characters as <0x..> bytes."""
    alphabet = sorted(set("".join(CORPUS[:1] + CORPUS[2:]).replace(" ", "▁")))
    entries = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    model = models.BPE({entry: i for i, entry in enumerate(entries)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def nested_byte_level() -> Tokenizer:
    """The byte-level decoder as one step of a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, Decoder(json.loads(tokenizer.to_str())["decoder"]))


KINDS = {"byte-level": byte_level(), "byte-fallback": byte_fallback(), "nested byte-level": nested_byte_level()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_all_tokens_are_those_of_the_text(kind):
    tokenizer = KINDS[kind]
    spelling = vocabulary(tokenizer)

    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(spelling.bytes_of, ids)) == text.encode()

    check()
    for text in CORPUS:
        check.hypothesis.inner_test(text)


def test_special_tokens_are_named_and_ids_without_an_entry_are_empty():
    spelling = vocabulary(KINDS["byte-level"])
    assert spelling.text_of(1) == "<|im_start|>"
    assert spelling.bytes_of(10**6) == b""
