"""The loop of the engine on a virtual clock: the real scheduler, memory and policies, and a step model for the device.

The order is that of engine/engine.py: receive what came, plan, launch, collect, commit. Nothing is recorded of a step.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request, State
from engine.request.scheduler import Emitted, Scheduler


class TurnTimes(NamedTuple):
    """Nanoseconds of one turn."""

    before: float  # received → launched
    device: float
    after: float  # the device is done → committed
    publish: float
    receive: float  # of the turn after it


class TurnModel(Protocol):
    """Tells how long turns take."""

    def times(self, plan: StepPlan, begin_ns: float) -> TurnTimes: ...

    @property
    def idle_receive_ns(self) -> float:
        """Of a turn that a message wakes."""
        ...


class Replica:
    """One engine: a scheduler, a device, and the messages that wait for the end of a turn. Times are float ns."""

    def __init__(
        self, scheduler: Scheduler, turns: TurnModel, on_emitted: Callable[[list[Emitted], float], None], *,
        overlap: bool,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.turns = turns
        self.overlap = overlap
        self.cutoff_ns = float("inf")  # messages until then are received by the next turn; infinite: it sleeps
        self.steps = 0
        self.preemptions = 0
        self._on_emitted = on_emitted
        self._begin_ns = self._received_ns = self._device_free_ns = float("-inf")  # a prelude comes before moment 0
        self._under_way: deque[tuple[StepPlan, float, TurnTimes]] = deque()
        self._arrived: list[Request] = []
        self._left: list[str] = []
        self._arrivals = 0

    @property
    def live(self) -> int:
        """Requests that it has, and has not finished."""
        return len(self.scheduler.requests) + len(self._arrived)

    @property
    def waiting(self) -> int:
        """Requests without a place in the batch."""
        return self.scheduler.num_waiting + len(self._arrived)

    def submit(self, request: Request, now_ns: float) -> None:
        self._arrivals += 1
        request.arrival_index = self._arrivals
        self._arrived.append(request)
        self._wake(now_ns)

    def abort(self, request_id: str, now_ns: float) -> None:
        self._left.append(request_id)
        self._wake(now_ns)

    def turn(self) -> None:
        """Receives, plans, launches, collects and commits, as `Engine.receive` and `Engine.step` do."""
        scheduler, under_way = self.scheduler, self._under_way
        self._receive()
        plan = None
        launched_ns = self._received_ns
        if not (under_way and under_way[-1][0].needs_commit) and scheduler.has_work:
            plan = scheduler.schedule()
            self.preemptions += len(plan.preempted)
            plan = plan if plan.scheduled else None
        if plan is not None:
            times = self.turns.times(plan, self._begin_ns)
            launched_ns += times.before
            device_begin_ns = max(launched_ns, self._device_free_ns)
            self._device_free_ns = device_begin_ns + times.device
            under_way.append((plan, self._device_free_ns, times))
        elif not under_way:
            self._sleep(launched_ns)
            return
        if plan is not None and self.overlap and len(under_way) == 1:
            self._end(launched_ns, 0.0)
            return
        plan, device_end_ns, times = under_way.popleft()
        committed_ns = max(launched_ns, device_end_ns) + times.after
        # Which tokens does not matter, as hashes are known; but two choices of one prompt must not say the same.
        sampled = {item.request.id: [-item.request.arrival_index] for item in plan.scheduled if item.samples}
        emitted = scheduler.commit(plan, StepOutcome(sampled, 0, 0, 0, 0, 0), self.steps)
        self.steps += 1
        self._on_emitted(emitted, committed_ns)
        self._end(committed_ns + times.publish, times.receive)

    def _receive(self) -> None:
        scheduler = self.scheduler
        for request in self._arrived:
            scheduler.add(request)
        self._arrived.clear()
        for request_id in self._left:
            known = scheduler.requests.get(request_id)
            if known is not None and known.state is not State.FINISHED:
                scheduler.abort(known)
        self._left.clear()

    def _end(self, end_ns: float, receive_ns: float) -> None:
        self._begin_ns = end_ns
        if self._under_way or self.scheduler.has_work:
            self._received_ns = self.cutoff_ns = end_ns + receive_ns
        else:
            self._sleep(end_ns)

    def _sleep(self, now_ns: float) -> None:
        self._begin_ns = now_ns
        self.cutoff_ns = float("inf")

    def _wake(self, now_ns: float) -> None:
        if self.cutoff_ns == float("inf"):
            self._begin_ns = max(now_ns, self._begin_ns)
            self._received_ns = self.cutoff_ns = self._begin_ns + self.turns.idle_receive_ns
