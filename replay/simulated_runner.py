"""A runner on a virtual clock: a step model says how long a turn takes, a model of the device what it computes.

With it the engine's own loop replays a run, and tests of the loop have a device whose times are known.
"""

import math
from collections import deque
from typing import Any, NamedTuple, Protocol

from sojourn.engine.request.plan import LaunchedStep, Preparation, StepOutcome, StepPlan
from sojourn.engine.request.request import Request


class VirtualClock:
    """The engine reads whole nanoseconds. Every reading is later than the one before by `tick_ns`, so that a test sees
    forgotten time."""

    def __init__(self, tick_ns: int = 0):
        self.now_ns: float = 0
        self.tick_ns = tick_ns

    def __call__(self) -> int:
        self.now_ns += self.tick_ns
        return math.ceil(self.now_ns)


class TurnTimes(NamedTuple):
    """Nanoseconds of one turn."""

    before: float  # received → launched
    device: float
    after: float  # the device is done → committed
    publish: float
    receive: float  # of the turn after it


class StepModel(Protocol):
    """Says how long turns take."""

    def times(self, plan: StepPlan, begin_ns: float) -> TurnTimes: ...

    @property
    def idle_receive_ns(self) -> float:
        """Of a turn that a message wakes."""
        ...


class Computed(NamedTuple):
    """What a step computes."""

    sampled: dict[str, list[int]]  # as in StepOutcome
    load_ns: float = 0  # of the device's time: copies from host memory, and to it
    store_ns: float = 0


class SimulatedModel(Protocol):
    """What the device computes, and what its proposer drafts."""

    def begin(self, request: Request) -> Preparation | None:
        """As a `Runner`."""
        ...

    def compute(self, plan: StepPlan) -> Computed:
        """A step is launched: the device knows what it draws before the host does."""
        ...

    def drafts(self, plan: StepPlan, sampled: dict[str, list[int]]) -> tuple[dict[str, tuple[int, ...]], int]:
        """The host reads that step: drafts for the next one, and the proposer's nanoseconds."""
        ...

    def transfer(self, transfers: Any) -> tuple[float, float]:
        """Nanoseconds of loads and stores that no step makes."""
        ...


class SimulatedWork(NamedTuple):
    """A step under way."""

    device_begin_ns: float
    device_end_ns: float
    times: TurnTimes
    computed: Computed


class SimulatedRunner:
    """Steps take their time on the virtual clock. The device works in the order of the launches."""

    stores_beside_steps = True

    def __init__(self, clock: VirtualClock, steps: StepModel, model: SimulatedModel):
        self.clock, self.steps, self.model = clock, steps, model
        self.free_ns = -math.inf  # when the device is done with what it was given
        self.turn_began_ns: float = 0
        self.under_way: deque[LaunchedStep] = deque()
        self.read = TurnTimes(0, 0, 0, 0, 0)  # of the step that was read last

    def begin(self, request: Request) -> Preparation | None:
        return self.model.begin(request)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        assert plan.scheduled, "a step computes nothing: whoever waits now waits for ever"
        clock = self.clock
        times = self.steps.times(plan, self.turn_began_ns)
        computed = self.model.compute(plan)
        clock.now_ns += times.before
        prepared_ns, launched_ns = clock(), clock()
        begin_ns = max(clock.now_ns, self.free_ns)
        self.free_ns = begin_ns + times.device + computed.load_ns + computed.store_ns
        work = SimulatedWork(begin_ns, self.free_ns, times, computed)
        step = LaunchedStep(plan, prepared_ns, launched_ns, work)
        self.under_way.append(step)
        return step

    def collect(self, step: LaunchedStep) -> StepOutcome:
        assert self.under_way.popleft() is step, "steps are read in the order of their launch"
        clock, plan, work = self.clock, step.plan, step.state
        sampled, load_ns, store_ns = work.computed
        self.read = work.times
        clock.now_ns = max(clock.now_ns, work.device_end_ns) + work.times.after
        waited_ns = sampled_ns = clock()
        drafts, draft_ns = self.model.drafts(plan, sampled)
        if plan.wanted:
            clock.now_ns += draft_ns
            sampled_ns = clock()
        return StepOutcome(
            sampled, waited_ns, sampled_ns, round(work.device_begin_ns), round(work.device_end_ns), 0,
            load_ns=round(load_ns), store_ns=round(store_ns), drafts=drafts, draft_ns=draft_ns,
            logit_rows=sum([1 + len(item.drafts) for item in plan.scheduled if item.samples]),
        )  # fmt: skip

    def between_steps(self, name: str, work: Any) -> tuple[int, int] | None:
        """Adapters are in host memory: their reading is in the recorded times."""
        if name != "tiers":
            return None
        load_ns, store_ns = self.model.transfer(work)
        return round(load_ns), round(store_ns)

    def forget(self, request_id: str) -> None:
        """Nothing is kept for a request."""

    def close(self) -> None:
        """No process computes."""
