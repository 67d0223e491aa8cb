"""The output of one sequence behind its moderation: what the client gets of it, when, and why it ended."""

import time
from collections import deque
from typing import NamedTuple

import msgspec

from sojourn.engine.server.core.sequence import Entry, Hold, SequenceStream, TextPiece
from sojourn.engine.server.gateway.moderation.list_filter import ListFilter, Segment
from sojourn.engine.server.gateway.moderation.profile import Profile
from sojourn.engine.server.gateway.moderation.refusal import CONTENT_FILTER, unavailable
from sojourn.engine.server.gateway.moderation.verdict import ModerationFailed
from sojourn.engine.server.gateway.moderation.windows import WindowJudge


class _Taken(NamedTuple):
    """A piece as it came from the sequence."""

    end: int  # of its text, in the whole
    hold: Hold


class ModeratedOutput:
    """Stands between a sequence and its call. `take` is that of the sequence, with moderated pieces."""

    def __init__(self, sequence: SequenceStream, profile: Profile):
        self.needs_no_more = False  # the core may drop the sequence
        self._sequence = sequence
        self._profile = profile
        self._filter = ListFilter(profile.list_rules)
        self._judge = WindowJudge(profile, sequence.updated.set) if profile.window_rules else None
        self._taken: deque[_Taken] = deque()
        self._entries: deque[tuple[Entry, int]] = deque()  # with the end of its text
        self._size = 0  # characters of the sequence so far
        self._replaced: list[Segment] = []
        self._finish_reason: str | None = None  # of the sequence, or of the block

    def take(self) -> TextPiece | None:
        """As `SequenceStream.take`. Raises ApiError also where a check that is needed gave no verdict."""
        begin_ns, released = time.monotonic_ns(), []
        if not self.needs_no_more and (piece := self._sequence.take()) is not None:
            begin_ns = time.monotonic_ns()
            released = self._add(piece, begin_ns)
        is_over = self.needs_no_more
        if self._judge is not None:
            try:
                released = self._judge.take()
            except ModerationFailed as failure:
                raise unavailable(failure) from None
            if self._judge.is_blocked:
                self._finish_reason = CONTENT_FILTER
                self.needs_no_more = True
            is_over = self._judge.is_done
        if not released and not is_over:
            return None
        return self._piece(released, is_over=is_over)

    def close(self) -> None:
        """The call is over: counts what flagged, and drops the checks under way."""
        for (category, action), number in self._filter.counts.items():
            self._profile.events.flag("output", category, action, number)
        self._filter.counts.clear()
        if self._judge is not None:
            self._judge.close()

    def _add(self, piece: TextPiece, taken_ns: int) -> list[Segment]:
        """What the lists let pass of it; the windows get that, too."""
        self._size += len(piece.text)
        self._taken.append(_Taken(self._size, Hold(self._sequence.text_source, taken_ns, taken_ns)))
        ends = [entry.text_offset for entry in piece.entries[1:]] + [self._sequence.num_characters]
        self._entries += zip(piece.entries, ends, strict=False)
        final = piece.finish_reason is not None
        segments = self._filter.push(piece.text, final=final)
        if self._filter.is_blocked:
            self._finish_reason, final = CONTENT_FILTER, True
        elif final:
            self._finish_reason = piece.finish_reason
        self.needs_no_more = final
        if self._judge is not None:
            self._judge.add(segments, final=final)
        return segments

    def _piece(self, released: list[Segment], *, is_over: bool) -> TextPiece:
        ends = is_over and self._finish_reason != CONTENT_FILTER
        end = self._size if ends else released[-1].end if released else 0
        self._sequence.hold = self._hold_until(end, is_over=is_over)._replace(released_ns=time.monotonic_ns())
        self._replaced += [segment for segment in released if segment.is_replaced]
        text = "".join(segment.shown for segment in released)
        entries = self._take_entries(end, ends=ends)
        if is_over:
            self._sequence.finish_reason = self._finish_reason
            if self._finish_reason == CONTENT_FILTER:
                self._sequence.stop_reason = None
        return TextPiece(self._sequence, text, entries, self._finish_reason if is_over else None)

    def _hold_until(self, end: int, *, is_over: bool) -> Hold:
        """The piece that the client waited for: the one with the last text that is released or was judged."""
        if self._judge is not None and self._judge.is_blocked:
            end = self._judge.judged_to
        elif is_over:
            return self._taken[-1].hold
        while len(self._taken) > 1 and self._taken[0].end < end:
            self._taken.popleft()
        return self._taken[0].hold

    def _take_entries(self, end: int, *, ends: bool) -> list[Entry]:
        """Tokens whose text is before `end`, less those of replaced text.

        A token without text may be a part of the next character, and waits for it.
        """
        number = len(self._entries) if ends else 0
        if not ends:
            for position, (entry, entry_end) in enumerate(self._entries, 1):
                if entry_end > end:
                    break
                if entry_end > entry.text_offset:
                    number = position
        released = []
        for _ in range(number):
            entry, entry_end = self._entries.popleft()
            if any(entry.text_offset < segment.end and segment.begin < entry_end for segment in self._replaced):
                continue
            shift = sum(
                len(segment.shown) - (segment.end - segment.begin)
                for segment in self._replaced
                if segment.end <= entry.text_offset
            )
            offset = entry.text_offset + shift
            released.append(entry if not shift else msgspec.structs.replace(entry, text_offset=offset))
        return released
