"""What the loop tells of itself: where each request's time went, what each step was; or nothing: `telemetry=off`."""

from collections.abc import Sequence
from typing import Protocol

from engine.config import EngineConfig
from engine.messages import Standing, ToldSteps
from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request
from engine.request.scheduler import Scheduler
from engine.telemetry.accounting import Accountant, Alive, alive
from engine.telemetry.decode_clock import DecodeClock
from engine.telemetry.step_log import StepLog, Turned
from metrics.compute.cost_model import ModelShape

Turn = tuple[int, int]  # when it began and ended, in nanoseconds


class Books(Protocol):
    """Told by the loop what happens, with the readings of its clock in nanoseconds."""

    clock: DecodeClock
    steady_since: int  # changes of the list of those who run when all of them were found to decode; -1: they do not

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
        """A step was read and will be committed now. `changes` of the list of those who run, so far.

        Nobody has to say so of a steady step, whose requests are those of the step before, all of which decode: nobody
        came or went since (`changes`), and all who run have a share in it.
        """
        ...

    def committed(
        self, plan: StepPlan, outcome: StepOutcome, readings: list[int], turned: Turned, is_steady: bool
    ) -> ToldSteps | None:
        """`readings` began the stages of its turn, and belong to the books from now on. What is to be told of steps
        by now."""
        ...

    def rest(self, ended_ns: int) -> ToldSteps | None:
        """All that was not told yet: the last step ended then, and no later one will tell of it."""
        ...

    @property
    def untold_steps(self) -> int:
        """That were committed; `rest` has them."""
        ...

    def told(self, request: Request) -> Standing | None:
        """What the front has to know of a request that is `untold` and emits a token."""
        ...

    def ended(self, request: Request) -> None:
        """The step that was committed last ended it."""
        ...

    def passed(self, readings: list[int]) -> None:
        """A turn is over in which no step was committed. `readings` bound its stages."""
        ...


class FullBooks:
    """Everything: ledgers, waits by reason and step records."""

    def __init__(self, accountant: Accountant, log: StepLog):
        self.accountant = accountant
        self.clock = accountant.clock
        self.log = log
        self.received = self.accountant.received
        self.released = self.accountant.released
        self.gave_up = self.accountant.gave_up
        self.planned = self.accountant.planned
        self.ended = self.accountant.ended
        self.rest = self.log.rest
        self.alive: Alive | None = None  # in the last step that was not steady, and in those since
        self.steady_since = -1
        self._changes = 0  # of the list of those who run, when `alive` was made of it
        self._pool, self._journal = log.pool, log.journal

    def resumed(self, begin_ns: int, last_turn: Turn | None, under_way: bool) -> None:
        self.steady_since = -1
        if last_turn is not None:
            self.accountant.paused(last_turn[1], begin_ns)
        if not under_way:
            self.log.slept(begin_ns)

    def collected(self, plan: StepPlan, running: Sequence[Request], changes: int) -> None:
        self.alive, self._changes = alive(plan, running), changes

    def committed(
        self, plan: StepPlan, outcome: StepOutcome, readings: list[int], turned: Turned, is_steady: bool
    ) -> ToldSteps | None:
        log, pool, found, now_ns = self.log, self._pool, self.alive, readings[-1]
        slots, blocks = pool.slots_written, turned[2]
        if (
            not is_steady or now_ns >= log.due_ns or log.untold >= log.most_untold or turned[1] != log.width
            or plan.refusals or outcome.entropy_millinats or outcome.graph != log.graph or self._journal.has_times
        ):  # fmt: skip
            self.accountant.executed(plan, found, outcome, now_ns)
            is_clocked = found.running is found.planned and found.planned == self.clock.members
            self.steady_since = self._changes if is_clocked and not plan.has_prompts else -1
            return log.put(plan, outcome, found, readings, turned)
        # Nearly all steps come by here, as long as nobody waits, and the model has driven out of the caches what they
        # need: so this is written out and calls nobody. First `Accountant.decoded`, where nothing paused before it.
        clock, begin_ns, end_ns, sampling_ns = (
            self.clock, outcome.device_begin_ns, outcome.device_end_ns, outcome.sampling_ns
        )  # fmt: skip
        gap_ns, lag_ns = begin_ns - clock.booked_ns, now_ns - end_ns
        if gap_ns < 0:
            gap_ns = 0
        interference, decode, host, sample = clock.reading
        clock.reading = (
            interference, decode + end_ns - begin_ns - sampling_ns, host + gap_ns + lag_ns - clock.lag_ns,
            sample + sampling_ns,
        )  # fmt: skip
        clock.booked_ns, clock.lag_ns, clock.committed_ns = end_ns, lag_ns, now_ns
        # Then `StepLog.put`, of a step that is the one before once more.
        readings += (begin_ns, end_ns, sampling_ns, plan.planned_ns)
        log.rows.fromlist(readings)
        log.untold += 1
        if blocks != log.blocks or slots != log.slots + log.width:
            log.put_pool(blocks)
        log.slots = slots
        return None

    @property
    def untold_steps(self) -> int:
        return self.log.untold

    def passed(self, readings: list[int]) -> None:
        self.steady_since = -1
        self.log.pass_stages(readings)

    def told(self, request: Request) -> Standing:
        request.untold = False
        return Standing(self.clock.base(request), dict(request.waits))


class NoBooks:
    """Nothing is booked: ledgers stay empty, and no step leaves a record."""

    untold_steps = 0
    steady_since = -1

    def __init__(self) -> None:
        self.clock = DecodeClock()  # which stands still

    def received(self, request, encoded_ns, now_ns, last_turn, *, held) -> None: ...
    def released(self, request, now_ns) -> None: ...
    def gave_up(self, request, waited, now_ns) -> None: ...
    def resumed(self, begin_ns, last_turn, under_way) -> None: ...
    def planned(self, plan, begin_ns, now_ns) -> None: ...
    def collected(self, plan, running, changes) -> None: ...
    def committed(self, plan, outcome, readings, turned, is_steady) -> None: ...
    def rest(self, ended_ns) -> None: ...
    def told(self, request) -> None: ...
    def ended(self, request) -> None: ...
    def passed(self, readings) -> None: ...


def make_books(config: EngineConfig, shape: ModelShape, scheduler: Scheduler) -> Books:
    """What the setting `telemetry` asks for."""
    if config.telemetry == "off":
        return NoBooks()
    return FullBooks(Accountant(shape), StepLog(scheduler.pool, scheduler.journal))
