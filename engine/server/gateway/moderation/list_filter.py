"""Lists on an output: which of its text may be shown, what replaces a match, and where a match ends the output."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from sojourn.engine.server.gateway.moderation.scanner import Scanner, TextList
from sojourn.engine.server.gateway.moderation.verdict import Span

Action = Literal["block", "redact", "flag"]


class ListRule(NamedTuple):
    """A list and what happens where it matches. `replacement` is for redact."""

    listed: TextList
    action: Action
    replacement: str = ""


class Segment(NamedTuple):
    """Characters `begin` to `end` of the output, and what is shown of them."""

    begin: int
    end: int
    shown: str
    is_replaced: bool = False


class ListFilter:
    """Releases the text of one output, as soon as no match can begin in it.

    The released text depends on the whole text alone, not on the parts in which it comes. A match of a rule that blocks
    ends it: of all such matches the one that begins first. A row of matches that overlap is replaced as one. Rules
    that flag hold nothing back.
    """

    def __init__(self, rules: Sequence[ListRule]):
        self.is_blocked = False
        self.counts: dict[tuple[str, Action], int] = {}  # category and action → matches so far
        self._rules = [(rule, Scanner(rule.listed)) for rule in rules]
        self._pending = ""
        self._begin = 0  # of the pending text, in the whole
        self._blocks: list[Span] = []
        self._redactions: list[tuple[Span, str]] = []

    @property
    def num_held_characters(self) -> int:
        return len(self._pending)

    def push(self, text: str, *, final: bool = False) -> list[Segment]:
        """What this text allows to be shown, in order. `final`: the output ends with it. Nothing follows a block."""
        self._pending += text
        size = self._begin + len(self._pending)
        open_from = size
        for rule, scanner in self._rules:
            found = scanner.push(text, final=final)
            if rule.action != "flag":
                open_from = min(open_from, scanner.open_from)
            if rule.action == "block":
                self._blocks += found
            elif rule.action == "redact":
                self._redactions += [(span, rule.replacement) for span in found]
            else:
                self._count("flag", found)
        first_block = min(self._blocks, key=lambda span: span.begin, default=None)
        if first_block is None or first_block.begin > open_from:
            return self._release(open_from)
        self.is_blocked = True
        self._count("block", [first_block])
        segments = self._release(first_block.begin, ends=True)
        self._pending = ""
        return segments

    def _count(self, action: Action, spans: Sequence[Span]) -> None:
        for span in spans:
            key = (span.category, action)
            self.counts[key] = self.counts.get(key, 0) + 1

    def _release(self, end: int, *, ends: bool = False) -> list[Segment]:
        """The text before `end`, less a row of redactions that more text may lengthen."""
        rows = self._rows(end)
        if rows and rows[-1].end > end and not ends:
            end = rows.pop().begin
        segments, position = [], self._begin
        for row in rows:
            if row.begin > position:
                segments.append(Segment(position, row.begin, self._text(position, row.begin)))
            segments.append(row)
            position = row.end
        if position < end:
            segments.append(Segment(position, end, self._text(position, end)))
            position = end
        self._count("redact", [span for span, _ in self._redactions if span.begin < position])
        self._redactions = [entry for entry in self._redactions if entry[0].begin >= position]
        self._pending = self._pending[position - self._begin :]
        self._begin = position
        return segments

    def _rows(self, end: int) -> list[Segment]:
        """Matches that begin before `end`, those that overlap as one."""
        rows: list[Segment] = []
        for span, replacement in sorted(entry for entry in self._redactions if entry[0].begin < end):
            if rows and span.begin < rows[-1].end:
                last = rows.pop()
                rows.append(Segment(last.begin, max(last.end, span.end), last.shown, True))
            else:
                rows.append(Segment(span.begin, span.end, replacement, True))
        return rows

    def _text(self, begin: int, end: int) -> str:
        return self._pending[begin - self._begin : end - self._begin]
