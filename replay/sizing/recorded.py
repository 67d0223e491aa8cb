"""The steps of a recorded run as an estimate: what its own machine takes for steps of this model."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from sojourn.engine.config import largest_step_tokens
from sojourn.metrics.compute.cost_model import shape_from
from sojourn.metrics.compute.model_catalog import find_model
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section
from sojourn.replay.device.carried import RECORDED, recorded_deployment
from sojourn.replay.device.composition import SERVING
from sojourn.replay.device.estimate import Composition, Deployment, DeviceStep, KnownError
from sojourn.replay.fleet.simulate import UsualNoise
from sojourn.replay.settings import overlaps, recorded_config
from sojourn.replay.step_fit import StepColumns, StepTimes
from sojourn.replay.steps_table import FEWEST_STEPS, step_columns, under_load

# The median and the p90 of the sizes of normal errors, and half of what holds 80 %, as multiples of their mean size.
OF_MEAN = {"median": 0.845, "p90": 2.06, "80%": 1.61}


class RecordedSteps:
    """A `DeviceEstimate` of the fitted steps of a run. A turn's host time belongs to the step, and what stalled the
    machine now and then is spread over all steps."""

    host_ns = 0.0

    def __init__(
        self, columns: StepColumns, deployment: Deployment, kv_tokens: int, name: str, *, overlap: bool
    ) -> None:  # fmt: skip
        self._times = times = StepTimes(columns, None)
        self.deployment, self.kv_tokens = deployment, kv_tokens
        self.composition: Composition = SERVING[deployment.backend].composition
        self._device_ratio, self._host_ratio, _ = UsualNoise(times).at(0.0, 0.0)
        self._stages = [] if overlap else [tuple(stage.tolist()) for stage in times.host]
        self.provenance = f"steps of {name}"
        error = times.error
        self.error: KnownError | None = None
        if np.isfinite(error):
            self.error = error_of_mean(f"sizes of steps left out of the fit of {name}", error)
        self._stalled = 1.0
        self._stalled = self._taken_ns(columns, overlap=overlap) / self._said_ns(columns)

    def device_ns(self, step: DeviceStep) -> float:
        return self._step_ns(step.tokens, step.decodes, step.decode_pairs, len(step.chunks), step.chunk_pairs)

    def _step_ns(self, tokens: int, decodes: int, decode_pairs: int, chunks: int, chunk_pairs: int) -> float:
        sequences = decodes + chunks
        device = self._times.device_ns(tokens, decodes, decode_pairs, chunks, chunk_pairs, sequences)
        host = sum(c[0] + c[1] * sequences + c[2] * chunks + c[3] * tokens for c in self._stages)
        return (device * self._device_ratio + host * self._host_ratio) * self._stalled

    def _said_ns(self, columns: StepColumns) -> float:
        fields = (columns.tokens, columns.decodes, columns.decode_pairs, columns.chunks, columns.chunk_pairs)
        return sum(self._step_ns(*map(int, step)) for step in zip(*(each.tolist() for each in fields), strict=True))

    @staticmethod
    def _taken_ns(columns: StepColumns, *, overlap: bool) -> float:
        host = columns.receive_ns + columns.before_ns + columns.after_ns + columns.publish_ns
        return float(np.nansum(columns.device_ns if overlap else columns.device_ns + host))


def error_of_mean(cell: str, mean: float) -> KnownError:
    """Of errors by the normal distribution whose size is `mean` on average."""
    return KnownError(
        cell=cell, measurements=0, median=OF_MEAN["median"] * mean, p90=OF_MEAN["p90"] * mean, bias=0.0,
        low=1 - min(OF_MEAN["80%"] * mean, 0.9), high=1 + OF_MEAN["80%"] * mean,
    )  # fmt: skip


def _own_deployment(name: str, meta: Mapping[str, Any], asked: Deployment) -> Deployment:
    """Raises ReplayError where the run's steps say nothing of what is asked for."""
    recorded, shape = recorded_deployment(meta), shape_from(meta)
    if asked.model != RECORDED and shape is not None:
        sizes = find_model(asked.model)
        if (shape.hidden_size, shape.num_layers) != (sizes.hidden_size, sizes.num_layers):
            raise ReplayError(
                f"{name} is of another model than {sizes.name}: {shape.num_layers} layers of {shape.hidden_size}, not "
                f"{sizes.num_layers} of {sizes.hidden_size}; so its steps say nothing of this one's"
            )
    if asked.tensor_parallel != recorded.tensor_parallel:
        raise ReplayError(
            f"{name} was recorded with a tensor parallel degree of {recorded.tensor_parallel}, and its steps say "
            f"nothing of {asked.tensor_parallel}; give --tp {recorded.tensor_parallel}"
        )
    return msgspec.structs.replace(recorded, model=asked.model, device=RECORDED)


def recorded_steps(run: RunDirectory, deployment: Deployment) -> tuple[RecordedSteps, dict[str, Any]]:
    """And the settings of the recorded server, as which it is deployed: of `deployment` only the model counts. Raises
    ReplayError where the run shows neither, or is of another model or degree."""
    meta = run.meta()
    deployment = _own_deployment(run.name, meta, deployment)
    requests, steps = run.requests(), run.table("steps")
    if len(requests):
        steps = under_load(steps, requests)
    if len(steps) < FEWEST_STEPS:
        raise ReplayError(
            f"{run.name} has {len(steps)} step records; the time of a step is learnt from at least {FEWEST_STEPS}"
        )
    core, settings = section(meta, "core"), engine_settings(dict(meta))
    config = recorded_config(meta)
    is_gpu = core.get("device", "cpu") != "cpu"
    overlap = overlaps(config, meta)
    blocks = config.num_kv_blocks or core.get("num_kv_blocks")
    size = core.get("block_size") or settings.get("block_size")
    if not blocks or not size:
        raise ReplayError(f"{run.name} does not say how many blocks its KV pool has")
    named = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk_tokens", "policy")
    known = {name: getattr(config, name) for name in named}
    known |= {"block_size": int(size), "num_kv_blocks": int(blocks)}
    if known["max_num_batched_tokens"] == "auto":
        known["max_num_batched_tokens"] = largest_step_tokens(config, "cuda" if is_gpu else "cpu")
    columns = step_columns(steps, overlap=overlap)
    return RecordedSteps(columns, deployment, int(blocks) * int(size), run.name, overlap=overlap), known
