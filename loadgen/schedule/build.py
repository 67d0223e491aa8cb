"""A scenario and a seed give a schedule: when, what kind, how long. Pure, and fixed before anything is sent."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import cycle, repeat
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loadgen.scenario.arrivals import MAX_REQUESTS
from loadgen.scenario.faults import ScenarioError
from loadgen.scenario.scenario import Scenario
from loadgen.scenario.workload import RequestClass
from loadgen.schedule.arrivals import arrivals_rng, draw_arrivals
from loadgen.schedule.closed_loop import check_size, closed_loop, draw_pauses, enough
from loadgen.schedule.content import Contents
from loadgen.schedule.durations import NS_PER_S
from loadgen.schedule.lengths import draw_length
from loadgen.schedule.sessions import People
from loadgen.seeds import stable_seed
from metrics.run.segments import replace_table

SCHEDULE_FILE = "schedule.parquet"


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request as it is meant to be.

    With `prelude` it is sent before the schedule starts, as soon as the one before has ended; its offset is 0. Whether
    it counts is known once it was due: see `after_warmup`.
    """

    index: int
    request_id: str
    due_offset_ns: int | None  # from the start of the schedule; None where it hangs on a reply: see `pause_ns`
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
    priority: int = 0  # schedules that were written before it have none; so of all below
    block_ids: tuple[int, ...] = ()  # of the trace's blocks that the prompt is made of
    block_tokens: int = 0  # that one of them is
    content: str = ""  # JSON of the recorded text or messages that are sent as they are
    variant: int = -1  # which of the class's; -1 for none
    pause_ns: int = 0  # between the end of what it follows, the turn or its slot's request before, and its due time
    message_tokens: int = 0  # what a later turn adds; its `prompt_tokens` count all, answers at full length
    patience_ns: int | None = None  # from its due time; then the client leaves
    patience_for: str = "first_token"


SCHEMA = pa.schema([
    ("index", pa.int64()), ("request_id", pa.string()), ("due_offset_ns", pa.int64()), ("klass", pa.string()),
    ("tenant", pa.string()), ("session_id", pa.string()), ("turn", pa.int64()), ("prompt_tokens", pa.int64()),
    ("max_tokens", pa.int64()), ("shared_prefix", pa.int64()), ("shared_prefix_tokens", pa.int64()),
    ("temperature", pa.float64()), ("top_k", pa.int64()), ("top_p", pa.float64()), ("ignore_eos", pa.bool_()),
    ("seed", pa.int64()), ("prelude", pa.bool_()),
    ("priority", pa.int64()), ("block_ids", pa.list_(pa.int64())), ("block_tokens", pa.int64()),
    ("content", pa.string()), ("variant", pa.int64()), ("pause_ns", pa.int64()), ("message_tokens", pa.int64()),
    ("patience_ns", pa.int64()), ("patience_for", pa.string()),
])  # fmt: skip


def build_schedule(scenario: Scenario, seed: int, id_prefix: str) -> list[ScheduledRequest]:
    """All requests of a run in order of their due time, the prelude first. `id_prefix` tells runs apart."""
    arrival_rng = arrivals_rng(seed)
    class_rng, length_rng = (np.random.default_rng(stable_seed(seed, part)) for part in ("classes", "lengths"))
    closed = closed_loop(scenario.arrivals)
    if closed is None:
        offsets_s, rows = draw_arrivals(scenario.arrivals, arrival_rng)
        pauses_ns = repeat(0)
        _check_warmup(scenario, offsets_s[-1], offsets_s[0] + scenario.measure.warmup_s)
    else:
        check_size(scenario)
        _check_warmup(scenario, closed.duration_s or math.inf, scenario.measure.warmup_s)
        offsets_s, rows, pauses_ns = repeat(0.0), repeat(None), draw_pauses(scenario.arrivals, arrival_rng)
    contents, people = Contents(scenario, seed), People(seed)
    requests = [
        _request(step, (0.0, klass, None), seed, id_prefix, length_rng, True, contents)
        for step, klass in zip(range(scenario.measure.warmup_requests), cycle(scenario.workload.classes), strict=False)
    ]

    def chains() -> Iterator[list[ScheduledRequest]]:
        for offset_s, row, pause_ns in zip(offsets_s, rows, pauses_ns, strict=False):
            for klass in _classes(scenario, class_rng, contents.class_of(row)):
                entry = (offset_s, klass, row)
                first = _request(len(requests), entry, seed, id_prefix, length_rng, False, contents)
                if closed is not None:
                    first = replace(first, due_offset_ns=None, pause_ns=pause_ns)
                yield people.turns(first, klass, seed, id_prefix)

    for chain in chains() if closed is None else enough(scenario.arrivals, chains()):
        requests += chain
        if len(requests) > MAX_REQUESTS:
            raise ScenarioError([f"the load has more than {MAX_REQUESTS} requests, turns included; shorten it"])
    return requests


