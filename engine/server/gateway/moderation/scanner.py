"""Lists over a text that grows: each match is reported once, as soon as more text cannot change it."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from sojourn.engine.server.gateway.moderation.verdict import Span

SLICE_CHARACTERS = 4096  # of a long text at a time: other threads run between two slices


class Scan(NamedTuple):
    """What a list finds in a part of a text."""

    spans: list[Span]  # matches that more text does not change
    open_from: int  # the first place where more text may make, lengthen or end a match; the length if there is none


class TextList(Protocol):
    """Words or expressions that texts are searched for."""

    categories: tuple[str, ...]
    context_characters: int  # before a place that decide whether a match may begin there
    max_held_characters: int  # the longest text for which it is open whether a match is in it

    def scan(self, text: str, begin: int, *, final: bool) -> Scan:
        """Searches for matches that begin at `begin` or after it. `final`: the text ends here."""
        ...


class Scanner:
    """One list over one text that grows. Positions are those of the whole text."""

    def __init__(self, listed: TextList):
        self.open_from = 0  # no match is open that begins before it
        self._list = listed
        self._window = ""  # the open text, behind its context
        self._window_begin = 0

    def push(self, text: str, *, final: bool) -> list[Span]:
        """The matches that this text decides. `final`: the text ends with it."""
        self._window += text
        begin = self._window_begin
        scan = self._list.scan(self._window, self.open_from - begin, final=final)
        decided = [span for span in scan.spans if span.begin < scan.open_from]
        self.open_from = begin + scan.open_from
        dropped = max(0, scan.open_from - self._list.context_characters)
        self._window, self._window_begin = self._window[dropped:], begin + dropped
        return [Span(begin + span.begin, begin + span.end, span.category) for span in decided]


def matches(listed: TextList, text: str) -> Iterator[Span]:
    """All matches in a whole text."""
    scanner = Scanner(listed)
    for begin in range(0, max(1, len(text)), SLICE_CHARACTERS):
        yield from scanner.push(text[begin : begin + SLICE_CHARACTERS], final=begin + SLICE_CHARACTERS >= len(text))
