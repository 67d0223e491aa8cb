"""The steps of a recorded run as a device estimate: what its machine takes for any plan of that model."""

import numpy as np

from sojourn.replay.device.composition import SERVING
from sojourn.replay.device.estimate import Composition, Deployment, DeviceStep, KnownError
from sojourn.replay.step_fit import StepTimes


class FittedSteps:
    """A `DeviceEstimate` of one run. Sizes of steps that the run never had go on by the last slope; a replay says how
    much of its time is such a guess."""

    error: KnownError | None = None

    def __init__(self, name: str, times: StepTimes, kv_tokens: int, deployment: Deployment) -> None:
        self.deployment, self.kv_tokens, self.times = deployment, kv_tokens, times
        self.composition: Composition = SERVING[deployment.backend].composition
        self.provenance = f"the steps of the run {name}"
        self.host_ns = float(np.median(times.host_ns)) if len(times.host_ns) else 0.0

    def device_ns(self, step: DeviceStep) -> float:
        chunks = len(step.chunks)
        expected = self.times.device_ns(
            step.tokens, step.decodes, step.decode_pairs, chunks, step.chunk_pairs, step.decodes + chunks
        )
        return expected * self.times.mean_ratio
