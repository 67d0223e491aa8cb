"""One request as the schedule has it, and the schedule on disk."""

import hashlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.metrics.records.tables import arrow_type
from sojourn.metrics.run.segments import discard_segments, replace_in_pieces, replace_table, sources

SCHEDULE = "schedule"
SCHEDULE_FILE = f"{SCHEDULE}.parquet"
SESSION_BEGIN = -1  # in `after`: the due time of the first request of the session


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of the schedule.

    A `prelude` request is sent before the schedule starts, as soon as the one before has ended; its offset is 0.
    Whether another counts is known once it was due: see `after_warmup`.
    """

    index: int
    request_id: str
    due_offset_ns: int | None  # from the start; None if it depends on a reply: see `pause_ns`
    klass: str
    tenant: str
    session_id: str
    turn: int
    prompt_tokens: int
    max_tokens: int
    shared_prefix: int  # which of the class's prefixes; -1 for none
    shared_prefix_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    ignore_eos: bool
    seed: int
    prelude: bool
    priority: int = 0  # absent in older schedules, as are all fields below
    block_ids: tuple[int, ...] = ()  # of the trace's blocks that the prompt is made of
    block_tokens: int = 0  # that one of them is
    content: str = ""  # JSON of the recorded text or messages that are sent as they are
    variant: int = -1  # which of the class's; -1 for none
    pause_ns: int = 0  # from the end of the turn before, or of the slot's last request, to the due time
    message_tokens: int = 0  # that a later turn adds; `prompt_tokens` counts all, with answers at full length
    patience_ns: int | None = None  # from its due time; then the client leaves
    patience_for: str = "first_token"
    after: tuple[int, ...] = ()  # indexes that it waits for, SESSION_BEGIN among them; () of the turn before, if any


SCHEMA = pa.schema([(field.name, arrow_type(field.type)) for field in fields(ScheduledRequest)])


def chains_of(schedule: list[ScheduledRequest]) -> list[list[ScheduledRequest]]:
    """Requests that follow each other: a session with its sub-agents, or one request alone. In order of the
    schedule."""
    chains: list[list[ScheduledRequest]] = []
    for request in schedule:
        if request.turn or request.after:
            chains[-1].append(request)
        else:
            chains.append([request])
    return chains


def waits_of(chain: list[ScheduledRequest]) -> dict[int, tuple[int, ...]]:
    """By index of each request of a chain: the indexes that it waits for, all of them before it."""
    last: dict[str, int] = {}
    found = {}
    for request in chain:
        before = last.get(request.session_id) if request.turn else None
        found[request.index] = request.after or (() if before is None else (before,))
        last[request.session_id] = request.index
    return found


def save_schedule(run_dir: Path, schedule: list[ScheduledRequest], scenario: Scenario) -> None:
    """Writes `schedule.parquet`, before anything is sent."""
    replace_table(run_dir / SCHEDULE_FILE, _table(schedule, scenario.name, scenario.measure.warmup_s))


def save_segment(run_dir: Path, requests: list[ScheduledRequest], scenario: str, name: str) -> None:
    """Writes a part of a schedule that grows while it is sent, as tasks decide."""
    replace_table(run_dir / f"{SCHEDULE}.parts" / f"{name}.parquet", _table(requests, scenario, 0.0))


def compact_schedule(run_dir: Path) -> None:
    """Makes one file of the parts, in order of the index."""
    files, final = schedule_files(run_dir), run_dir / SCHEDULE_FILE
    if files and files != [final]:
        whole = pa.concat_tables([pq.read_table(file) for file in files]).sort_by("index")
        replace_in_pieces(final, whole.schema, [whole], holds=files)
    discard_segments(run_dir, SCHEDULE)


def schedule_files(run_dir: Path) -> list[Path]:
    return sources(run_dir, SCHEDULE)


def _table(requests: list[ScheduledRequest], scenario: str, warmup_s: float) -> pa.Table:
    schema = SCHEMA.with_metadata({"scenario": scenario, "warmup_s": repr(warmup_s)})
    return pa.Table.from_pylist([asdict(each) for each in requests], schema=schema)


def schedule_digest(schedule: list[ScheduledRequest]) -> str:
    digest, encoder = hashlib.sha256(), msgspec.json.Encoder(enc_hook=lambda number: number.item())  # NumPy's
    for request in schedule:
        fields = asdict(request)
        if not request.after:
            del fields["after"]  # the digest of a schedule without sub-agents stays
        digest.update(encoder.encode(fields))
    return digest.hexdigest()[:16]


def read_schedule(run_dir: Path) -> tuple[list[ScheduledRequest], str]:
    """The saved schedule in order of the index, and the scenario's name."""
    parts = [read_requests(file) for file in schedule_files(run_dir)]
    return sorted((request for requests, _ in parts for request in requests), key=lambda each: each.index), parts[0][1]


def read_requests(file: Path) -> tuple[list[ScheduledRequest], str]:
    """The requests of one of `schedule_files`, and the scenario's name."""
    table = pq.read_table(file)
    name = table.schema.metadata[b"scenario"].decode()
    table = table.select([name for name in table.column_names if name in SCHEMA.names])  # older ones had more
    rows = ({name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
            for row in table.to_pylist())  # fmt: skip
    return [ScheduledRequest(**row) for row in rows], name


def read_warmup_s(run_dir: Path) -> float:
    """`measure.warmup_s` of the saved schedule; 0 for older schedules without it."""
    return float(pq.read_schema(schedule_files(run_dir)[0]).metadata.get(b"warmup_s", b"0"))
