"""The steps of a recorded run as an estimate: what its own machine takes for steps of this model."""

from typing import Any

import msgspec
import numpy as np

from sojourn.engine.config import largest_step_tokens
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section
from sojourn.replay.device.estimate import Composition, Deployment, DeviceStep, KnownError
from sojourn.replay.fleet.simulate import UsualNoise
from sojourn.replay.material import under_load
from sojourn.replay.settings import recorded_config
from sojourn.replay.step_fit import StepTimes
from sojourn.replay.steps_table import step_columns

FEWEST_STEPS = 20


class RecordedSteps:
    """A `DeviceEstimate` of the fitted steps of a run. A turn's host time belongs to the step."""

    composition: Composition = "mixed"
    host_ns = 0.0

    def __init__(self, times: StepTimes, deployment: Deployment, kv_tokens: int, name: str, *, overlap: bool) -> None:
        self._times, self.deployment, self.kv_tokens = times, deployment, kv_tokens
        self._device_ratio, self._host_ratio, _ = UsualNoise(times).at(0.0, 0.0)
        self._stages = [] if overlap else [tuple(stage.tolist()) for stage in times.host]
        self.provenance = f"steps of {name}"
        error = times.error
        self.error: KnownError | None = None
        if np.isfinite(error):
            self.error = KnownError(
                cell=f"sizes of steps left out of the fit of {name}", measurements=0, median=error, p90=2 * error,
                bias=0.0, low=1 - min(error, 0.9), high=1 + error,
            )  # fmt: skip

    def device_ns(self, step: DeviceStep) -> float:
        decodes, chunks = step.decodes, len(step.chunks)
        new = step.chunk_tokens
        pairs = sum(count * past + count * (count + 1) // 2 for count, past in step.chunks)
        tokens, sequences = decodes + new, decodes + chunks
        device = self._times.device_ns(
            tokens, decodes, step.decode_past_tokens + decodes, chunks, pairs, sequences
        )  # fmt: skip
        host = sum(c[0] + c[1] * sequences + c[2] * chunks + c[3] * tokens for c in self._stages)
        return device * self._device_ratio + host * self._host_ratio


def recorded_steps(run: RunDirectory, deployment: Deployment) -> tuple[RecordedSteps, dict[str, Any]]:
    """And the settings of the recorded server. Raises ReplayError where the run shows neither."""
    meta = run.meta()
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
    overlap = config.overlap == "on" or (config.overlap == "auto" and is_gpu)
    blocks = config.num_kv_blocks or core.get("num_kv_blocks")
    size = core.get("block_size") or settings.get("block_size")
    if not blocks or not size:
        raise ReplayError(f"{run.name} does not say how many blocks its KV pool has")
    times = StepTimes(step_columns(steps, overlap=overlap), None)
    named = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk_tokens", "policy")
    known = {name: getattr(config, name) for name in named}
    known |= {"block_size": int(size), "num_kv_blocks": int(blocks)}
    if known["max_num_batched_tokens"] == "auto":
        known["max_num_batched_tokens"] = largest_step_tokens(config, "cuda" if is_gpu else "cpu")
    deployment = msgspec.structs.replace(deployment, device="recorded")
    return RecordedSteps(times, deployment, int(blocks) * int(size), run.name, overlap=overlap), known
