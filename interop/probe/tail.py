"""The last minutes of a probe's streams, in memory: what a watch judges again and again while the server runs.

A reading takes in only what the server wrote since the one before. What no window can need any more is forgotten:
requests that ended before it, and steps before the first of those requests came.
"""

import bisect
from pathlib import Path

from sojourn.interop.probe.records import SUFFIX
from sojourn.interop.probe.stream import Stream, StreamFile

LONGEST_S = 600.0  # of a request: its steps are kept no longer, and one that takes longer is left out


class ProbeTail:
    """Owns what was read of a folder's streams."""

    def __init__(self, folder: Path, keep_s: float):
        self._folder, self._keep_ns = folder, int(keep_s * 1e9)
        self._files: dict[Path, StreamFile] = {}

    def read(self) -> list[Stream]:
        """The streams with the last seconds in them, in the order in which their processes began. Raises
        RunDataError."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            file = self._files.setdefault(path, StreamFile(path))
            while file.take():
                if file.stream is not None:
                    forget(file.stream, last_ns(file.stream), self._keep_ns)
        found = [file.stream for file in self._files.values() if file.stream is not None]
        found.sort(key=lambda stream: stream.start.monotonic_ns)
        now_ns = max(map(last_ns, found), default=0)
        for stream in found:
            forget(stream, now_ns, self._keep_ns)
        last = {stream.start.role: stream for stream in found}  # an earlier one is of a server that was started again
        return [stream for stream in found if stream is last[stream.start.role] or stream.steps or stream.calls]


def last_ns(stream: Stream) -> int:
    """The moment of the last record; of the start where none follows it."""
    ends = (
        [each.end_ns for each in stream.steps[-1:]], [each.queued_ns for each in stream.arrived[-1:]],
        [each.ended_ns for each in stream.ended[-1:]], [each.finished_ns for each in stream.calls[-1:]],
        [each.ns for each in stream.samples[-1:]],
    )  # fmt: skip
    return max((ns for each in ends for ns in each), default=stream.start.monotonic_ns)


def forget(stream: Stream, now_ns: int, keep_ns: int) -> None:
    """Drops what is older than `keep_ns`, but for what requests of that time need."""
    begin_ns, oldest_ns = now_ns - keep_ns, now_ns - int(LONGEST_S * 1e9)
    ended = {each.handle: each.ended_ns for each in stream.ended}
    stream.arrived = [
        each for each in stream.arrived
        if each.queued_ns >= oldest_ns and ended.get(each.handle, now_ns) >= begin_ns
    ]  # fmt: skip
    kept = {each.handle for each in stream.arrived}
    stream.ended = [each for each in stream.ended if each.handle in kept]
    first_ns = min([begin_ns, *(each.queued_ns for each in stream.arrived)])
    place = bisect.bisect_left(stream.steps, first_ns, key=lambda step: step.end_ns)
    stream.steps = stream.steps[max(0, place - 1) :]  # what came then may have waited for the step before it
    stream.calls = [each for each in stream.calls if each.finished_ns >= begin_ns]
    stream.handled = [each for each in stream.handled if (each.last_decoded_ns or each.encoded_ns) >= begin_ns]
    stream.samples = [each for each in stream.samples if each.ns >= begin_ns]
    stream.prefixes.forget(kept, begin_ns)
