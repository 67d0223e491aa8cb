"""The records of a probe's stream, in the order of their fields. `interop/probe/stream.py` of Sojourn reads them.

Sojourn has this file by a link, `interop/probe/records.py`: it imports nothing of the probe, and the probe nothing of
Sojourn.

Times are nanoseconds of the monotonic clock. A record has lengths, identities and times; none has a field for text of a
prompt or an answer. A change of any field changes FORMAT.
"""

import struct

import msgspec

FORMAT = 3
MAGIC = b"SOJOURN-PROBE-3\n"  # the beginning of every stream
FAMILY = b"SOJOURN-PROBE-"  # the beginning of every stream, whatever its version
LENGTH = struct.Struct(">I")  # before each record: its bytes
SUFFIX = ".probe"

Setting = int | float | str | bool | None


class Record(msgspec.Struct, array_like=True, gc=False):
    """A record of the stream: an array that begins with the tag."""


class Start(Record, tag="start"):
    """The first record of a process."""

    format: int
    role: str  # core: the engine's loop; front: the HTTP server
    pid: int
    boot_id: str | None
    monotonic_ns: int  # one reading of both clocks
    unix_ns: int
    engine: str
    engine_version: str
    probe_version: str
    settings: dict[str, Setting] = {}  # in force, under the names of Sojourn's settings
    shape: dict[str, Setting] = {}  # of the model: sizes from its config
    unseen: list[str] = []  # what this version of the server does not let the probe see, a sentence each


class Arrived(Record, tag="arrived"):
    """The scheduler has received a request. `handle` stands for it in the records of the core."""

    handle: int
    request: str  # the server's own identity
    queued_ns: int
    prompt_tokens: int
    max_tokens: int | None
    priority: int
    adapter: str | None


class Step(Record, tag="step"):
    """One step with tokens in it. Lists of `handles`, `new`, `past` and `given` have the same length."""

    number: int
    begin_ns: int  # schedule() was called
    planned_ns: int  # schedule() returned
    launched_ns: int  # the call that launches the model returned; 0: not seen
    next_ns: int  # the loop turned to the next schedule() or to a result; 0: not seen
    ready_ns: int  # the result was there: update_from_output() was called
    end_ns: int  # update_from_output() returned
    handles: list[int]
    new: list[int]  # tokens that are computed
    past: list[int]  # tokens before them
    given: list[int]  # tokens that each request got
    drafted: int  # draft tokens in the step
    waiting: int  # requests without a place after planning
    running: int  # requests with one
    refused: str  # why the first of them waits; "" if none waits
    budget: int  # tokens that the step could hold
    blocks: int  # KV blocks of the pool
    free: int  # of these, held by no request
    cached: int  # of these, with a known prefix, held or not
    admitted: list[int]  # handles that got a place in this step
    hits: list[int]  # of each of these: tokens that were computed before
    preempted: list[int]  # handles that lost their place in this plan
    preempted_tokens: list[int]  # of each of these: tokens that were computed
    preempted_for: list[int]  # of each of these: the handle that needed the blocks; 0: not seen


class Ended(Record, tag="ended"):
    """A request has left the scheduler."""

    handle: int
    ended_ns: int
    reason: str


class Handled(Record, tag="handled"):
    """What the front did for a request of the core. 0: not seen."""

    request: str  # the server's own identity
    encoded_ns: int  # it was given to the core
    first_received_ns: int  # its first tokens came from the core
    first_decoded_ns: int  # its first tokens were text
    last_received_ns: int
    last_decoded_ns: int


class Call(Record, tag="call"):
    """One HTTP request, at its end."""

    request: str  # X-Request-Id: the client's, or one that the probe made
    arrived_ns: int
    first_written_ns: int  # the first part of the body was handed to the socket; 0: none was
    written_ns: int  # the last part
    finished_ns: int
    status: int
    writes: int
    writing_ns: int  # in calls that hand parts of the body to the socket
    left: bool  # the client closed the connection before the end
    streamed: bool
    session: str | None
    traceparent: str | None


class KvAsked(Record, tag="kv?"):
    """The full blocks of a request's prompt, from its beginning on. A hash is 64 bits of the server's own: each of all
    tokens up to the end of its block."""

    handle: int
    prompt_tokens: int
    block_size: int
    reads: bool  # it may read the cache
    hashes: list[int]


class KvAllocated(Record, tag="kv+"):
    """One allocation: a request got blocks. The first one of a request is its lookup, before what follows here."""

    ns: int
    handle: int
    removed: list[int]  # cached blocks of others whose room it took
    begin: int  # place in its sequence of the first block that
    stored: list[int]  # blocks that became known with this one, from `begin` on


class KvMarks(Record, tag="kv%"):
    """Marks of consecutive tokens of a request: see `token_marks`."""

    handle: int
    begin: int  # the first marked token
    marks: list[int]
    is_end: bool  # the request has ended, and computed this; its prompt was marked before


class KvRemoved(Record, tag="kv-"):
    """Blocks of KV are no longer known, and no allocation took their room; all of them where `hashes` is None."""

    ns: int
    hashes: list[int] | None


class Sample(Record, tag="sample"):
    """One second of the process and its machine. Each number counts since the beginning of its process or machine."""

    ns: int
    cpu_ns: int  # of all threads; of a core with the processes that it has started
    queued_ns: int  # of the same threads: they could run, and had no core
    rss_bytes: int  # held now
    loop_cpu_ns: int  # of the main thread
    loop_queued_ns: int
    loop_involuntary_switches: int  # another thread got its core
    machine_busy_ns: int  # of all CPUs
    machine_steal_ns: int  # of all CPUs, had by other machines
    machine_whole_ns: int  # of all CPUs, idle time included


class Dropped(Record, tag="dropped"):
    """Records that were lost since the start because the queue was full or the disk refused them."""

    ns: int
    records: int
