"""Which patterns can match in a large text at all: by words that each match of a pattern has in it.

A word is looked for at the speed of memory, a pattern a hundred times slower. The words are taken from the pattern
itself, so that none can be missing; a pattern without such a word may match anywhere.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from sojourn.interop.held.given import Line

SHORTEST = 3  # letters of a word: shorter ones are in every line


@cache
def words_of(pattern: "re.Pattern[str]") -> tuple[str, ...]:
    """Words of which every match has one; () where no such words are known."""
    if pattern.flags & re.IGNORECASE:
        return ()
    import re._parser as parser  # private, and the one that knows what Python's patterns mean

    found = _words(parser.parse(pattern.pattern, pattern.flags))
    return found if found and min(map(len, found)) >= SHORTEST else ()


def may_match(pattern: "re.Pattern[str]", text: str) -> bool:
    words = words_of(pattern)
    return not words or any(word in text for word in words)


def found_in(pattern: "re.Pattern[str]", text: str) -> bool:
    """Whether it matches anywhere."""
    return may_match(pattern, text) and pattern.search(text) is not None


def lines_with(lines: Iterable[Line], patterns: Iterable["re.Pattern[str]"], text: str) -> Iterator[Line]:
    """The lines in which one of the patterns may match; `text` holds all of them."""
    words: set[str] = set()
    for pattern in patterns:
        if not words_of(pattern):
            yield from lines
            return
        words.update(word for word in words_of(pattern) if word in text)
    chosen = tuple(words)
    yield from (line for line in lines if any(word in line.text for word in chosen))


def _words(parts: Any) -> tuple[str, ...]:
    """The best alternatives of a sequence: those whose shortest word is longest."""
    best: tuple[str, ...] = ()
    run = ""
    for kind, value in [*parts, ("END", None)]:
        name = str(kind)
        if name == "LITERAL":
            run += chr(value)
            continue
        best, run = _longer(best, (run,) if run else ()), ""
        if name == "SUBPATTERN":
            best = _longer(best, _words(value[-1]))
        elif name == "BRANCH":
            each = [_words(branch) for branch in value[1]]
            best = _longer(best, tuple(word for words in each for word in words) if all(each) else ())
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
            best = _longer(best, _words(value[2]))
    return best


def _longer(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return max(first, second, key=lambda words: min(map(len, words), default=0))
