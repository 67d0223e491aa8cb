"""Text that comes in pieces is the text that `tokenizers` decodes at once, for any ids and any decoder."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.token.text.decoders import Decoder
from sojourn.engine.token.text.stream import TextStream
from tests.engine.token.text.kinds import CHAINS, HALVES, SPECIAL, bundled, of_gguf, tokenizer

TOKENIZERS = {kind: tokenizer(kind) for kind in CHAINS} | {
    "bundled": bundled(),
    "GGUF, SentencePiece": of_gguf("llama"),
    "GGUF, SentencePiece without a first blank": of_gguf("llama", add_space_prefix=False),
    "GGUF, byte level": of_gguf("gpt2"),
}
DECODERS = {
    kind: Decoder(json.loads(made.decoder.__getstate__()) if made.decoder else None)
    for kind, made in TOKENIZERS.items()
}


def stream(kind, prompt=(), *, skips=True, **options):
    made = TOKENIZERS[kind]
    special = {token.content for token in made.get_added_tokens_decoder().values() if token.special}

    def entry_of(token_id):
        entry = made.id_to_token(token_id)
        return None if skips and entry in special else entry

    return TextStream(DECODERS[kind], entry_of, {}, prompt, **options)


def ids_of(kind):
    """Any ids, and often those that are halves of characters, blanks or specials."""
    made = TOKENIZERS[kind]
    size = made.get_vocab_size()
    hard = [made.token_to_id(entry) for entry in [*HALVES, *SPECIAL, "▁", "▁hello", "a", "a</w>", "##a", "<pad>"]]
    hard = [number for number in hard if number is not None] or [1, 2]
    return st.lists(st.one_of(st.sampled_from(hard), st.integers(0, size + 3)), max_size=24)


def check(kind, ids, cut, skips):
    decode = lambda some: TOKENIZERS[kind].decode(some, skip_special_tokens=skips)  # noqa: E731
    prompt, output = ids[:cut], ids[cut:]
    made = stream(kind, prompt, skips=skips)
    text = ""
    for count, token_id in enumerate(output, 1):
        text += made.push(token_id)
        assert text + made.rest() == decode(prompt + output[:count])[len(decode(prompt)) :]


def run(kind, examples):
    @settings(max_examples=examples, database=None)
    @given(ids_of(kind), st.integers(0, 24), st.booleans())
    def property_of(ids, cut, skips):
        check(kind, ids, cut, skips)

    property_of()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_the_whole_less_the_prompt(kind):
    run(kind, 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_the_whole_in_many_examples(kind):
    run(kind, 50_000 // len(TOKENIZERS) + 1)


def test_an_empty_entry_at_the_beginning_of_a_prompt_is_its_first():
    kind = "word pieces as they stand"
    empty, word = (TOKENIZERS[kind].token_to_id(entry) for entry in ("", "a"))
    check(kind, [empty, word, word], 1, True)
    check(kind, [empty, empty, word], 2, True)
