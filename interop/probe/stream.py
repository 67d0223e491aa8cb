"""The streams of `sojourn-probe`: its files, and what is in them."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sojourn.interop.probe.prefixes import Prefixes
from sojourn.interop.probe.records import (
    FAMILY,
    FORMAT,
    LENGTH,
    MAGIC,
    SUFFIX,
    Arrived,
    Call,
    Dropped,
    Ended,
    Handled,
    KvAllocated,
    KvAsked,
    KvMarks,
    KvRemoved,
    Record,
    Sample,
    Start,
    Step,
)
from sojourn.metrics.errors import RunDataError

PIECE_BYTES = 16 << 20  # that are read at a time

_DECODER = msgspec.msgpack.Decoder(
    Start | Arrived | Step | Ended | Handled | Call | KvAsked | KvAllocated | KvMarks | KvRemoved | Sample | Dropped
)


@dataclass(slots=True)
class Stream:
    """One process's records, each kind in its order."""

    start: Start
    arrived: list[Arrived] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    handled: list[Handled] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    prefixes: Prefixes = field(default_factory=Prefixes, compare=False)  # what the records of blocks add up to
    samples: list[Sample] = field(default_factory=list)
    dropped: int = 0


def is_probe_folder(folder: Path) -> bool:
    return folder.is_dir() and next(folder.glob(f"*{SUFFIX}"), None) is not None


def read_streams(folder: Path) -> list[Stream]:
    """The streams of a folder, in the order in which their processes began. Raises RunDataError."""
    found = [stream for file in sorted(folder.glob(f"*{SUFFIX}")) if (stream := read_stream(file)) is not None]
    return sorted(found, key=lambda stream: stream.start.monotonic_ns)


def read_stream(file: Path) -> Stream | None:
    """One stream up to its last whole record; None where its process has not written the first one yet.

    Raises RunDataError for a file of another version, or one that is damaged."""
    read = StreamFile(file)
    while read.take():
        pass
    return read.stream


@dataclass(slots=True)
class StreamFile:
    """A file that a process of the server still writes: each reading takes in what came since the one before."""

    path: Path
    stream: Stream | None = None
    at: int = 0  # bytes that are taken in

    def take(self, most_bytes: int = PIECE_BYTES) -> bool:
        """Takes in the whole records of the next bytes; False where there was none. Raises RunDataError."""
        if not self.at and not self._begin():
            return False
        content, at = self._next(most_bytes), 0
        while at + LENGTH.size <= len(content):
            (size,) = LENGTH.unpack_from(content, at)
            end = at + LENGTH.size + size
            if end > len(content):  # the piece ends here, or its process is about to write the rest, or was killed
                break
            try:
                record = _DECODER.decode(content[at + LENGTH.size : end])
            except msgspec.DecodeError as error:
                raise RunDataError(f"{self.path} is damaged at byte {self.at + at:,}: {error}") from None
            at = end
            if isinstance(record, Start):
                self.stream = Stream(record)
                self.stream.prefixes.caches = record.settings.get("prefix_caching") is not False
            elif self.stream is not None:
                _keep(self.stream, record)
        self.at += at
        if not at and len(content) == most_bytes:  # a record that is larger than a piece
            return self.take(2 * most_bytes)
        return at > 0

    def _begin(self) -> bool:
        """Whether the file's first bytes are there, and say that it is a stream."""
        content = self._next(len(MAGIC))
        if not content.startswith(MAGIC[: len(content)]):
            what = "of another version" if content.startswith(FAMILY) else "no stream"
            raise RunDataError(f"{self.path} is {what} of sojourn-probe; this version reads format {FORMAT}")
        self.at = len(content) if len(content) == len(MAGIC) else 0
        return self.at > 0

    def _next(self, most_bytes: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.at)
                return file.read(most_bytes)
        except OSError as error:
            raise RunDataError(f"{self.path} cannot be read: {error.strerror}") from None


def _keep(stream: Stream, record: Record) -> None:
    match record:
        case Step():
            stream.steps.append(record)
        case Arrived():
            stream.arrived.append(record)
        case Ended():
            stream.ended.append(record)
        case Handled():
            stream.handled.append(record)
        case Call():
            stream.calls.append(record)
        case Sample():
            stream.samples.append(record)
        case Dropped():
            stream.dropped = record.records
        case KvAsked() | KvAllocated() | KvMarks() | KvRemoved():
            stream.prefixes.take(record)
