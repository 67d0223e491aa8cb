"""A replica that takes decode steps of one batch at once, as long as nothing happens between them.

Between two ends or arrivals a batch decodes the same sequences again and again. All that changes are positions, blocks
and the time for longer contexts, which grows by as much each step. So k steps cost about as much as one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.policy import Policy
from sojourn.engine.request.request import Request, State
from sojourn.engine.request.scheduler import Emitted, Scheduler
from sojourn.replay.loop import Replica, TurnTimes
from sojourn.replay.turn_model import FittedTurns


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


class FleetReplica(Replica):
    """A replica of a fleet, without drafts, KV tiers and overlapped steps. `on_emitted` hears first tokens and ends."""

    def __init__(
        self, scheduler: Scheduler, turns: FittedTurns, on_emitted: Callable[[list[Emitted], float], None]
    ) -> None:
        super().__init__(scheduler, turns, self._heard, overlap=False)
        self._fitted, self._hear = turns, on_emitted
        self._run: DecodeRun | None = None
        self._plan: StepPlan | None = None  # that was committed last
        self._has_ended = False  # a request, in that step
        self._charges = type(scheduler.policy).computed is not Policy.computed
        self._may_run = scheduler.pool.window is None and scheduler.micro_batches.count == 1

    def submit(self, request: Request, now_ns: float) -> None:
        if self._run is not None:
            self._advance(self._run.turns_until(now_ns))
        super().submit(request, now_ns)

    def turn(self) -> None:
        if self._run is not None:
            self._advance(self._run.count)
        self._plan = None
        super().turn()
        if self._may_run and self._plan is not None:
            self._begin_run(self._plan)

    def _outcome(self, launched):
        self._plan = launched.plan
        return super()._outcome(launched)

    def _heard(self, emitted: list[Emitted], committed_ns: float) -> None:
        told = [each for each in emitted if each.finish_reason is not None or each.request.output_tokens == 1]
        self._has_ended = any(each.finish_reason is not None for each in told)
        if told:
            self._hear(told, committed_ns)

    def _begin_run(self, plan: StepPlan) -> None:
        """What waits could be refused again only for the same reason: nothing has left the batch since."""
        scheduler = self.scheduler
        running = scheduler.running
        if not running or len(running) > scheduler.budget.most or self._arrived:
            return
        if scheduler.waiting.count and (self._has_ended or plan.head_blocked_by is None or plan.preempted):
            return
        count = min([request.sampling.max_tokens - request.output_tokens for request in running]) - 1
        if count < 2 or any(request.is_prefilling for request in running):
            return
        while self._blocks_for(count) > scheduler.pool.available:
            count //= 2
            if count < 2:
                return
        first, growth_ns = self._fitted.decode_run([request.num_computed_tokens for request in running], count)
        self._run = DecodeRun(count, self._received_ns, first, growth_ns)
        self.cutoff_ns = self._run.received_ns(count)

    def _blocks_for(self, count: int) -> int:
        size = self.scheduler.pool.block_size
        return sum(
            [-(-(each.num_computed_tokens + count) // size) - len(each.blocks) for each in self.scheduler.running]
        )

    def _advance(self, turns: int) -> None:
        """Takes the first `turns` of the run."""
        run, self._run = self._run, None
        assert run is not None
        self._received_ns = self.cutoff_ns = run.received_ns(turns)
        if not turns:
            return
        times = run.first
        self._begin_ns = self.cutoff_ns - times.receive
        self._device_free_ns = self._begin_ns - times.publish - times.after
        self.steps += turns
        self._fitted.device_ns += turns * times.device + run.growth_ns * (turns * (turns - 1) // 2)
        decode_again(self.scheduler, self._plan, turns, self.steps - 1, charges=self._charges)


def decode_again(scheduler: Scheduler, plan: StepPlan, count: int, step: int, *, charges: bool) -> None:
    """Decodes all running requests for `count` steps, of which none ends a request or preempts one; the last is `step`.

    `charges`: the policy counts the tokens of each plan.
    """
    manager, size = scheduler.block_manager, scheduler.pool.block_size
    tokens = [0] * count
    for request in scheduler.running:
        done = request.num_computed_tokens + count
        if done > len(request.blocks) * size:
            fits = manager.extend(request, done, plan)
            assert fits, "a run has no more steps than there are blocks for"
        request.token_ids += tokens
        request.num_computed_tokens = request.num_committed_tokens = done
        if done > request.computed_high_water:
            request.computed_high_water = done
        request.counts.computed_tokens += count
        request.counts.last_step = step
        if done // size != request.published_blocks:
            manager.publish(request)
        assert request.state is State.RUNNING
    scheduler.pool.wrote(count * len(scheduler.running))
    if charges:
        for _ in range(count):
            scheduler.policy.computed(plan)
