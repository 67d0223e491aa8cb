"""The records of `sojourn-probe`, as its package has them.

It is a package of its own, which this one does not import; a test compares both lists of fields.
"""

import struct

import msgspec

FORMAT = 3
MAGIC = b"SOJOURN-PROBE-3\n"
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


class KvAsked(Record, tag="kv?"):
    handle: int
    prompt_tokens: int
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
