"""One schedule for several processes: the part and the state of each."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.arrivals import ClosedLoop
from sojourn.loadgen.schedule.request import ScheduledRequest, chains_of
from sojourn.metrics.whole_file import write_whole

SHARDS_FILE = "shards.json"
SENDING, DONE, LOST = "sending", "done", "lost"


@dataclass(frozen=True, slots=True)
class Shard:
    """One process's part of a run."""

    number: int
    worker: str  # Locust's name of the process
    requests: int
    state: str = SENDING
    clock_uncertainty_ms: float | None = None  # of another host's stamps; None where it shares the clock


def part_of(
    schedule: Sequence[ScheduledRequest], number: int, of: int, loop: ClosedLoop | None
) -> list[ScheduledRequest]:
    """Part `number` of `of`: every `of`-th arrival, or in a closed loop the chains of its share of the slots.

    The turns of a session stay together. Requests of one session in a trace do not: each has its own due time. The
    first part has the prelude. The parts of all numbers make the schedule, each request once.
    """
    mine = [request for request in schedule if request.prelude and number == 0]
    for place, chain in enumerate(chains_of([request for request in schedule if not request.prelude])):
        slot = place if loop is None else place % loop.slots
        if slot % of == number:
            mine += chain
    return mine


def loop_of(loop: ClosedLoop | None, number: int, of: int) -> ClosedLoop | None:
    """The slots of a closed loop that part `number` fills. Raises ScenarioError if it would have none."""
    if loop is None:
        return None
    if loop.slots < of:
        raise ScenarioError(
            f"arrivals keep {loop.slots} at a time, fewer than the {of} processes that share them; start at most "
            f"{loop.slots} processes"
        )
    return replace(loop, slots=loop.slots // of + (number < loop.slots % of))


def write_shards(run_dir: Path, shards: list[Shard]) -> None:
    write_whole(run_dir / SHARDS_FILE, json.dumps([asdict(shard) for shard in shards]))


def read_shards(run_dir: Path, finished: Sequence[dict[str, Any]] = ()) -> list[Shard]:
    """The processes of a run; [] if one process sent all of it. `finished` is the list in `run.json`, once they have
    ended."""
    try:
        shards = json.loads((run_dir / SHARDS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        shards = finished
    return [Shard(**each) for each in shards]


def doubts_about(shards: list[Shard]) -> list[str]:
    """Reasons not to trust the figures of a run, from the states of its processes."""
    unfinished = [shard for shard in shards if shard.state != DONE]
    if not unfinished:
        return []
    named = ", ".join(f"{shard.number} ({shard.requests} requests)" for shard in unfinished)
    return [
        f"{len(unfinished)} of {len(shards)} load processes did not reach their end: part {named}; what they had not "
        "recorded is missing, and nobody sent it again"
    ]
