"""The loop of the engine on a virtual clock: the real scheduler, memory and policies, and a step model for the device.

The order is that of engine/loop/engine.py: receive what came, plan, launch, collect, commit. It records no steps.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.request import Request, State
from sojourn.engine.request.scheduler import Emitted, Scheduler
from sojourn.replay.drafts import ReplayedDrafts
from sojourn.replay.tiers import ReplayedTiers


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


class Launched(NamedTuple):
    """A step under way. Moments are ns of the virtual clock."""

    plan: StepPlan
    device_begin_ns: float
    device_end_ns: float
    times: TurnTimes
    load_ns: float  # of the device's time: copies from host memory, and to it
    store_ns: float


class Replica:
    """One engine: a scheduler, a device, and the messages that wait for the end of a turn. Times are float ns.

    `drafts` say what comes of speculation, `tiers` are those of the scheduler; None where the settings have none.
    """

    def __init__(
        self, scheduler: Scheduler, turns: TurnModel, on_emitted: Callable[[list[Emitted], float], None], *,
        overlap: bool, drafts: ReplayedDrafts | None = None, tiers: ReplayedTiers | None = None,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.turns = turns
        self.overlap = overlap
        self.cutoff_ns = float("inf")  # messages until then are received by the next turn; infinite: it sleeps
        self.steps = 0
        self.preemptions = 0
        self._on_emitted = on_emitted
        self._begin_ns = self._received_ns = self._device_free_ns = float("-inf")  # a prelude comes before moment 0
        self._drafts, self._tiers = drafts, tiers
        self._under_way: deque[Launched] = deque()
        self._arrived: list[Request] = []
        self._left: list[str] = []
        self._arrivals = 0
        self._is_asleep, self._asleep_since_ns = True, self._begin_ns

    @property
    def live(self) -> int:
        """Requests that it has, and has not finished."""
        return len(self.scheduler.requests) + len(self._arrived) + self._num_loading

    @property
    def waiting(self) -> int:
        """Requests without a place in the batch."""
        return self.scheduler.num_waiting + len(self._arrived) + self._num_loading

    @property
    def _num_loading(self) -> int:
        return 0 if self._tiers is None else self._tiers.num_waiting

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
        self._is_asleep = False
        self._receive()
        plan = None
        launched_ns = self._received_ns
        if not (under_way and under_way[-1].plan.needs_commit) and scheduler.has_work:
            plan = scheduler.schedule()
            self.preemptions += len(plan.preempted)
            plan = plan if plan.scheduled else None
        if plan is not None:
            launched_ns += self._launch(plan, launched_ns)
        elif not under_way:
            self._sleep(launched_ns)
            return
        if plan is not None and self.overlap and len(under_way) == 1:
            self._end(launched_ns, 0.0)
            return
        launched = under_way.popleft()
        committed_ns = max(launched_ns, launched.device_end_ns) + launched.times.after
        outcome = self._outcome(launched)
        emitted = scheduler.commit(launched.plan, outcome, self.steps)
        self.steps += 1
        committed_ns += outcome.draft_ns
        self._on_emitted(emitted, committed_ns)
        self._end(committed_ns + launched.times.publish, launched.times.receive)

    def _launch(self, plan: StepPlan, now_ns: float) -> float:
        """The host's time for it."""
        times = self.turns.times(plan, self._begin_ns)
        load_ns = store_ns = 0.0
        if self._tiers is not None:
            transfers = plan.parts["tiers"] = self._tiers.books.take_transfers()
            load_ns, store_ns = self._tiers.transfer_ns(transfers)
        device_begin_ns = max(now_ns + times.before, self._device_free_ns)
        self._device_free_ns = device_begin_ns + times.device + load_ns + store_ns
        self._under_way.append(Launched(plan, device_begin_ns, self._device_free_ns, times, load_ns, store_ns))
        return times.before

    def _outcome(self, launched: Launched) -> StepOutcome:
        """Which tokens does not matter, as hashes are known; but two choices of one prompt must not say the same."""
        plan, drafts = launched.plan, self._drafts
        sampled = {item.request.id: [-item.request.arrival_index] for item in plan.scheduled if item.samples}
        if drafts is None and self._tiers is None:
            return StepOutcome(sampled, 0, 0, 0, 0, 0)
        outcome = StepOutcome(
            sampled, 0, 0, round(launched.device_begin_ns), round(launched.device_end_ns), 0,
            load_ns=round(launched.load_ns), store_ns=round(launched.store_ns),
        )  # fmt: skip
        if drafts is not None:
            for item in plan.scheduled:
                if item.drafts:
                    sampled[item.request.id] *= 1 + drafts.num_accepted(item)
            if plan.wanted:
                outcome.drafts, took_ns = drafts.proposed(plan)
                outcome.draft_ns = round(took_ns)
        if self._tiers is not None:
            self._tiers.collected(plan, outcome)
        return outcome

    def _receive(self) -> None:
        scheduler, arrived = self.scheduler, self._arrived
        if self._tiers is not None:
            arrived = self._tiers.receive(scheduler, arrived, self._received_ns)
        for request in arrived:
            scheduler.add(request)
        self._arrived.clear()
        for request_id in self._left:
            known = scheduler.requests.get(request_id)
            if known is not None and known.state is not State.FINISHED:
                scheduler.abort(known)
            elif self._tiers is not None:
                self._tiers.abort(request_id)
        self._left.clear()

    def _end(self, end_ns: float, receive_ns: float) -> None:
        self._begin_ns = end_ns
        if self._under_way or self.scheduler.has_work:
            self._received_ns = self.cutoff_ns = end_ns + receive_ns
        else:
            self._sleep(end_ns)

    def _sleep(self, now_ns: float) -> None:
        self._begin_ns = self._asleep_since_ns = now_ns
        self.cutoff_ns, self._is_asleep = float("inf"), True
        if self._tiers is not None:
            self._tiers.flush()
            if (read_ns := self._tiers.next_end_ns) < self.cutoff_ns:  # a block that somebody waits for
                self._rise(max(read_ns, now_ns))

    def _wake(self, now_ns: float) -> None:
        """For a message. What came while the last turn went on is received when that has ended."""
        begin_ns = max(now_ns, self._asleep_since_ns)
        if self._is_asleep and (self.cutoff_ns == float("inf") or begin_ns < self._begin_ns):
            self._rise(begin_ns)

    def _rise(self, begin_ns: float) -> None:
        self._begin_ns = begin_ns
        self._received_ns = self.cutoff_ns = begin_ns + self.turns.idle_receive_ns
