"""What a check of a text says, and the Protocol of everything that checks texts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sojourn.metrics.errors import SojournError

Kind = Literal["input", "output"]


class ModerationFailed(SojournError):
    """A check gave no verdict: no connection, no answer in time, an answer of another shape, or a fault of its code."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A match: characters `begin` to `end` of the checked text."""

    begin: int
    end: int
    category: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a check to one text."""

    flagged: frozenset[str] = frozenset()  # categories
    scores: Mapping[str, float] = field(default_factory=dict)  # category → 0 to 1; of lists 1 where they match
    spans: tuple[Span, ...] = ()  # of lists alone


class Moderator(Protocol):
    """Checks texts. A new kind of check implements this and is a line of `KINDS` in file.py."""

    name: str  # in the moderation file
    categories: tuple[str, ...]  # that its verdicts may have, no others
    allows_on_failure: bool  # a text without a verdict passes

    async def check(self, text: str, kind: Kind) -> Verdict:
        """Never blocks the event loop for more than a few milliseconds. Raises ModerationFailed."""
        ...

    async def close(self) -> None:
        """Ends connections and workers. Checks under way may fail."""
        ...


def merge(verdicts: list[Verdict]) -> Verdict:
    """The verdict of several checks of one text: the highest score of each category."""
    scores: dict[str, float] = {}
    for verdict in verdicts:
        for category, score in verdict.scores.items():
            scores[category] = max(score, scores.get(category, 0.0))
    flagged = frozenset().union(*(verdict.flagged for verdict in verdicts))
    return Verdict(flagged, scores, tuple(span for verdict in verdicts for span in verdict.spans))
