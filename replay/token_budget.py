"""The token budget of a replay with max_num_batched_tokens=auto: that of the engine, with the fitted model of steps."""

from sojourn.engine.config import EngineConfig, largest_step_tokens
from sojourn.engine.request.token_budget import FixedBudget, StepTarget, TimedBudget, TokenBudget
from sojourn.metrics.compute.cost_model import StepWork
from sojourn.metrics.prediction import Change
from sojourn.metrics.request.objectives import EVERY_CLASS, objectives_of
from sojourn.replay.step_fit import StepTimes

ONE_LAYER = ((None, 1),)  # the fitted model counts the pairs of one layer


class FittedStepTime:
    """What a server has learnt of its steps, as it would be in the middle of the run."""

    def __init__(self, times: StepTimes, slowness: float) -> None:
        self._times = times
        self._slowness = slowness

    def predict_work(self, work: StepWork, *, eager: bool = True) -> float:
        """Of the device. `eager` says nothing that the work does not: in the fit, only steps with prompts are eager."""
        expected_ns = self._times.device_ns(
            int(work.tokens), int(work.decodes), int(work.decode_pairs), int(work.chunks), int(work.chunk_pairs),
            int(work.logit_rows),
        )  # fmt: skip
        return self._slowness * expected_ns


def token_budget(
    config: EngineConfig, change: Change, times: StepTimes, slowness: float, device_type: str,
    objective_tpot_ms: float | None,
) -> TokenBudget:  # fmt: skip
    """`objective_tpot_ms` is that of the recorded server; a change may bring another."""
    most = largest_step_tokens(config, device_type)
    if config.max_num_batched_tokens != "auto":
        return FixedBudget(most)
    if change.objectives is not None:
        objective_tpot_ms = objectives_of(EVERY_CLASS, change.objectives).get("tpot_ms")
    objective_tpot_ms = change.settings.get("objective_tpot_ms", objective_tpot_ms)
    step_time = FittedStepTime(times, slowness / change.device_speed)
    return TimedBudget(most, ONE_LAYER, StepTarget(objective_tpot_ms), step_time)
