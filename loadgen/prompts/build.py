"""Prompts of a given length, cut from prose. They share no beginning, except for an explicit shared prefix.

Each starts with a few words drawn from the seed and its number. Otherwise a run with another seed would cut the same
prose at the same words, and find its prompts in the prefix cache of a running server.

With the target's tokenizer a prompt has the exact number of tokens, except where no prefix of the text has it; with a
server as the tokenizer it is right within a word. Without one it is measured in words at TOKENS_PER_WORD: right within
some 15% for English and a vocabulary of 30,000 or more. The records have the server's own count.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.prompts.exact_words import Encoder, WordSource
from sojourn.loadgen.scenario.scenario import SCENARIO_FOLDER
from sojourn.loadgen.seeds import seeded_rng, stable_seed
from sojourn.loadgen.target.endpoint import Endpoint
from sojourn.loadgen.target.server_tokenizer import SERVER, ServerTokenizer
from sojourn.loadgen.traces.plain import TOKENS_PER_WORD

CORPUS = SCENARIO_FOLDER / "tiny-model" / "prompts.txt"
WORDS_A_QUESTION = 256  # to a server that measures
LEAD_WORDS = 4  # of thousands of short ones: 48 bits, in fewer tokens than a block of a prefix cache has
LONGEST_LEAD_WORD = 7  # characters
_CUT_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """`prefix` is shared word for word, `body` belongs to this request alone; one space joins them. Where the shared
    part stands last it is the other way round."""

    prefix: str
    body: str

    @property
    def text(self) -> str:
        return f"{self.prefix} {self.body}" if self.prefix else self.body


@contextmanager
def tokenizer_of(named: str | None, endpoint: Endpoint, model: str) -> Iterator[Encoder | None]:
    """The tokenizer that measures prompts: a file, the server itself, or None. Raises ScenarioError."""
    if named != SERVER:
        yield None if named is None else load_tokenizer(named)
        return
    with closing(ServerTokenizer(endpoint, model)) as tokenizer:
        yield tokenizer


def load_tokenizer(path_or_name: str) -> Tokenizer:
    """A tokenizer.json, by its path, its folder's, or a bundled model's name."""
    for path in (Path(path_or_name), SCENARIO_FOLDER / path_or_name):
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            try:
                return Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises bare Exception
                raise ScenarioError(f"{file} is not a tokenizer: {error}") from None
    raise ScenarioError(
        f"tokenizer {path_or_name!r} is neither a file nor a folder with tokenizer.json; without one, leave "
        "target.tokenizer out and prompts are measured in words"
    )


class PromptSource:
    """Cuts prompts out of one circle of prose. The same seed gives the same prompts, in the same order."""

    def __init__(self, seed: int, tokenizer: Encoder | None = None, corpus: Path = CORPUS):
        try:
            text = corpus.read_text(encoding="utf-8")
        except OSError as error:
            raise ScenarioError(
                f"the prose that prompts are cut from, {corpus}, cannot be read: {error.strerror}"
            ) from None
        self._tokenizer = tokenizer
        self._words = text.split()
        if not self._words:
            raise ScenarioError(f"the prose that prompts are cut from, {corpus}, is empty")
        self._tokens_before = _tokens_before_each_word(self._words, tokenizer)
        places = {word: place for place, word in enumerate(self._words)}
        short = [place for word, place in places.items() if len(word) <= LONGEST_LEAD_WORD]
        self._lead_words = short or list(places.values())
        self._starts = seeded_rng(seed, "starts").permutation(len(self._words))
        self._used = 0
        self._seed = seed

    def prompt(self, num_tokens: int, prefix: str = "", prefix_tokens: int = 0) -> Prompt:
        """`num_tokens` in all, `prefix_tokens` of them in the prefix. No two seeds or calls begin alike."""
        number = self._used
        self._used += 1
        start = int(self._starts[number % len(self._words)])
        return Prompt(prefix, self._cut(self._lead("prompt", number), start, num_tokens - prefix_tokens, prefix))

    def skip(self) -> None:
        """Skips one prompt, so that the next is the same as after it."""
        self._used += 1

    def shared_prefix(self, name: str, num_tokens: int, behind: str = "") -> str:
        """The prefix of this name: the same in every prompt, process and run of one seed. Tokens are counted after the
        text `behind`."""
        start = stable_seed(self._seed, "prefix", name) % len(self._words)
        return self._cut(self._lead("prefix", name), start, num_tokens, behind)

    @cached_property
    def by_name(self) -> WordSource:
        """Texts of words that are one token each."""
        return WordSource(self._seed, self._tokenizer, self._words)

    def _lead(self, *name: object) -> list[int]:
        """Places of the words that the text of this name begins with."""
        seed, places = stable_seed(self._seed, "lead", *name), []
        for _ in range(LEAD_WORDS):
            seed, place = divmod(seed, len(self._lead_words))
            places.append(self._lead_words[place])
        return places

    def _cut(self, lead: list[int], start: int, num_tokens: int, prefix: str) -> str:
        """Text of `num_tokens` tokens, counted after `prefix`: `lead`, then the prose from word `start` on."""
        num_words = max(1, self._words_for(lead, start, num_tokens))
        if self._tokenizer is None:
            return self._text(lead, start, num_words)
        best: tuple[int, str] | None = None
        already = self._count(prefix) if prefix else 0
        for _ in range(_CUT_ATTEMPTS):
            text = self._text(lead, start, num_words)
            surplus = self._count(f"{prefix} {text}" if prefix else text) - already - num_tokens
            if best is None or abs(surplus) < best[0]:
                best = (abs(surplus), text)
            if surplus == 0:
                break
            if surplus < 0:
                num_words += max(1, -surplus // 2)
            elif surplus <= 3 or num_words == 1:
                return self._trim(text, surplus, best)
            else:
                num_words = max(1, num_words - max(1, surplus // 3))
        return best[1]

    def _trim(self, text: str, surplus: int, best: tuple[int, str]) -> str:
        """Removes whole tokens from the last word, if the rest still encodes as before."""
        if not isinstance(self._tokenizer, Tokenizer):  # a server does not tell where a token ends
            return best[1]
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if surplus >= len(encoding.ids):
            return best[1]
        shorter = text[: encoding.offsets[-surplus - 1][1]]
        wanted = len(encoding.ids) - surplus
        same = len(self._tokenizer.encode(shorter, add_special_tokens=False).ids) == wanted
        return shorter if same and shorter.strip() else best[1]

    def _text(self, lead: list[int], start: int, num_words: int) -> str:
        places = [*lead, *((start + step) % len(self._words) for step in range(num_words - len(lead)))]
        return " ".join([self._words[place] for place in places[:num_words]])

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _words_for(self, lead: list[int], start: int, num_tokens: int) -> int:
        """The number of words, of `lead` and then from `start` on, that hold about `num_tokens`."""
        of_lead = np.cumsum([self._tokens_before[place + 1] - self._tokens_before[place] for place in lead])
        if num_tokens <= of_lead[-1]:
            return 1 + int(np.searchsorted(of_lead, num_tokens))
        laps, rest = divmod(num_tokens - of_lead[-1], self._tokens_before[-1])
        target = self._tokens_before[start] + rest
        if target > self._tokens_before[-1]:
            laps, target = laps + 1, target - self._tokens_before[-1]
        return len(lead) + int(laps) * len(self._words) + int(np.searchsorted(self._tokens_before, target)) - start


def _tokens_before_each_word(words: list[str], tokenizer: Encoder | None) -> np.ndarray:
    """[num_words + 1] tokens of the text before each word; an estimate, as words are counted one by one."""
    if tokenizer is None:
        counts = np.full(len(words), TOKENS_PER_WORD)
    elif not isinstance(tokenizer, Tokenizer):
        counts = _counts_by_stretch(words, tokenizer)
    else:
        distinct = list(dict.fromkeys(words))
        encoded = tokenizer.encode_batch([f" {word}" for word in distinct], add_special_tokens=False)
        size = {word: len(encoding.ids) for word, encoding in zip(distinct, encoded, strict=True)}
        counts = np.array([size[word] for word in words])
    return np.concatenate([[0], np.cumsum(counts)])


def _counts_by_stretch(words: list[str], tokenizer: Encoder) -> np.ndarray:
    """[num_words] the mean of each word's stretch: a server counts stretches, which need fewer requests than words."""
    stretches = [words[start : start + WORDS_A_QUESTION] for start in range(0, len(words), WORDS_A_QUESTION)]
    encoded = tokenizer.encode_batch([" ".join(stretch) for stretch in stretches], add_special_tokens=False)
    means = [len(encoding.ids) / len(stretch) for encoding, stretch in zip(encoded, stretches, strict=True)]
    return np.repeat(means, [len(stretch) for stretch in stretches])
