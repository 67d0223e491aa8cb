"""The steps of a recorded run as a device estimate: what its machine takes for any plan of that model."""

import numpy as np

from sojourn.replay.device.estimate import Composition, Deployment, DeviceStep, KnownError, OutsideTables
from sojourn.replay.step_fit import StepTimes


class FittedSteps:
    """A `DeviceEstimate` of one run. With `refuses` only sizes of steps that the run is told of have a time; a replay
    goes on by the last slope, and says how much of its time is a guess."""

    composition: Composition = "mixed"
    error: KnownError | None = None

    def __init__(self, name: str, times: StepTimes, kv_tokens: int, deployment: Deployment, *, refuses: bool) -> None:
        self.deployment, self.kv_tokens, self.times = deployment, kv_tokens, times
        self._refuses = refuses
        self.provenance = f"the steps of the run {name}"
        self.host_ns = float(np.median(times.host_ns)) if len(times.host_ns) else 0.0

    def device_ns(self, step: DeviceStep) -> float:
        """Raises OutsideTables for a step far larger than all of the run."""
        times, chunks = self.times, step.chunks
        tokens = step.decodes + step.chunk_tokens
        if self._refuses and (tokens > times.told_tokens or step.decodes > times.told_decodes):
            raise OutsideTables(
                f"a step of {tokens} tokens and {step.decodes} decodes is far larger than those of the run, which had "
                f"{times.largest_tokens:.0f} tokens and {times.most_decodes:.0f} decodes"
            )
        pairs = sum([new * past + new * (new + 1) // 2 for new, past in chunks])
        expected = times.device_ns(
            tokens, step.decodes, step.decode_past_tokens + step.decodes, len(chunks), pairs, step.decodes + len(chunks)
        )
        return expected * times.mean_ratio
