"""Closed loops: a number of slots, each of which sends its next request when its last one has ended.

A closed loop has no intended time. A request is due when its slot, and the think time after it, is over; so a server
that stalls is asked less, and its latencies are not those that an open load would have met.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.scenario.arrivals import MAX_REQUESTS
from loadgen.scenario.faults import ScenarioError
from loadgen.schedule.durations import NS_PER_S, draw_ns, most_s

if TYPE_CHECKING:
    from loadgen.scenario.scenario import Scenario
    from loadgen.schedule.build import ScheduledRequest

CLOSED_PROCESSES = ("concurrency", "users")
# A loop that is bounded by time alone has requests built beforehand for as many as it needs if each takes as long as
# this, or as the pause before it if that is longer. The quick cycle is a fast server's; it is provided for as far as
# so many requests and prompt tokens go, which take some seconds to write (2.8 us a token with a tokenizer).
SHORTEST_CYCLE_S, QUICK_CYCLE_S = 0.5, 0.02
QUICK_REQUESTS, QUICK_PROMPT_TOKENS = 20_000, 2_000_000


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


def draw_pauses(arrivals, rng: np.random.Generator) -> Iterator[int]:
    """Of each request or session of a closed loop, the ns between the end of its slot's last one and its due time."""
    if arrivals.process == "concurrency":
        yield from repeat(0)
    for user in range(arrivals.users):
        yield round(user * arrivals.start_over_s / arrivals.users * NS_PER_S)
    while True:
        yield draw_ns(arrivals.think_time_s, rng)


def enough(arrivals, chains: Iterator[list["ScheduledRequest"]]) -> Iterator[list["ScheduledRequest"]]:
    """As many chains as `arrivals.count` says; without one, rounds of a chain a slot until every slot has enough for
    the whole duration (see SHORTEST_CYCLE_S). So each process, too, has enough for the slots that it fills."""
    if arrivals.count is not None:
        yield from islice(chains, arrivals.count)
        return
    until_ns, num_slots = round(arrivals.duration_s * NS_PER_S), closed_loop(arrivals).slots
    shortest_ns, quick_ns = round(SHORTEST_CYCLE_S * NS_PER_S), round(QUICK_CYCLE_S * NS_PER_S)
    free_ns, free_quick_ns, num_built, prompt_tokens = [0] * num_slots, [0] * num_slots, 0, 0
    while min(free_ns) < until_ns or (
        min(free_quick_ns) < until_ns and num_built < QUICK_REQUESTS and prompt_tokens < QUICK_PROMPT_TOKENS
    ):
        for slot, chain in enumerate(islice(chains, num_slots)):
            free_ns[slot] += sum(max(request.pause_ns, shortest_ns) for request in chain)
            free_quick_ns[slot] += sum(max(request.pause_ns, quick_ns) for request in chain)
            num_built += len(chain)
            prompt_tokens += sum(request.message_tokens if request.turn else request.prompt_tokens for request in chain)
            yield chain


def check_size(scenario: "Scenario") -> None:
    """Raises ScenarioError for a closed loop of which so much would be built that it fits no run."""
    arrivals = scenario.arrivals
    if arrivals.count is not None:
        return
    pauses = [arrivals.think_time_s] if arrivals.process == "users" else []
    for session in (klass.session for klass in scenario.workload.classes if klass.session is not None):
        pauses.append(session.think_time_s or session.tool_pause_s)
    longest_s = max((most_s(pause) for pause in pauses), default=0.0)
    fewest = closed_loop(arrivals).slots * math.ceil(arrivals.duration_s / max(SHORTEST_CYCLE_S, longest_s))
    if fewest > MAX_REQUESTS:
        raise ScenarioError(
            [f"arrivals may need {fewest} requests; at most {MAX_REQUESTS} fit one run: shorten arrivals.duration_s, "
             "or give arrivals.count"]
        )  # fmt: skip


def loop_doubt(arrivals: dict[str, Any], num_due: int, num_never_due: int, ran_out: bool) -> str | None:
    """Why a closed loop was not the one that was asked for, from the `arrivals` block of a run; None if it was.

    `ran_out`: a slot of some process was free before the time was over, and all that was built for it was used.
    """
    if arrivals.get("process") not in CLOSED_PROCESSES:
        return None
    if arrivals.get("count") is None and ran_out:
        return (
            f"requests that were built for this closed loop were used up before its duration_s was over, {num_due} of "
            f"{num_due + num_never_due}, so fewer were in flight than it asks for; give arrivals.count more than that "
            "beside duration_s"
        )
    if arrivals.get("duration_s") is None and num_never_due:
        return f"{num_never_due} of {num_due + num_never_due} requests of this closed loop never had their turn"
    return None
