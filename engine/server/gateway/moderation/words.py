"""Lists of words and phrases, searched by one automaton, however many they are."""

from collections.abc import Iterable, Mapping

import ahocorasick

from sojourn.engine.server.gateway.moderation.folding import MAX_FILLERS, Folding, is_spaced_letter
from sojourn.engine.server.gateway.moderation.scanner import Scan
from sojourn.engine.server.gateway.moderation.verdict import Span
from sojourn.metrics.errors import InputError

MAX_WORD_CHARACTERS = 200  # folded
MAX_WORDS = 1_000_000  # of one list


class WordList:
    """Finds the words of one list in a text, however they are written: see folding.py.

    With `whole_words` a match begins and ends where a word does. Scripts without blanks between words have no such
    places, and there every match counts. Raises InputError for a word that cannot be searched.
    """

    def __init__(self, words: Mapping[str, Iterable[str]], *, whole_words: bool = True, ignore_diacritics=False):
        """`words` stand by category."""
        self.categories = tuple(words)
        self._folding = Folding(ignore_diacritics=ignore_diacritics)
        self._whole_words = whole_words
        self._automaton = ahocorasick.Automaton()
        # Of two categories the last counts.
        patterns = {self._pattern(word): category for category, listed in words.items() for word in listed}
        if not 1 <= len(patterns) <= MAX_WORDS:
            raise InputError(f"a word list has 1 to {MAX_WORDS:,} words, and this one has {len(patterns):,}")
        ordered = sorted(patterns)
        for word, following in zip(ordered, [*ordered[1:], ""], strict=True):
            # In this order a word that begins a longer one stands before such a word.
            self._automaton.add_word(word, (len(word), patterns[word], following.startswith(word)))
        self._automaton.make_automaton()
        self._longest = longest = max(map(len, patterns))
        # Each of its characters may stand behind a row of fillers.
        self.max_held_characters = (longest + 1) * (MAX_FILLERS + 1)
        self.context_characters = MAX_FILLERS + 2  # a row of fillers that is too long, and what stands before it

    def _pattern(self, word: str) -> str:
        folded = self._folding.fold(word).strip()
        if not folded:
            raise InputError(f"{word!r} has no visible character; leave it out of the word list")
        if len(folded) > MAX_WORD_CHARACTERS or "\0" in folded:
            raise InputError(f"{word[:80]!r} is longer than {MAX_WORD_CHARACTERS} characters; use a shorter part of it")
        return folded

    def scan(self, text: str, begin: int, *, final: bool) -> Scan:
        folded = self._folding.fold(text)
        found = list(self._automaton.iter(folded))
        open_from = len(folded) if final else self._open_from(folded)
        if not found and open_from == len(folded):
            return Scan([], len(text))
        # Of one character for each of the text no position has moved.
        origins = range(len(text)) if len(folded) == len(text) == len(text.translate(self._folding)) else None
        if origins is None:
            origins = self._folding.origins(text)
        spans = []
        for last, (length, category, _) in found:
            first = last + 1 - length
            if origins[first] >= begin and self._is_bounded(folded, first, last + 1, final=final):
                spans.append(Span(origins[first], origins[last] + 1, category))
        while open_from < len(folded) and origins[open_from] < begin:
            open_from = self._open_from(folded, open_from + 1)
        return Scan(spans, origins[open_from] if open_from < len(folded) else len(text))

    def _open_from(self, folded: str, first: int = 0) -> int:
        """Where the first match may begin that more text would complete; the length of the text if nowhere."""
        size, match = len(folded), self._automaton.match
        for index in range(max(first, size - self._longest), size):
            tail = folded[index:]
            if match(tail) and self._begins_word(folded, index) and not self._is_decided(tail):
                return index
        return size

    def _is_decided(self, tail: str) -> bool:
        """The end of the text is a word of the list, whatever follows, and begins no longer one."""
        if not self._automaton.exists(tail):
            return False
        _, _, begins_longer = self._automaton.get(tail)
        return not begins_longer and not (self._whole_words and is_spaced_letter(tail[-1]))

    def _is_bounded(self, folded: str, first: int, end: int, *, final: bool) -> bool:
        if not self._whole_words:
            return True
        if not self._begins_word(folded, first):
            return False
        if end < len(folded):
            return not (is_spaced_letter(folded[end - 1]) and is_spaced_letter(folded[end]))
        return final or not is_spaced_letter(folded[end - 1])

    def _begins_word(self, folded: str, first: int) -> bool:
        if not self._whole_words or first == 0:
            return True
        return not (is_spaced_letter(folded[first - 1]) and is_spaced_letter(folded[first]))
