"""Checks of an output that need sentences: the text is judged in windows, one after the other."""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from sojourn.engine.server.gateway.moderation.list_filter import Segment
from sojourn.engine.server.gateway.moderation.profile import Judgement, Profile

_SENTENCE_END = re.compile(r"[.!?。！？…][\"'”’)\]]*\s|[。！？]|\n\s*\n")
SHORTEST_SHARE = 4  # a window ends with the first sentence after this part of its longest size


class Window(NamedTuple):
    segments: list[Segment]
    verdict: asyncio.Task[Judgement]


class WindowJudge:
    """Judges the text of one output in windows, each with the end of the text before it as its context.

    A window ends with the first sentence that ends behind a fourth of `window_characters`, or there at the latest: the
    windows depend on the text alone. With `holds` a window is released after its verdict, and those before it; else
    text is released at once, and a verdict that blocks stops what comes after it.
    """

    def __init__(self, profile: Profile, updated: Callable[[], None]):
        """`updated` is called whenever a verdict is there."""
        self.is_blocked = False
        self.judged_to = 0  # characters of the output, so far
        self._profile = profile
        self._rules = profile.window_rules
        # No rule that only counts may delay a text.
        self._holds = profile.holds and any(rule.action == "block" for rule in self._rules)
        self._updated = updated
        self._open: list[Segment] = []  # in no window yet
        self._windows: deque[Window] = deque()  # without a verdict, or behind one without
        self._context = ""
        self._released: list[Segment] = []
        self._is_final = False

    @property
    def is_done(self) -> bool:
        """All text was added, and all verdicts are there."""
        return self.is_blocked or (self._is_final and not self._windows)

    def add(self, segments: list[Segment], *, final: bool) -> None:
        """Text that follows. `final`: no more does."""
        self._is_final = self._is_final or final
        self._open += segments
        if not self._holds:
            self._released += segments
        while (size := self._window_size()) is not None:
            window, self._open = _split(self._open, size)
            text = "".join(segment.shown for segment in window)
            judged = self._profile.judge(self._context + text, "output", self._rules)
            verdict = asyncio.create_task(judged, name="moderation of a window")
            verdict.add_done_callback(lambda _: self._updated())
            self._windows.append(Window(window, verdict))
            context = self._profile.window_characters // SHORTEST_SHARE
            self._context = (self._context + text)[-context:]

    def take(self) -> list[Segment]:
        """The text that may be shown now. Raises ModerationFailed for a window without a verdict that needs one."""
        while self._windows and self._windows[0].verdict.done() and not self.is_blocked:
            window = self._windows.popleft()
            self.judged_to = window.segments[-1].end
            if window.verdict.result().blocked:
                self.is_blocked = True
                if not self._holds:
                    self._released.clear()
            elif self._holds:
                self._released += window.segments
        released, self._released = self._released, []
        return released

    def close(self) -> None:
        for window in self._windows:
            if not window.verdict.done():
                window.verdict.cancel()
            elif not window.verdict.cancelled():
                window.verdict.exception()  # nobody asks for it any more: asyncio would report it
        self._windows.clear()

    def _window_size(self) -> int | None:
        """Characters of the next window; None while it is not complete."""
        text, longest = "".join(segment.shown for segment in self._open), self._profile.window_characters
        end = _SENTENCE_END.search(text, longest // SHORTEST_SHARE)
        if end is not None and end.end() <= longest:
            return end.end()
        if len(text) >= longest:
            return longest
        return len(text) if self._is_final and text else None


def _split(segments: list[Segment], size: int) -> tuple[list[Segment], list[Segment]]:
    """The first `size` shown characters, and the rest. A replacement stays whole, in the first part."""
    first: list[Segment] = []
    for index, segment in enumerate(segments):
        if len(segment.shown) > size and not segment.is_replaced:
            if size:
                first.append(Segment(segment.begin, segment.begin + size, segment.shown[:size]))
            rest = Segment(segment.begin + size, segment.end, segment.shown[size:])
            return first, [rest, *segments[index + 1 :]]
        if size <= 0:
            return first, segments[index:]
        first.append(segment)
        size -= len(segment.shown)
    return first, []
