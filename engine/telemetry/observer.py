"""What the loop's observer sees: where the time of each request went, and what each step was.

With `telemetry=off` nothing is observed.
"""

from collections.abc import Sequence
from typing import Protocol

from sojourn.engine.config import EngineConfig
from sojourn.engine.messages import LedgerBase
from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.preparing import Preparing
from sojourn.engine.request.request import Request
from sojourn.engine.request.scheduler import Emitted, Scheduler
from sojourn.engine.request.technique import Technique
from sojourn.engine.telemetry.accounting import Accountant, DecodeClock, Participants, Turn, participants
from sojourn.engine.telemetry.step_records import StepRecords
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.ledger import Account
from sojourn.metrics.records import StepRecord


class EngineObserver(Protocol):
    """The loop calls it with readings of its clock, in nanoseconds."""

    clock: DecodeClock

    def received(
        self, request: Request, encoded_ns: int, turn: Turn, last: Turn | None, preparation: Preparing | None
    ) -> None:
        """A request was taken in. `last` is the turn before this one; with a `preparation` it may not be scheduled."""
        ...

    def released(self, request: Request, now_ns: int) -> None:
        """A request may be scheduled from now on."""
        ...

    def ended_between_steps(self, request: Request, waited: bool, now_ns: int) -> None:
        """A request was aborted, or the runner cannot serve it. `waited`: it had no place in the batch."""
        ...

    def handed_over(self, request: Request, since_ns: int, now_ns: int) -> None:
        """The KV of its prompt is there for a decode server; its last token left the loop at `since_ns`."""
        ...

    def idle(self, begin_ns: int | None, end_ns: int) -> None:
        """Between two turns there was no work; without a begin, before the first turn."""
        ...

    def planned(self, plan: StepPlan, turn: Turn) -> None: ...

    def collected(self, plan: StepPlan, running: Sequence[Request]) -> None:
        """A step was read; its commit, which may end requests, comes next."""
        ...

    def committed(self, plan: StepPlan, outcome: StepOutcome, turn: Turn) -> None:
        """Books the step to the ledgers: its tokens carry them."""
        ...

    def ledger_base(self, request: Request) -> LedgerBase | None:
        """The ledger of a request that emits a token, where the front does not know it yet."""
        ...

    def observed(
        self, step: int, plan: StepPlan, outcome: StepOutcome, emitted: Sequence[Emitted], turn: Turn
    ) -> StepRecord | None:
        """The tokens of a step are out: closes the ledgers of requests that it ended, and records it."""
        ...

    def passed(self, turn: Turn) -> None:
        """A turn is over in which no step was committed."""
        ...


class FullObserver:
    """Ledgers, waits by reason, and step records."""

    def __init__(self, accountant: Accountant, records: StepRecords, techniques: Sequence[Technique]):
        self.accountant = accountant
        self.records = records
        self.techniques = techniques
        self.clock = accountant.clock
        self.received = accountant.received
        self.released = accountant.released
        self.ended_between_steps = accountant.ended_between_steps
        self.planned = accountant.planned
        self.passed = records.add_turn_without_step
        self._participants: Participants | None = None  # of the step that is being committed

    def idle(self, begin_ns: int | None, end_ns: int) -> None:
        if begin_ns is not None:
            self.accountant.paused(begin_ns, end_ns)
        self.records.idle(end_ns)

    def handed_over(self, request: Request, since_ns: int, now_ns: int) -> None:
        request.booking.ledger[Account.MEMORY_TRANSFER] += now_ns - since_ns

    def collected(self, plan: StepPlan, running: Sequence[Request]) -> None:
        self._participants = participants(plan, running)

    def committed(self, plan: StepPlan, outcome: StepOutcome, turn: Turn) -> None:
        self.accountant.executed(plan, self._participants, outcome, turn.committed_ns)

    def ledger_base(self, request: Request) -> LedgerBase | None:
        if not request.booking.ledger_changed:
            return None
        request.booking.ledger_changed = False
        return LedgerBase(self.clock.base(request), dict(request.booking.waits))

    def observed(
        self, step: int, plan: StepPlan, outcome: StepOutcome, emitted: Sequence[Emitted], turn: Turn
    ) -> StepRecord:
        num_tokens = 0
        for item in emitted:
            num_tokens += item.token_id is not None
            if item.finish_reason is not None:
                self.clock.remove(item.request)
                for technique in self.techniques:
                    technique.measure(item.request, turn.committed_ns)
        return self.records.record(step, plan, outcome, self._participants, num_tokens, turn)


class NoObserver:
    """Ledgers stay empty, and no step leaves a record."""

    def __init__(self) -> None:
        self.clock = DecodeClock()  # which stands still

    def received(self, request, encoded_ns, turn, last, preparation) -> None: ...
    def released(self, request, now_ns) -> None: ...
    def ended_between_steps(self, request, waited, now_ns) -> None: ...
    def handed_over(self, request, since_ns, now_ns) -> None: ...
    def idle(self, begin_ns, end_ns) -> None: ...
    def planned(self, plan, turn) -> None: ...
    def collected(self, plan, running) -> None: ...
    def committed(self, plan, outcome, turn) -> None: ...
    def ledger_base(self, request) -> None: ...
    def observed(self, step, plan, outcome, emitted, turn) -> None: ...
    def passed(self, turn) -> None: ...


def make_observer(config: EngineConfig, shape: ModelShape, scheduler: Scheduler) -> EngineObserver:
    """The observer that the setting `telemetry` asks for."""
    if config.telemetry == "off":
        return NoObserver()
    records = StepRecords(scheduler.pool, scheduler.block_observer, scheduler.techniques)
    return FullObserver(Accountant(shape), records, scheduler.techniques)
