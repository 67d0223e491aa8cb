"""Closed loops: a number of slots, each of which sends its next request when its last one has ended.

A closed loop has no intended time. A request is due when its slot, and the think time after it, is over; so a server
that stalls is asked less, and its latencies are not those that an open load would have met.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.scenario_arrivals import MAX_REQUESTS
from loadgen.scenario_faults import ScenarioError
from loadgen.seconds import NS_PER_S, draw_ns

CLOSED_PROCESSES = ("concurrency", "users")
# A loop that is bounded by time alone has requests built beforehand for replies as short as this, pauses aside.
SHORTEST_REPLY_S = 0.5


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """How many at a time, and until when: nothing is begun `duration_s` after the start."""

    slots: int
    duration_s: float | None


def closed_loop(arrivals) -> ClosedLoop | None:
    """The closed loop that an `arrivals` block asks for; None for an open one."""
    if arrivals.process == "concurrency":
        return ClosedLoop(arrivals.in_flight, arrivals.duration_s)
    if arrivals.process == "users":
        return ClosedLoop(arrivals.users, arrivals.duration_s)
    return None


def draw_pauses(arrivals, rng: np.random.Generator) -> list[int]:
    """Of every request or session of a closed loop, the ns between the end of its slot's last one and its due time."""
    slots, thinks = closed_loop(arrivals).slots, arrivals.process == "users"
    count = arrivals.count or _enough(arrivals, slots)
    if count > MAX_REQUESTS:
        raise ScenarioError(
            [f"arrivals may need {count} requests; at most {MAX_REQUESTS} fit one run: shorten arrivals.duration_s, or "
             "give arrivals.count"]
        )  # fmt: skip
    if not thinks:
        return [0] * count
    begin = [round(user * arrivals.start_over_s / slots * NS_PER_S) for user in range(min(slots, count))]
    return begin + [draw_ns(arrivals.think_time_s, rng) for _ in range(count - len(begin))]


def _enough(arrivals, slots: int) -> int:
    """Requests for the whole duration, if replies take SHORTEST_REPLY_S."""
    return slots * (1 + math.ceil(arrivals.duration_s / SHORTEST_REPLY_S))


def loop_doubt(arrivals: dict[str, Any], num_due: int, num_never_due: int) -> str | None:
    """Why a closed loop was not the one that was asked for, from the `arrivals` block of a run; None if it was."""
    if arrivals.get("process") not in CLOSED_PROCESSES:
        return None
    if arrivals.get("count") is None and not num_never_due:
        return (
            f"all {num_due} requests that were built for this closed loop were used before its duration_s was over; "
            "give arrivals.count more than that beside duration_s"
        )
    if arrivals.get("duration_s") is None and num_never_due:
        return f"{num_never_due} of {num_due + num_never_due} requests of this closed loop never had their turn"
    return None
