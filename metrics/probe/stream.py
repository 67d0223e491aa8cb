"""The stream of `sojourn-probe`: its records and its files. The probe is a package of its own, which this one does not
import; a test compares both lists of fields."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from metrics.errors import RunDataError

FORMAT = 3
MAGIC = b"SOJOURN-PROBE-3\n"
FAMILY = b"SOJOURN-PROBE-"  # of the magic of every version
LENGTH = struct.Struct(">I")
SUFFIX = ".probe"
PIECE_BYTES = 16 << 20  # that are read at a time
Setting = int | float | str | bool | None


class Record(msgspec.Struct, array_like=True, gc=False):
    """See `sojourn_probe.records` for the meaning of each field."""


class Start(Record, tag="start"):
    format: int
    role: str
    pid: int
    boot_id: str | None
    monotonic_ns: int
    unix_ns: int
    engine: str
    engine_version: str
    probe_version: str
    settings: dict[str, Setting] = {}
    shape: dict[str, Setting] = {}
    unseen: list[str] = []


class Arrived(Record, tag="arrived"):
    handle: int
    request: str
    queued_ns: int
    prompt_tokens: int
    max_tokens: int | None
    priority: int
    adapter: str | None


class Step(Record, tag="step"):
    number: int
    begin_ns: int
    planned_ns: int
    launched_ns: int
    next_ns: int
    ready_ns: int
    end_ns: int
    handles: list[int]
    new: list[int]
    past: list[int]
    given: list[int]
    drafted: int
    waiting: int
    running: int
    refused: str
    budget: int
    blocks: int
    free: int
    cached: int
    admitted: list[int]
    hits: list[int]
    preempted: list[int]
    preempted_tokens: list[int]
    preempted_for: list[int]


class Ended(Record, tag="ended"):
    handle: int
    ended_ns: int
    reason: str


class Handled(Record, tag="handled"):
    request: str
    encoded_ns: int
    first_received_ns: int
    first_decoded_ns: int
    last_received_ns: int
    last_decoded_ns: int


class Call(Record, tag="call"):
    request: str
    arrived_ns: int
    first_written_ns: int
    written_ns: int
    finished_ns: int
    status: int
    writes: int
    writing_ns: int
    left: bool
    streamed: bool
    session: str | None
    traceparent: str | None


class KvAsked(Record, tag="kv?"):
    handle: int
    block_size: int
    reads: bool
    hashes: list[int]


class KvAllocated(Record, tag="kv+"):
    ns: int
    handle: int
    removed: list[int]
    begin: int
    stored: list[int]


class KvMarks(Record, tag="kv%"):
    handle: int
    begin: int
    marks: list[int]
    is_end: bool


class KvRemoved(Record, tag="kv-"):
    ns: int
    hashes: list[int] | None


class Sample(Record, tag="sample"):
    ns: int
    cpu_ns: int
    queued_ns: int
    rss_bytes: int
    loop_cpu_ns: int
    loop_queued_ns: int
    loop_involuntary_switches: int
    machine_busy_ns: int
    machine_steal_ns: int
    machine_whole_ns: int


class Dropped(Record, tag="dropped"):
    ns: int
    records: int


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
    kv: list[KvAsked | KvAllocated | KvMarks | KvRemoved] = field(default_factory=list)
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
            stream.kv.append(record)
