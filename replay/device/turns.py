"""The turns of a server whose steps take what a device estimate says: a step model of the replay."""

from collections.abc import Callable, Sequence

from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.request.token_budget import FixedBudget
from sojourn.replay.decode_runs import DecodeRun
from sojourn.replay.device.estimate import DeviceEstimate, DeviceStep, device_step
from sojourn.replay.simulated_runner import TurnTimes


class EstimatedTurns:
    """Owns what a simulation counts of its steps. Times follow from the plan alone."""

    idle_receive_ns = 0.0
    extrapolated_ns = 0.0  # an estimate refuses what it does not reach

    def __init__(self, estimate: DeviceEstimate) -> None:
        self._estimate = estimate
        self.device_ns = 0.0
        self.steps = self.step_sequences = 0

    def times(self, plan: StepPlan, begin_ns: float) -> TurnTimes:
        device_ns = self._estimate.device_ns(device_step(plan))
        self.device_ns += device_ns
        self.steps += 1
        self.step_sequences += len(plan.scheduled)
        return self._turn(device_ns)

    def _turn(self, device_ns: float) -> TurnTimes:
        return TurnTimes(self._estimate.host_ns, device_ns, 0.0, 0.0, 0.0)

    def decode_run(self, past_tokens: Sequence[int], count: int) -> tuple[TurnTimes, float]:
        """The first of `count` turns that decode these sequences, and by how many ns the device's time grows in each:
        in a straight line, as the tables do between two contexts."""
        decodes, past = len(past_tokens), sum(past_tokens)
        first = self._estimate.device_ns(DeviceStep((), decodes, past))
        last = self._estimate.device_ns(DeviceStep((), decodes, past + decodes * (count - 1)))
        return self._turn(first), (last - first) / max(1, count - 1)

    def took(self, run: DecodeRun, turns: int) -> None:
        self.device_ns += turns * run.first.device + run.growth_ns * (turns * (turns - 1) // 2)
        self.steps += turns


class WholePrompts(FixedBudget):
    """A token budget of a server that computes whole prompts beside its decodes: as many as fit in a step. A prompt
    longer than a step has steps of its own. `waiting` are the lengths of those that wait, the next one first."""

    def __init__(self, most: int, waiting: Callable[[], Sequence[int]]) -> None:
        super().__init__(most)
        self._waiting = waiting

    def beside(self, decodes: Sequence[Request], prompts: Sequence[Request]) -> int:
        if prompts:  # one that is longer than a step goes on
            return self.most
        room, taken = self.most - len(decodes), 0
        for tokens in self._waiting():
            if taken + tokens > room:
                break
            taken += tokens
        return min(self.most, len(decodes) + taken) if taken else self.most