def chains_of(schedule: list[ScheduledRequest]) -> list[list[ScheduledRequest]]:
    """What is sent one after another: a session's turns, or one request alone. In order of the schedule."""
    chains: list[list[ScheduledRequest]] = []
    for request in schedule:
        if request.turn:
            chains[-1].append(request)
        else:
            chains.append([request])
    return chains


def _check_warmup(scenario: Scenario, last_s: float, measured_from_s: float) -> None:
    if last_s < measured_from_s:
        raise ScenarioError(
            [f"measure.warmup_s is {scenario.measure.warmup_s:g}, but the last arrival is due at "
             f"{last_s:.1f} s, so nothing would be measured; shorten the warm-up"]
        )  # fmt: skip


def save_schedule(run_dir: Path, schedule: list[ScheduledRequest], scenario: Scenario) -> None:
    """Writes `schedule.parquet`, before anything is sent."""
    schema = SCHEMA.with_metadata({"scenario": scenario.name, "warmup_s": repr(scenario.measure.warmup_s)})
    replace_table(run_dir / SCHEDULE_FILE, pa.Table.from_pylist([asdict(each) for each in schedule], schema=schema))


def schedule_digest(schedule: list[ScheduledRequest]) -> str:
    """Tells apart schedules that differ in anything."""
    digest, encoder = hashlib.sha256(), msgspec.json.Encoder(enc_hook=lambda number: number.item())  # NumPy's
    for request in schedule:
        digest.update(encoder.encode(request))
    return digest.hexdigest()[:16]


def read_schedule(run_dir: Path) -> tuple[list[ScheduledRequest], str]:
    """The saved schedule and the scenario's name."""
    table = pq.read_table(run_dir / SCHEDULE_FILE)
    table = table.select([name for name in table.column_names if name in SCHEMA.names])  # older ones had more
    rows = ({name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
            for row in table.to_pylist())  # fmt: skip
    return [ScheduledRequest(**row) for row in rows], table.schema.metadata[b"scenario"].decode()


def read_warmup_s(run_dir: Path) -> float:
    """`measure.warmup_s` of the saved schedule; 0 of one that was written before it was kept."""
    return float(pq.read_schema(run_dir / SCHEDULE_FILE).metadata.get(b"warmup_s", b"0"))


def _classes(scenario: Scenario, rng: np.random.Generator, named: RequestClass | None) -> list[RequestClass]:
    """Who sends at one arrival: the class that the trace's row names, if any."""
    if named is not None:
        return [named]
    classes = scenario.workload.classes
    if scenario.workload.each_arrival == "every_class":
        return classes
    weights = np.array([klass.weight for klass in classes])
    return [classes[rng.choice(len(classes), p=weights / weights.sum())]]


def _request(index, plan_entry, seed, id_prefix, rng, prelude, contents) -> ScheduledRequest:
    offset_s, klass, row = plan_entry
    row = None if prelude else contents.row_of(klass, row)
    prompt_tokens = draw_length(klass.prompt_tokens, row.prompt_tokens if row else None, rng)
    max_tokens = draw_length(klass.output_tokens, row.output_tokens if row else None, rng, "output_tokens")
    prefix = int(rng.integers(klass.num_shared_prefixes)) if klass.shared_prefix_tokens else -1
    request = ScheduledRequest(
        index=index, request_id=f"{id_prefix}-{index:06d}", due_offset_ns=round(offset_s * NS_PER_S),
        klass=klass.klass, tenant=klass.tenant, session_id="", turn=0,
        prompt_tokens=prompt_tokens, max_tokens=max_tokens, shared_prefix=prefix,
        shared_prefix_tokens=klass.shared_prefix_tokens, temperature=klass.temperature, top_k=klass.top_k,
        top_p=klass.top_p, ignore_eos=klass.ignore_eos, seed=stable_seed(seed, index) >> 1,
        prelude=prelude, priority=klass.priority,
    )  # fmt: skip
    return contents.fill(request, klass, row)
