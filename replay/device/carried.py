"""A recorded run on another device: by how much longer or shorter the device takes for each plan.

The ratio of two estimates of one plan multiplies what the run's own steps say: its noise, host and network stay. So an
error that both estimates share cancels.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sojourn.engine.config import EngineConfig
from sojourn.metrics.compute.cost_model import ModelShape, shape_from
from sojourn.metrics.compute.model_catalog import bundled_models, config_path, known_name
from sojourn.metrics.compute.number_formats import weight_format
from sojourn.metrics.errors import InputError, ReplayError
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.device.catalogue import catalogue, device_named
from sojourn.replay.device.estimate import Deployment, DeviceEstimate, DeviceStep, KnownError
from sojourn.replay.device.known_errors import ratio_error
from sojourn.replay.device.makers import estimate_of
from sojourn.replay.device.recorded_steps import RECORDED, RecordedSteps, recorded_deployment, recorded_steps
from sojourn.replay.step_fit import StepTimes

ENGINE_DEVICES = ("auto", "cpu", "cuda")  # values of the engine's setting of the same name
CARRIED = ("device", "tensor_parallel", "weight_format", "recorded_device", "recorded_model")  # settings of a change
UNKNOWN = Deployment(model=RECORDED, device=RECORDED)
WORST_P90 = 0.4  # of the errors of such estimates: beyond it a prediction is doubted


class Carried(NamedTuple):
    """The estimates of the recorded deployment and of the one that it is carried to."""

    before: DeviceEstimate
    after: DeviceEstimate
    error: KnownError | None  # of their ratio
    is_stand_in: bool = False  # kernels as vLLM runs them speak for those of another engine

    def ratio(self, step: DeviceStep) -> float:
        """Raises OutsideTables."""
        return self.after.device_ns(step) / max(self.before.device_ns(step), 1.0)

    def check(self, longest: int, config: EngineConfig) -> None:
        """Raises OutsideTables where the largest steps of requests of so many tokens are outside of the tables."""
        budget = config.max_num_batched_tokens
        chunk = min(longest, budget if isinstance(budget, int) else longest)
        for step in (DeviceStep((), 1, longest), DeviceStep(((chunk, longest - chunk),), 0, 0)):
            self.ratio(step)

    def budget_times(self, recorded: StepTimes) -> StepTimes:
        """What max_num_batched_tokens=auto has learnt: of another run its steps; else those of this run."""
        return self.after.times if isinstance(self.after, RecordedSteps) else recorded

    def doubts(self) -> list[str]:
        if isinstance(self.after, RecordedSteps) or self.after.deployment == self.before.deployment:
            return []
        if self.is_stand_in:
            return ["The kernels are measured as vLLM runs them, and this run is of another engine."]
        if self.error is None:
            return ["No public measurement judges the estimate of this device."]
        if self.error.p90 <= WORST_P90:
            return []
        return [
            f"On public measurements one of ten such estimates is wrong by more than {self.error.p90:.0%} "
            f"({self.error.cell})."
        ]

    def sentence(self) -> str:
        """On what the ratio rests."""
        said = f"{self.after.provenance}, over {self.before.provenance}"
        if self.before.provenance == self.after.provenance:
            said = self.after.provenance
        if self.error is None:
            return said
        e = self.error
        return (
            f"{said}; on {e.measurements:,} public pairs wrong by {e.median:.1%}, one of ten by more than {e.p90:.0%} "
            f"({e.cell})"
        )

    @property
    def room(self) -> float:
        """The KV pool, over that of the recorded deployment."""
        return self.after.kv_tokens / self.before.kv_tokens


def is_carried(change: Change, recorded: Deployment) -> bool:
    """Whether a change names hardware of the catalogue, or of another run, rather than a setting of the engine."""
    settings = change.settings
    if not settings.keys().isdisjoint(("weight_format", "recorded_device", "recorded_model")):
        return True
    if "device" in settings:
        return settings["device"] not in ENGINE_DEVICES
    # Of our own engine a group's run tells itself what one process would take: replay/parallel.py.
    return "tensor_parallel" in settings and recorded.device != RECORDED and recorded.backend != "sojourn"


def without_hardware(change: Change) -> Change:
    """What is left of the change for the scheduler and the memory."""
    kept = {name: value for name, value in change.settings.items() if name not in CARRIED}
    return msgspec.structs.replace(change, settings=kept)


def carried_to(change: Change, own: RecordedSteps, shape: ModelShape | None) -> Carried:
    """The estimates of a change of hardware: the steps of two runs where the device is another run, else tables of
    measured kernels. `own` are the steps of the recorded run, `shape` is its model. Raises ReplayError."""
    settings, recorded = change.settings, own.deployment
    if (Path(str(settings.get("device", ""))) / "run.json").is_file():
        return Carried(own, _another_run(Path(settings["device"]), shape, recorded.model), None)
    if "/" in str(settings.get("device", "")):
        raise ReplayError(f"device={settings['device']} is no folder of a run: it has no run.json")
    is_stand_in = recorded.backend == "sojourn"
    before = msgspec.structs.replace(
        recorded,
        backend="vllm" if is_stand_in else recorded.backend,
        device=str(settings.get("recorded_device", recorded.device)),
        model=str(settings.get("recorded_model", recorded.model)),
    )
    if before.device == RECORDED:
        raise ReplayError(
            "run.json does not name a GPU of the catalogue, so that nothing is known of the device that this run had; "
            f"give recorded_device beside it, one of {', '.join(catalogue())}"
        )
    if config_path(before.model) is None and known_name(before.model) is None:
        raise ReplayError(
            f"run.json calls the model {before.model!r}, of which no sizes are known; give recorded_model beside it: a "
            f"folder with its config.json, or a name such as {', '.join(bundled_models()[:3])}"
        )
    try:
        after = msgspec.structs.replace(
            before,
            device=str(settings.get("device", before.device)),
            tensor_parallel=_degree(settings.get("tensor_parallel", before.tensor_parallel)),
            weight_format=weight_format(str(settings.get("weight_format", before.weight_format))).name,
        )
        for each in (before, after):
            device_named(each.device)
        return Carried(estimate_of(before), estimate_of(after), ratio_error(before, after, "kernels"), is_stand_in)
    except InputError as error:
        raise ReplayError(str(error)) from None


def _another_run(path: Path, shape: ModelShape | None, model: str) -> RecordedSteps:
    """Raises ReplayError where it is of another model, or has no steps."""
    run = RunDirectory(path)
    meta = run.meta()
    if shape_from(meta) != shape or recorded_deployment(meta).model != model:
        raise ReplayError(f"{run.name} is of another model, so that its steps say nothing of this one's")
    return recorded_steps(run)


def _degree(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ReplayError(f"tensor_parallel={value} is no degree; give a whole number above 0, such as 2")
    return value
