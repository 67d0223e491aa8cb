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
from engine.step_log import StepLog
from metrics.costmodel import ModelShape
from metrics.ledger import CLOCKED
from metrics.records import StepRecord

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

    def begin_turn(self, begin_ns: int, last_turn: Turn | None, under_way: bool) -> None:
        """`under_way`: a step is on the device."""
        ...

    def planned(self, plan: StepPlan, begin_ns: int, now_ns: int) -> None: ...

    def collected(self, plan: StepPlan, running: Sequence[Request]) -> None:
        """A step was read and will be committed now."""
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

    def records(self) -> list[StepRecord]:
        """Of steps that are over, each once."""
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
        self.records = self.log.take
        self._alive: Alive | None = None
        self._step: tuple[int, StepPlan, StepOutcome, int] | None = None  # that was committed last

    @property
    def reading(self) -> tuple[int, ...]:
        return self.accountant.clock.reading

    def begin_turn(self, begin_ns: int, last_turn: Turn | None, under_way: bool) -> None:
        if last_turn is not None:
            self.accountant.paused(last_turn[1], begin_ns)
        self.log.begin_turn(begin_ns, slept=not under_way and (last_turn is None or last_turn[1] < begin_ns))

    def collected(self, plan: StepPlan, running: Sequence[Request]) -> None:
        self._alive = alive(plan, running)

    def committed(self, step: int, plan: StepPlan, outcome: StepOutcome, emitted_tokens: int, now_ns: int) -> None:
        self.accountant.executed(plan, self._alive, outcome, now_ns)
        self._step = (step, plan, outcome, emitted_tokens)

    def told(self, request: Request) -> Standing:
        request.untold = False
        return Standing(self.accountant.clock.base(request), dict(request.waits))

    def end_turn(self, counts: BlockCounts | None, readings: list[int], clock: Callable[[], int]) -> int:
        if counts is None:
            self.log.pass_stages(readings)
            return readings[-1]
        return self.log.record(*self._step, self._alive, counts, readings, clock)


class NoBooks:
    """Nothing is booked: ledgers stay empty, and no step leaves a record."""

    reading = (0,) * len(CLOCKED)

    def received(self, request, encoded_ns, now_ns, last_turn, *, held) -> None: ...
    def released(self, request, now_ns) -> None: ...
    def gave_up(self, request, waited, now_ns) -> None: ...
    def begin_turn(self, begin_ns, last_turn, under_way) -> None: ...
    def planned(self, plan, begin_ns, now_ns) -> None: ...
    def collected(self, plan, running) -> None: ...
    def committed(self, step, plan, outcome, emitted_tokens, now_ns) -> None: ...
    def told(self, request) -> None: ...
    def ended(self, request) -> None: ...

    def end_turn(self, counts, readings, clock) -> int:
        return readings[-1] if counts is None else clock()

    def records(self) -> list[StepRecord]:
        return []


def make_books(config: EngineConfig, shape: ModelShape, scheduler: Scheduler) -> Books:
    """What the setting `telemetry` asks for."""
    if config.telemetry == "off":
        return NoBooks()
    return FullBooks(Accountant(shape), StepLog(scheduler.pool, scheduler.journal))
