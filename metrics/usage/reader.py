"""Usage files → one record a call. A pure function of the files: torn and repeated lines change nothing."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.usage.files import is_being_written, life_of, usage_files
from sojourn.metrics.usage.record import Begin, End, Progress, UsageRecord, call_life, decode


@dataclass(frozen=True, slots=True)
class Usage:
    """The calls of a folder, in order of their arrival."""

    records: list[UsageRecord]
    unreadable_lines: int  # such as the last one of a server that was killed while it wrote


@dataclass(slots=True)
class _Lines:
    """What the lines of all files say of each call."""

    begun: dict[str, UsageRecord] = field(default_factory=dict)
    ended: dict[str, UsageRecord] = field(default_factory=dict)
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    unreadable: int = 0

    def take(self, content: bytes) -> None:
        for line in filter(None, content.split(b"\n")):
            try:
                said = decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.unreadable += 1
                continue
            if isinstance(said, Begin):
                self.begun[said.record.call] = said.record
            elif isinstance(said, End):
                self.ended[said.record.call] = said.record
            elif isinstance(said, Progress):
                self.progress |= said.tokens

    def records(self, alive: set[str]) -> list[UsageRecord]:
        calls = dict(self.ended)
        for call, record in self.begun.items():
            if call not in calls:
                calls[call] = self._without_end(record, alive)
        return sorted(calls.values(), key=lambda record: (record.time, record.call))

    def _without_end(self, record: UsageRecord, alive: set[str]) -> UsageRecord:
        cached, output = self.progress.get(record.call, (0, 0))
        status = "open" if call_life(record.call) in alive else "interrupted"
        return msgspec.structs.replace(record, status=status, cached_tokens=cached, output_tokens=output)


def read_usage(folder: Path) -> Usage:
    """All calls of a folder, also while servers write there. Raises RunDataError where a file cannot be read.

    A call without an end is `open` where its server lives on this host, and `interrupted` where it does not.
    """
    lines, alive, read = _Lines(), set(), set()
    try:
        # Again until no file is new: a server that goes on in another file locks that one first.
        while fresh := [file for file in usage_files(folder) if file not in read]:
            # All locks before the first line: who dies in between has written its lines before we read them.
            alive |= {life_of(file) for file in fresh if is_being_written(file)}
            for file in fresh:
                lines.take(file.read_bytes())
            read.update(fresh)
    except OSError as error:
        raise RunDataError(f"the usage in {folder} cannot be read: {error}") from None
    return Usage(lines.records(alive), lines.unreadable)
