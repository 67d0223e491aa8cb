"""What stands around the loop: a technique is called at these moments, each once per step or per event of a request.

The loop, the scheduler and the record of a step know no technique by name. A step's plan and outcome carry the part of
each under its name.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from sojourn.engine.memory.lower_tiers import LowerTiers
from sojourn.engine.request.plan import ScheduledTokens, StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.metrics.ledger import Account
from sojourn.metrics.records import StepRecord


class Wait(Protocol):
    """What a request waits for before it may be scheduled. It goes on beside the loop."""

    error: str | None  # a sentence, if it failed

    @property
    def waits_for(self) -> str:
        """One of metrics.records.REFUSALS."""
        ...

    @property
    def is_peer_error(self) -> bool:
        """Another server caused the error."""
        ...

    @property
    def is_done(self) -> bool: ...

    def accounts(self, now_ns: int) -> list[tuple[Account, int]]:
        """What the request waited for, in order, and until when; so far, while it is not done."""
        ...

    def note(self, request: Any) -> None:
        """It is over: what the record of its request says of it."""
        ...


class SideQueue(Protocol):
    """Requests that may not be admitted yet for a reason of their own. They block no other request."""

    name: str  # the reason: one of metrics.records.REFUSALS
    count: int

    def may_enter(self, request: Request) -> bool:
        """Whether the head of the policy's queue may be admitted; else it waits here."""
        ...

    def wait(self, request: Request) -> None: ...

    def leave(self, request: Request) -> None:
        """The request ended, or it tries again."""
        ...

    def returning(self) -> Sequence[Request]:
        """Those that may try again now."""
        ...


class Drafting(Protocol):
    """Decides which drafts a step verifies, and what comes of them."""

    def verify(self, request: Request, room: int, plan: StepPlan) -> int:
        """Plans a running request with its drafts, of which the step has `room`. Returns how many; 0: it plans nothing,
        and the request decodes."""
        ...

    def accept(self, item: ScheduledTokens, tokens: Sequence[int]) -> tuple[Sequence[int], int]:
        """The tokens that a request with drafts emits of those that it sampled, and its positions that count."""
        ...


class Technique:
    """One technique of one engine. Each hook does nothing unless a technique overrides it."""

    name: ClassVar[str]
    side_queue: SideQueue | None = None
    drafting: Drafting | None = None
    lower_tiers: LowerTiers | None = None
    scheduler: Any  # a Scheduler, from `join` on

    def join(self, scheduler: Any) -> None:
        """The scheduler that it stands around, before the first request."""
        self.scheduler = scheduler

    @property
    def is_waiting(self) -> bool:
        """Something goes on beside the loop, whose end only `poll` sees."""
        return False

    # Requests.

    def take(self, message: Any) -> None:
        """A message of the front that is neither a request nor the end of one. It may be for another technique."""

    def arrived(self, request: Request, message: Any) -> Wait | None:
        """A request came with this message (Submit). None: it may be scheduled at once."""
        return None

    def entered(self, request: Request) -> None:
        """A request was admitted, and runs."""

    def left(self, request: Request) -> None:
        """A running request ended, or was preempted."""

    def cancelled(self, request: Request) -> None:
        """A request ended between two steps, whether it ran, waited or was prepared."""

    def keeps(self, request: Request, now_ns: int) -> bool:
        """A request ended in a step. True: it is reported later, by `ended`."""
        return False

    # Steps.

    def planned(self, plan: StepPlan) -> None:
        """All shares of a step are planned. It may hold none, and is not launched then."""

    def launching(self, plan: StepPlan) -> None:
        """The step is launched next."""

    def collected(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """A step was read."""

    def committed(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """The tokens of a step are known to its requests."""

    # Between steps.

    def poll(self) -> None:
        """A turn begins: takes in what ended beside the loop."""

    def rest(self) -> None:
        """No step is under way, and none follows: work that would have gone along with one."""

    def ended(self, is_idle: bool) -> Iterable[tuple[Request, int, int]]:
        """Requests whose end was kept back: with when they ended in a step, and now. `is_idle`: no step is under
        way."""
        return ()

    def answers(self) -> Iterable[Any]:
        """Messages to the front that are due."""
        return ()

    # Telemetry.

    def report(self, request: Request) -> dict[str, Any]:
        """Fields of the message (Ended) that tells of the end of a request."""
        return {}

    def measure(self, request: Request, now_ns: int) -> None:
        """A request ended in a step, and its tokens are out."""

    def record(self, record: StepRecord, plan: StepPlan, outcome: StepOutcome) -> None:
        """Adds its part to the record of a step."""

    def close(self) -> None:
        """The loop ends."""
