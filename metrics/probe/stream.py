"""The stream of `sojourn-probe`: its records and its files. The probe is a package of its own, which this one does not
import; a test compares both lists of fields."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from metrics.errors import RunDataError

FORMAT = 2
MAGIC = b"SOJOURN-PROBE-2\n"
FAMILY = b"SOJOURN-PROBE-"  # of the magic of every version
LENGTH = struct.Struct(">I")
SUFFIX = ".probe"
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


class KvStored(Record, tag="kv+"):
    ns: int
    hashes: list[int]
    parent: int | None
    block_size: int


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
    Start | Arrived | Step | Ended | Handled | Call | KvStored | KvRemoved | Sample | Dropped
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
    kv: list[KvStored | KvRemoved] = field(default_factory=list)
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
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RunDataError(f"{file} cannot be read: {error.strerror}") from None
    if not content.startswith(MAGIC[: len(content)]):
        what = "of another version of sojourn-probe" if content.startswith(FAMILY) else "no stream of sojourn-probe"
        raise RunDataError(f"{file} is {what}; this version reads format {FORMAT}")
    stream: Stream | None = None
    at = len(MAGIC)
    try:
        while at + LENGTH.size <= len(content):
            (size,) = LENGTH.unpack_from(content, at)
            at += LENGTH.size
            if at + size > len(content):
                break  # its process is about to write the rest, or was killed
            record = _DECODER.decode(content[at : at + size])
            at += size
            if isinstance(record, Start):
                stream = Stream(record)
            elif stream is not None:
                _keep(stream, record)
    except msgspec.DecodeError as error:
        raise RunDataError(f"{file} is damaged at byte {at:,}: {error}") from None
    return stream


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
        case KvStored() | KvRemoved():
            stream.kv.append(record)
