"""Closed loops: how much of a schedule is built for a number of slots that send one request after another.

A closed loop has no intended time. A request is due when its slot is free and the think time is over, so a server that
stalls is sent fewer requests. Its latencies are not those of an open load.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.arrivals import CLOSED_PROCESSES, ClosedLoop
from sojourn.loadgen.scenario.open_arrivals import MAX_REQUESTS
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.schedule.draws import NS_PER_S, draw_ns, most_s
from sojourn.loadgen.schedule.request import SESSION_BEGIN, ScheduledRequest, waits_of

# A loop without a count needs requests for its whole duration: as many as it can send if each takes this long, or as
# long as the pause before it if that is longer. The quick cycle is that of a fast server. It is provided for up to a
# number of requests and prompt tokens that is written within seconds (2.8 us a token with a tokenizer).
SHORTEST_CYCLE_S, QUICK_CYCLE_S = 0.5, 0.02
QUICK_REQUESTS, QUICK_PROMPT_TOKENS = 20_000, 2_000_000


def draw_pauses(loop: ClosedLoop, rng: np.random.Generator) -> Iterator[int]:
    """For each request or session of a closed loop, the ns between the end of its slot's last one and its due time."""
    for slot in range(loop.slots):
        yield round(slot * loop.start_over_s / loop.slots * NS_PER_S)
    while True:
        yield 0 if loop.think_time_s is None else draw_ns(loop.think_time_s, rng)


def enough(
    loop: ClosedLoop, count: int | None, chains: Iterator[list[ScheduledRequest]]
) -> Iterator[list[ScheduledRequest]]:
    """`count` chains; without a count, rounds of one chain a slot until every slot has enough for the duration (see
    SHORTEST_CYCLE_S). So each process, too, has enough for the slots that it fills."""
    if count is not None:
        yield from islice(chains, count)
        return
    until_ns = round(loop.duration_s * NS_PER_S)
    shortest_ns, quick_ns = round(SHORTEST_CYCLE_S * NS_PER_S), round(QUICK_CYCLE_S * NS_PER_S)
    free_ns, free_quick_ns, num_built, prompt_tokens = [0] * loop.slots, [0] * loop.slots, 0, 0
    while min(free_ns) < until_ns or (
        min(free_quick_ns) < until_ns and num_built < QUICK_REQUESTS and prompt_tokens < QUICK_PROMPT_TOKENS
    ):
        for slot, chain in enumerate(islice(chains, loop.slots)):
            free_ns[slot] += _least_ns(chain, shortest_ns)
            free_quick_ns[slot] += _least_ns(chain, quick_ns)
            num_built += len(chain)
            prompt_tokens += sum(request.message_tokens if request.turn else request.prompt_tokens for request in chain)
            yield chain


def _least_ns(chain: list[ScheduledRequest], cycle_ns: int) -> int:
    """How long a chain takes if each request takes `cycle_ns`, or as long as the pause before it if that is longer."""
    waits, ends_ns = waits_of(chain), {SESSION_BEGIN: 0}
    for request in chain:
        free_ns = max((ends_ns[each] for each in waits[request.index]), default=0)
        ends_ns[request.index] = free_ns + max(request.pause_ns, cycle_ns)
    return max(ends_ns.values())


def check_size(scenario: Scenario, loop: ClosedLoop) -> None:
    """Raises ScenarioError for a closed loop of which so much would be built that it fits no run."""
    if scenario.arrivals.count is not None:
        return
    pauses = [] if loop.think_time_s is None else [loop.think_time_s]
    for session in (klass.session for klass in scenario.workload.classes if klass.session is not None):
        pauses.append(session.pause)
    longest_s = max((most_s(pause) for pause in pauses if pause is not None), default=0.0)
    fewest = loop.slots * math.ceil(loop.duration_s / max(SHORTEST_CYCLE_S, longest_s))
    if fewest > MAX_REQUESTS:
        raise ScenarioError(
            f"arrivals may need {fewest} requests; at most {MAX_REQUESTS} fit one run: shorten arrivals.duration_s, "
            "or give arrivals.count"
        )


def loop_doubt(arrivals: dict[str, Any], num_due: int, num_never_due: int, ran_out: bool) -> str | None:
    """Why a closed loop was not the one of the scenario, from the `arrivals` block of a run; None if it was.

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
