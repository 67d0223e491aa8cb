"""Turns of the loop that decode one batch again and again, taken at once.

Between two ends or arrivals a batch decodes the same sequences. All that changes are positions, blocks and the time for
longer contexts, which grows by as much each step. So k steps cost about as much as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.policies.policy import Policy
from sojourn.engine.request.request import State
from sojourn.engine.request.scheduler import Scheduler
from sojourn.replay.simulated_runner import TurnTimes


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Turns to come that decode the same batch. Nanoseconds; turn 0 receives at `begin_ns`."""

    count: int
    begin_ns: float
    first: TurnTimes
    growth_ns: float  # of the device's time, from each turn to the next

    def received_ns(self, turns: int) -> float:
        """When the turn behind so many of them receives."""
        return self.begin_ns + turns * sum(self.first) + self.growth_ns * (turns * (turns - 1) // 2)

    def turns_until(self, now_ns: float) -> int:
        """Those whose next turn receives what arrives at `now_ns`."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.received_ns(middle) >= now_ns:
                high = middle
            else:
                low = middle + 1
        return low


class SteadySteps(Protocol):
    """A step model whose times follow from the plan alone."""

    def decode_run(self, past_tokens: Sequence[int], count: int) -> tuple[TurnTimes, float]:
        """The first of `count` turns that decode these sequences, and by how many ns the device's time grows in
        each."""
        ...

    def took(self, run: DecodeRun, turns: int) -> None:
        """The first turns of a run are over."""
        ...


def next_run(scheduler: Scheduler, plan: StepPlan, steps: SteadySteps, begin_ns: float) -> DecodeRun | None:
    """Turns behind the committed `plan` in which no request ends, joins the batch or is preempted; None: fewer than
    two. No other step is under way, and no request is drafted for."""
    running, pool = scheduler.running, scheduler.pool
    if not running or len(running) > scheduler.budget.most or pool.window is not None:
        return None
    if plan.has_prompts:  # its blocks may be the prefix of who waits, and a policy sees another plan in a decode
        return None
    if scheduler.num_waiting and (plan.head_blocked_by is None or plan.preempted):
        return None
    count = min([request.sampling.max_tokens - request.output_tokens for request in running]) - 1
    if count < 2 or any(request.is_prefilling for request in running):
        return None
    while count >= 2 and _lacking_blocks(scheduler, count) > pool.available:
        count //= 2
    if count < 2:
        return None
    first, growth_ns = steps.decode_run([request.num_computed_tokens for request in running], count)
    return DecodeRun(count, begin_ns, first, growth_ns)


def _lacking_blocks(scheduler: Scheduler, count: int) -> int:
    size = scheduler.pool.block_size
    return sum([-(-(each.num_computed_tokens + count) // size) - len(each.blocks) for each in scheduler.running])


def advance(scheduler: Scheduler, plan: StepPlan, count: int, step: int) -> None:
    """Decodes all running requests for `count` steps of a run, of which the last is `step`."""
    manager, size = scheduler.block_manager, scheduler.pool.block_size
    tokens = [0] * count
    for request in scheduler.running:
        done = request.num_computed_tokens + count
        if done > len(request.blocks) * size:
            fits = manager.extend(request, done, plan)
            assert fits, "a run has no more steps than there are blocks for"
        request.token_ids += tokens
        request.num_computed_tokens = request.num_committed_tokens = done
        request.computed_high_water = max(request.computed_high_water, done)
        request.counts.computed_tokens += count
        request.counts.last_step = step
        if done // size != request.published_blocks:
            manager.publish(request)
        assert request.state is State.RUNNING
    scheduler.pool.wrote(count * len(scheduler.running))
    if type(scheduler.policy).computed is not Policy.computed:  # it counts the tokens of each plan
        for _ in range(count):
            scheduler.policy.computed(plan)
