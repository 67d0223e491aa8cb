"""One schedule for several processes: who sends what, and what became of each. Pure, but for the file of a run."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadgen.errors import ScenarioError
from loadgen.scenario.arrivals import ClosedLoop
from loadgen.schedule.request import ScheduledRequest, chains_of

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

    def became(self, state: str) -> "Shard":
        return replace(self, state=state)


def part_of(
    schedule: Sequence[ScheduledRequest], number: int, of: int, loop: ClosedLoop | None
) -> list[ScheduledRequest]:
    """Part `number` of `of`: every `of`-th arrival, or of a closed loop as much as its slots have of all of them.

    The turns of a session stay together. Requests that a trace says are of one session do not: each has its own moment.
    The prelude is sent one by one, by the first. The parts of all numbers make the schedule, each request once.
    """
    mine = [request for request in schedule if request.prelude and number == 0]
    for place, chain in enumerate(chains_of([request for request in schedule if not request.prelude])):
        slot = place if loop is None else place % loop.slots
        if slot % of == number:
            mine += chain
    return mine


def loop_of(loop: ClosedLoop | None, number: int, of: int) -> ClosedLoop | None:
    """The slots of a closed loop that part `number` fills. Raises ScenarioError where it would have none."""
    if loop is None:
        return None
    if loop.slots < of:
        raise ScenarioError(
            [f"arrivals keep {loop.slots} at a time, fewer than the {of} processes that share them; start at most "
             f"{loop.slots} processes"]
        )  # fmt: skip
    return replace(loop, slots=loop.slots // of + (number < loop.slots % of))


def write_shards(run_dir: Path, shards: list[Shard]) -> None:
    partial = run_dir / f".{SHARDS_FILE}.tmp"
    partial.write_text(json.dumps([asdict(shard) for shard in shards]), encoding="utf-8")
    os.replace(partial, run_dir / SHARDS_FILE)


def read_shards(run_dir: Path, settled: Sequence[dict[str, Any]] = ()) -> list[Shard]:
    """What is known of a run's processes; [] where one process sent all of it. `settled` is what `run.json` says of
    them once they have ended."""
    try:
        told = json.loads((run_dir / SHARDS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        told = settled
    return [Shard(**each) for each in told]


def doubts_about(shards: list[Shard]) -> list[str]:
    """Why the figures of a run cannot be trusted, for all that its processes say."""
    unfinished = [shard for shard in shards if shard.state != DONE]
    if not unfinished:
        return []
    named = ", ".join(f"{shard.number} ({shard.requests} requests)" for shard in unfinished)
    return [
        f"{len(unfinished)} of {len(shards)} load processes did not reach their end: part {named}; what they had not "
        "recorded is missing, and nobody sent it again"
    ]
