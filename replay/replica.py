"""One engine on a virtual clock, and the messages that wait for the end of its turn."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from sojourn.engine.config import EngineConfig
from sojourn.engine.loop.engine import Engine
from sojourn.engine.loop.scheduling import make_scheduler
from sojourn.engine.memory.window import FreedWindow
from sojourn.engine.messages import Abort, Ended, Observed, Submit, Tokens
from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.scheduler import Scheduler
from sojourn.engine.request.token_budget import TokenBudget
from sojourn.engine.techniques.planning import planning
from sojourn.engine.telemetry.accounting import Turn
from sojourn.engine.telemetry.observer import NoObserver
from sojourn.replay.decode_runs import DecodeRun, SteadySteps, advance, next_run
from sojourn.replay.replayed_model import ReplayedDrafts, ReplayedModel
from sojourn.replay.simulated_runner import SimulatedRunner, StepModel, VirtualClock
from sojourn.replay.simulated_tiers import SimulatedTiers, TierSpeed, simulated_tiers


class Clients(Protocol):
    """Who sends requests, and reads the answers."""

    def hashes_of(self, request_id: str) -> list[bytes] | None:
        """Of all the blocks that a request will ever fill; None: they follow from its tokens."""
        ...

    def first_token(self, request_id: str, now_ns: float) -> None: ...

    def ended(self, ended: Ended, now_ns: float) -> None:
        """A request ended with its last token, which left the core at `now_ns`."""
        ...


class ReplayObserver(NoObserver):
    """What a replay counts of the plans."""

    def __init__(self) -> None:
        super().__init__()
        self.preemptions = 0
        self.plan = StepPlan(0, 0)  # the last one

    def planned(self, plan: StepPlan, turn: Turn) -> None:
        self.preemptions += len(plan.preempted)
        self.plan = plan


class Replica:
    """Drives an engine as the core does (`engine.core.loop`). Times are float ns.

    `tiers` are those of the scheduler. With `steady`, the runner's step model, turns that decode one batch are taken at
    once.
    """

    def __init__(
        self, scheduler: Scheduler, runner: SimulatedRunner, clients: Clients, *, overlap: bool,
        tiers: SimulatedTiers | None = None, steady: SteadySteps | None = None,
    ) -> None:  # fmt: skip
        self.scheduler, self.runner, self.clock = scheduler, runner, runner.clock
        self.observer = ReplayObserver()
        self.engine = Engine(scheduler, runner, self.observer, self._take, overlap=overlap, clock=self.clock)
        self.cutoff_ns = math.inf  # messages until then are received by the next turn; infinite: it sleeps
        self._begin_ns = self._received_ns = -math.inf  # a prelude comes before moment 0
        self._is_asleep, self._asleep_since_ns = True, self._begin_ns
        self._clients, self._tiers = clients, tiers
        self._messages: list[Submit | Abort] = []
        self._num_arrived = 0  # requests among them
        self._silent: set[str] = set()  # requests without a token
        self._committed_ns = 0.0
        self._has_ended = False  # a request, in the last turn
        self._steady = steady
        self._run: DecodeRun | None = None

    @property
    def waiting(self) -> int:
        """Requests without a place in the batch."""
        return self.scheduler.num_waiting + self._num_arrived + self.engine.num_preparing

    @property
    def num_steps(self) -> int:
        return self.engine.step_number

    def submit(self, message: Submit, now_ns: float) -> None:
        self._num_arrived += 1
        self._silent.add(message.request_id)
        self._deliver(message, now_ns)

    def abort(self, request_id: str, now_ns: float) -> None:
        self._deliver(Abort(request_id), now_ns)

    def turn(self) -> None:
        """Receives, and takes a step if there is work."""
        if self._run is not None:
            self._advance(self._run.count)
        engine, clock, num_steps = self.engine, self.clock, self.num_steps
        self._is_asleep = self._has_ended = False
        clock.now_ns, self.runner.turn_began_ns = self._received_ns, self._begin_ns
        messages, self._messages, self._num_arrived = self._messages, [], 0
        engine.receive(messages, math.ceil(self._begin_ns))
        if not engine.has_work:
            self._sleep(clock.now_ns)
            return
        engine.step()
        if self.num_steps > num_steps:
            self._end(clock.now_ns + self.runner.read.publish, self.runner.read.receive)
            self._begin_run()
        elif self.runner.under_way:
            self._end(clock.now_ns, 0.0)
        elif self.observer.plan.preempted:  # the next turn admits again
            self._end(clock.now_ns, self.runner.steps.idle_receive_ns)
        else:
            self._sleep(clock.now_ns)

    def _deliver(self, message: Submit | Abort, now_ns: float) -> None:
        """What comes while a turn goes on is received when that has ended."""
        if self._run is not None:
            self._advance(self._run.turns_until(now_ns))
        self._messages.append(message)
        begin_ns = max(now_ns, self._asleep_since_ns)
        if self._is_asleep and (self.cutoff_ns == math.inf or begin_ns < self._begin_ns):
            self._rise(begin_ns)

    def _take(self, message: object) -> None:
        """What the engine publishes."""
        if isinstance(message, Tokens):
            self._committed_ns = self.clock.now_ns
            silent = self._silent
            if silent:
                for output in message.outputs:
                    if output.request_id in silent:
                        silent.remove(output.request_id)
                        self._clients.first_token(output.request_id, self._committed_ns)
        elif isinstance(message, Observed):
            for ended in message.ended:
                self._has_ended = True
                if ended.reason == "abort":
                    self._silent.discard(ended.request_id)
                else:
                    self._clients.ended(ended, self._committed_ns)

    def _end(self, end_ns: float, receive_ns: float) -> None:
        self._begin_ns = end_ns
        if self.engine.has_work:
            self._received_ns = self.cutoff_ns = end_ns + receive_ns
        else:
            self._sleep(end_ns)

    def _sleep(self, now_ns: float) -> None:
        self._begin_ns = self._asleep_since_ns = self.clock.now_ns = now_ns
        self.cutoff_ns, self._is_asleep = math.inf, True
        self.engine.flush()
        if self._tiers is not None and self.engine.num_preparing:
            self._rise(max(self._tiers.next_read_ns, now_ns))

    def _rise(self, begin_ns: float) -> None:
        self._begin_ns = begin_ns
        self._received_ns = self.cutoff_ns = begin_ns + self.runner.steps.idle_receive_ns

    def _begin_run(self) -> None:
        """What waits could be refused again only for the same reason: nothing has left the batch since."""
        if self._steady is None or self._messages or (self.scheduler.num_waiting and self._has_ended):
            return
        self._run = next_run(self.scheduler, self.observer.plan, self._steady, self._received_ns)
        if self._run is not None:
            self.cutoff_ns = self._run.received_ns(self._run.count)

    def _advance(self, turns: int) -> None:
        """Takes the first `turns` of the run."""
        run, self._run = self._run, None
        assert run is not None and self._steady is not None
        self._received_ns = self.cutoff_ns = run.received_ns(turns)
        if not turns:
            return
        self._begin_ns = self.cutoff_ns - run.first.receive
        self.runner.free_ns = self._begin_ns - run.first.publish - run.first.after
        self.engine.step_number += turns
        self._steady.took(run, turns)
        advance(self.scheduler, self.observer.plan, turns, self.engine.step_number - 1)


def make_replica(
    config: EngineConfig, turns: StepModel, clients: Clients, *, overlap: bool, budget: TokenBudget | None = None,
    window: FreedWindow | None = None, drafts: ReplayedDrafts | None = None, block_bytes: int | None = None,
    tier_speeds: Mapping[str, TierSpeed] = MappingProxyType({}), steady: SteadySteps | None = None,
) -> Replica:  # fmt: skip
    """With these settings. Raises ReplayError for a KV tier without a speed."""
    assert config.num_kv_blocks is not None, "the size of the pool is known"
    clock = VirtualClock()
    tiers = simulated_tiers(config, block_bytes, tier_speeds, clock)
    runner = SimulatedRunner(clock, turns, ReplayedModel(clients.hashes_of, drafts, tiers))
    books = None if tiers is None else tiers.books
    techniques = planning(config, runner, tiers=books, max_loras=config.max_loras)
    scheduler = make_scheduler(config, config.num_kv_blocks, budget, techniques, window)
    return Replica(scheduler, runner, clients, overlap=overlap, tiers=tiers, steady=steady)
