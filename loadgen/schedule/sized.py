"""A scenario, or a trace, as the load that a server is sized for."""

from collections.abc import Sequence

import numpy as np

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.ideal_prefix_hits import segments_of
from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.loadgen.seeds import seeded_rng
from sojourn.loadgen.traces.reader import find_trace, read_trace
from sojourn.replay.fleet.traffic import TracedRequest
from sojourn.replay.sizing.load import Segment, SizedLoad

MOST_COPIES = 400
COPIED = "of a copy"  # of a trace's blocks: other prompts than those of the trace


def sized_load(scenario: Scenario, fewest: int, seed: int | None = None) -> SizedLoad:
    """At least `fewest` requests: a shorter scenario goes on with other draws, as if its process did. Without the
    warm-up. Raises ScenarioError."""
    seed = scenario.measure.seed if seed is None else seed
    scenario = scenario.model_copy(
        update={"measure": scenario.measure.model_copy(update={"warmup_requests": 0, "warmup_s": 0.0})}
    )
    found: list[tuple[int, ScheduledRequest, float]] = []  # the copy, the request, what its offset begins from
    begin_s = 0.0
    for copy in range(MOST_COPIES):
        schedule = build_schedule(scenario, seed + copy, id_prefix=f"size{copy}")
        if not schedule:
            raise ScenarioError(f"{scenario.name} sends no request, so there is nothing to size for")
        found += [(copy, each, begin_s) for each in schedule]
        begin_s += _length_s(scenario, schedule)
        if len(found) >= fewest:
            break
    return _load(scenario, found)


def _length_s(scenario: Scenario, schedule: Sequence[ScheduledRequest]) -> float:
    """From the beginning of a schedule to that of the next one."""
    declared = getattr(scenario.arrivals, "duration_s", None)
    if declared and scenario.arrivals.process != "trace" and getattr(scenario.arrivals, "count", None) is None:
        return float(declared)
    due_s = [each.due_offset_ns / 1e9 for each in schedule if each.due_offset_ns is not None]
    span_s = max(due_s, default=0.0) - min(due_s, default=0.0)
    return span_s * len(due_s) / max(1, len(due_s) - 1)


def _load(scenario: Scenario, found: Sequence[tuple[int, ScheduledRequest, float]]) -> SizedLoad:
    loop = scenario.arrivals.closed_loop
    requests = [each for _, each, _ in found]
    follows = [place - 1 if each.turn else -1 for place, each in enumerate(requests)]
    paths = [_path(copy, each, scenario) for copy, each, _ in found]
    for place, before in enumerate(follows):
        request = requests[place]
        own = (("turn", request.session_id or place, request.turn), _own_tokens(request, paths, before, place))
        if before >= 0:
            paths[place] = [*paths[before], own]
        elif request.session_id:
            paths[place] = [*paths[place], own]
        if request.session_id:
            answer = (("answer", request.session_id, request.turn), request.max_tokens)
            paths[place] = [*paths[place], answer]
    return SizedLoad(
        name=scenario.name,
        klass=np.array([each.klass for each in requests], dtype=object),
        prompt_tokens=np.array([each.prompt_tokens for each in requests]),
        output_tokens=np.array([each.max_tokens for each in requests]),
        offset_s=np.array([
            np.nan if before >= 0 else begin_s + (each.due_offset_ns or 0) / 1e9
            for before, (_, each, begin_s) in zip(follows, found, strict=True)
        ]),
        follows=np.array(follows),
        pause_s=np.array([each.pause_ns / 1e9 for each in requests]),
        paths=paths if any(paths) else (),
        slots=None if loop is None else loop.slots,
    )  # fmt: skip


def _path(copy: int, request: ScheduledRequest, scenario: Scenario) -> list[Segment]:
    segments = segments_of(request, scenario.workload)
    if request.block_ids and copy:
        return [((COPIED, copy, name), tokens) for name, tokens in segments]
    return segments


def _own_tokens(request: ScheduledRequest, paths: Sequence[Sequence[Segment]], before: int, place: int) -> int:
    """That a prompt has beyond what stands in the path before it."""
    known = paths[before] if before >= 0 else paths[place]
    return max(0, request.prompt_tokens - sum(tokens for _, tokens in known))


def traced_requests(
    trace: str, block_tokens: int | None = None, output_scale: float = 1.0
) -> tuple[list[TracedRequest], int]:
    """A trace's requests in order of time, and the tokens of one of its blocks; 0 where it names none. Raises
    ScenarioError."""
    path = find_trace(trace)
    found = read_trace(path)
    lengths = [row for row in found.rows if row.prompt_tokens and row.output_tokens]
    if not found.timed or len(lengths) < 2:
        raise ScenarioError(f"{path.name} has no times, or no requests with both lengths; give a trace that has them")
    named = found.block_tokens
    if block_tokens is not None and not named:
        raise ScenarioError(f"{path.name} names no blocks, so --block-tokens scales nothing; leave it out")
    times = np.array([row.offset_s for row in lengths])
    if found.bins.width_s is not None:  # volleys are an artefact of rounded times
        times = found.bins.begins_s(times) + seeded_rng(0, path.name).uniform(0.0, found.bins.width_s, len(times))
    size = block_tokens or named
    rows = [
        TracedRequest(
            offset_s=float(time),
            prompt_tokens=max(1, -(-row.prompt_tokens * size // row.block_tokens)) if named else row.prompt_tokens,
            output_tokens=max(1, round(row.output_tokens * output_scale)),
            block_ids=row.hash_ids,
            session=row.session_id,
        )
        for row, time in zip(lengths, times, strict=True)
    ]
    return rows, size


def traced_load(name: str, rows: Sequence[TracedRequest], block_tokens: int, most: int) -> SizedLoad:
    """The `most` requests of a trace that follow each other fastest: what a server must stand."""
    order = sorted(rows, key=lambda row: row.offset_s)
    ends = range(most - 1, len(order))
    begin = min(ends, key=lambda end: order[end].offset_s - order[end - most + 1].offset_s) - most + 1 if ends else 0
    order = order[begin : begin + most]
    begin_s = order[0].offset_s
    paths: list[list[Segment]] = [
        [((place, block), min(block_tokens, row.prompt_tokens - place * block_tokens))
         for place, block in enumerate(row.block_ids) if row.prompt_tokens > place * block_tokens]
        for row in order
    ]  # fmt: skip
    return SizedLoad(
        name=name,
        klass=np.full(len(order), "all", dtype=object),
        prompt_tokens=np.array([row.prompt_tokens for row in order]),
        output_tokens=np.array([row.output_tokens for row in order]),
        offset_s=np.array([row.offset_s - begin_s for row in order]),
        follows=np.full(len(order), -1),
        pause_s=np.zeros(len(order)),
        paths=paths if any(paths) else (),
    )
