"""Text of an exact number of tokens, from a name: words that are one token each, in any position.

A word qualifies if the tokenizer encodes it as one token at the beginning of a text and after a space. Tokenizers split
at spaces before they merge, so words joined by spaces keep their boundaries: two texts share exactly the tokens of
their shared words. Encoding a sample checks this for every tokenizer.

Without a tokenizer a text has as many words of the prose as TOKENS_PER_WORD gives.
"""

import math
from typing import Any, Protocol

from tokenizers import Tokenizer

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.seeds import seeded_rng
from sojourn.loadgen.traces.plain import TOKENS_PER_WORD

FEWEST_WORDS = 64  # 64 words in blocks of 8 tokens: 3e14 blocks
MOST_WORDS = 4096
MOST_CHECKED = 1500  # of a server, one by one
SAMPLE = 400


class Encoder(Protocol):
    """The used part of `tokenizers.Tokenizer`."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]: ...


class WordSource:
    """Texts by name. The same seed and name give the same words in every process; a shorter text is a beginning."""

    def __init__(self, seed: int, encoder: Encoder | None, prose: list[str]):
        self._seed = seed
        self._exact = encoder is not None
        self._words = prose_words(prose) if encoder is None else single_token_words(encoder, prose)

    def words(self, name: tuple, num_tokens: int, of_tokens: int | None = None) -> list[str]:
        """`num_tokens` tokens: the beginning of the text of `of_tokens` that this name stands for."""
        size = self._num_words(of_tokens or num_tokens)
        chosen = seeded_rng(self._seed, *name).integers(len(self._words), size=size)
        return [self._words[index] for index in chosen[: self._num_words(num_tokens)]]

    def blocks(self, ids: tuple[int, ...], block_tokens: int, num_tokens: int, request: int) -> str:
        """A prompt of a trace's blocks, the last one cut to `num_tokens`. Tokens beyond the blocks are the request's
        own."""
        words: list[str] = []
        for place, block in enumerate(ids):
            size = min(block_tokens, num_tokens - place * block_tokens)
            words += self.words(("block", block), size, block_tokens)
        if (rest := num_tokens - len(ids) * block_tokens) > 0:
            words += self.words(("own", request), rest)
        return " ".join(words)

    def _num_words(self, num_tokens: int) -> int:
        return num_tokens if self._exact else max(1, math.ceil(num_tokens / TOKENS_PER_WORD))


def prose_words(prose: list[str]) -> list[str]:
    """Different plain words of a text, in the order in which they come."""
    return list(dict.fromkeys(word.lower() for word in prose if word.isascii() and word.isalpha() and len(word) > 1))


def single_token_words(encoder: Encoder, prose: list[str]) -> list[str]:
    """Words that are one token each, alone and in a text. Raises ScenarioError where there are too few."""
    candidates = _candidates(encoder, prose)[:MOST_WORDS]
    # One token at the beginning and after another word: twice the word is two tokens.
    twice = encoder.encode_batch([f"{word} {word}" for word in candidates], add_special_tokens=False)
    words = [word for word, two in zip(candidates, twice, strict=True) if len(two.ids) == 2]
    chosen = seeded_rng("words").integers(max(len(words), 1), size=SAMPLE)
    sample = " ".join(words[index] for index in chosen) if words else ""
    if len(words) < FEWEST_WORDS or len(encoder.encode(sample, add_special_tokens=False).ids) != SAMPLE:
        raise ScenarioError(
            f"this tokenizer has {len(words)} words that are one token each and stay so in a text; prompts of blocks "
            f"or random words need {FEWEST_WORDS}: take another tokenizer, or content: prose"
        )
    return words


def _candidates(encoder: Encoder, prose: list[str]) -> list[str]:
    """Words of the vocabulary, lowest id first; of the prose where the vocabulary is a server's."""
    if not isinstance(encoder, Tokenizer):
        return prose_words(prose)[:MOST_CHECKED]
    spelled = sorted(encoder.get_vocab().items(), key=lambda entry: entry[1])
    after_space = (token[1:] for token, _ in spelled if token[:1] in ("Ġ", "▁"))
    return [word for word in dict.fromkeys(after_space) if word.isascii() and word.isalpha() and len(word) > 1]
