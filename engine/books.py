"""What the loop tells of itself: where each request's time went, what each step was; or nothing: `telemetry=off`."""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.config import EngineConfig
from engine.memory.block_pool import BlockCounts
from engine.messages import Standing
from engine.request.accounting import Accountant, Alive, alive
from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request
from engine.request.scheduler import Scheduler
from engine.step_log import HOLD_NS, StepLog
from metrics.costmodel import ModelShape
from metrics.ledger import CLOCKED
from metrics.step_batch import StepBatch

Turn = tuple[int, int]  # when it began and ended, in nanoseconds


class Books(Protocol):
    """Told by the loop what happens, with the readings of its clock in nanoseconds."""

    @property
    def reading(self) -> tuple[int, ...]:
        """The decode clock, by metrics.ledger.CLOCKED."""
        ...

    def received(self, request: Request, encoded_ns: int, now_ns: int, last_turn: Turn | None, *, held: bool) -> None:
        """A request was taken in; `held`: it may not be scheduled before `released`."""
        ...

    def released(self, request: Request, now_ns: int) -> None: ...

    def gave_up(self, request: Request, waited: bool, now_ns: int) -> None:
        """A request ended between two steps: it was aborted, or the runner cannot serve it."""
        ...

    def resumed(self, begin_ns: int, last_turn: Turn | None, under_way: bool) -> None:
        """A turn begins, and not where the last one ended. `under_way`: a step is on the device."""
        ...

    def planned(self, plan: StepPlan, begin_ns: int, now_ns: int) -> None: ...

    def collected(self, plan: StepPlan, running: Sequence[Request], changes: int) -> None:
        """A step was read and will be committed now. `changes` of the list of those who run, so far."""
        ...

    def committed(self, step: int, plan: StepPlan, outcome: StepOutcome, emitted_tokens: int, now_ns: int) -> None: ...

    def told(self, request: Request) -> Standing | None:
        """What the front has to know of a request that is `untold` and emits a token."""
        ...

    def ended(self, request: Request) -> None:
        """The step that was committed last ended it."""
        ...

    def end_turn(self, counts: BlockCounts | None, readings: list[int], clock: Callable[[], int]) -> int:
        """`readings` bound the stages so far; no counts: no step was committed in this turn. Returns when it ended."""
        ...

    @property
    def due_ns(self) -> int | None:
        """When steps are due next; None while there are none."""
        ...

    def steps(self, now_ns: int | None = None) -> StepBatch | None:
        """Those that are over and were not given yet, if they are due by then; without a time all of them."""
        ...


class FullBooks:
    """Everything: ledgers, waits by reason and step records."""

    def __init__(self, accountant: Accountant, log: StepLog):
        self.accountant = accountant
        self.log = log
        self.received = self.accountant.received
        self.released = self.accountant.released
        self.gave_up = self.accountant.gave_up
        self.planned = self.accountant.planned
        self.ended = self.accountant.ended
        self.steps = self.log.take
        self.alive: Alive | None = None  # in the step that is committed next, or was last
        self._step: tuple[int, StepPlan, StepOutcome, int] | None = None  # that was committed last
        self._changes = 0  # of the list of those who run, when `alive` was made of it
        self._steady_since = -1  # the same, if all of them decode by the clock
        self._is_steady = False

    @property
    def reading(self) -> tuple[int, ...]:
        return self.accountant.clock.reading

    @property
    def due_ns(self) -> int | None:
        return self.log.due_ns

    def resumed(self, begin_ns: int, last_turn: Turn | None, under_way: bool) -> None:
        if last_turn is not None:
            self.accountant.paused(last_turn[1], begin_ns)
        if not under_way:
            self.log.slept(begin_ns)

    def collected(self, plan: StepPlan, running: Sequence[Request], changes: int) -> None:
        # All who run decode, and they are those of the step before: nobody has to be looked at. Who could not be
        # planned (a token budget below the running) changes nothing either, so their number is compared, too.
        self._is_steady = plan.changes == changes == self._steady_since and not plan.has_prompts
        if not self._is_steady or len(plan.scheduled) != len(self.alive.planned):
            self._is_steady = False
            self.alive, self._changes = alive(plan, running), changes

    def committed(self, step: int, plan: StepPlan, outcome: StepOutcome, emitted_tokens: int, now_ns: int) -> None:
        found, accountant = self.alive, self.accountant
        if self._is_steady:
            accountant.decoded(outcome, now_ns)
        else:
            accountant.executed(plan, found, outcome, now_ns)
            is_clocked = found.running is found.planned and found.planned == accountant.clock.members
            self._steady_since = self._changes if is_clocked else -1
        self._step = (step, plan, outcome, emitted_tokens)

    def told(self, request: Request) -> Standing:
        request.untold = False
        return Standing(self.accountant.clock.base(request), dict(request.waits))

    def end_turn(self, counts: BlockCounts | None, readings: list[int], clock: Callable[[], int]) -> int:
        if counts is None:
            self.log.pass_stages(readings)
            return readings[-1]
        step, plan, outcome, emitted_tokens = self._step
        return self.log.record(step, plan, outcome, emitted_tokens, self.alive, counts, readings, clock)


class NoBooks:
    """Nothing is booked: ledgers stay empty, and no step leaves a record."""

    due_ns = None
    reading = (0,) * len(CLOCKED)

    def received(self, request, encoded_ns, now_ns, last_turn, *, held) -> None: ...
    def released(self, request, now_ns) -> None: ...
    def gave_up(self, request, waited, now_ns) -> None: ...
    def resumed(self, begin_ns, last_turn, under_way) -> None: ...
    def planned(self, plan, begin_ns, now_ns) -> None: ...
    def collected(self, plan, running, changes) -> None: ...
    def committed(self, step, plan, outcome, emitted_tokens, now_ns) -> None: ...
    def told(self, request) -> None: ...
    def ended(self, request) -> None: ...

    def end_turn(self, counts, readings, clock) -> int:
        return readings[-1] if counts is None else clock()

    def steps(self, now_ns=None) -> None:
        return None


def make_books(config: EngineConfig, shape: ModelShape, scheduler: Scheduler, hold_ns: int = HOLD_NS) -> Books:
    """What the setting `telemetry` asks for. `hold_ns`: steps are held back so long, to be told together."""
    if config.telemetry == "off":
        return NoBooks()
    return FullBooks(Accountant(shape), StepLog(scheduler.pool, scheduler.journal, hold_ns))
