"""A device estimate whose times are corrected: by a measured point, or to the bounds of its known error."""

import msgspec

from sojourn.replay.device.estimate import Composition, Deployment, DeviceEstimate, DeviceStep, KnownError


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of the device's time, and what they rest on."""

    decode: float = 1.0  # of steps without prompts
    prompt: float = 1.0  # of what prompts add to a step
    host_ns: float | None = None  # None: as the estimate has it
    kv_tokens: int | None = None
    source: str = ""  # such as "4,210 steps of runs/demo"
    sentence: str = ""  # by how much the estimate was wrong there
    error: KnownError | None = None  # of times that are corrected so, at other loads


class CorrectedEstimate:
    """A `DeviceEstimate`."""

    def __init__(self, estimate: DeviceEstimate, correction: Correction, error: KnownError | None = None) -> None:
        self._estimate, self._decode, self._prompt = estimate, correction.decode, correction.prompt
        self.deployment: Deployment = estimate.deployment
        self.composition: Composition = estimate.composition
        self.kv_tokens = estimate.kv_tokens if correction.kv_tokens is None else correction.kv_tokens
        self.host_ns = estimate.host_ns if correction.host_ns is None else correction.host_ns
        self.provenance = estimate.provenance + (f"; corrected by {correction.source}" if correction.source else "")
        self.error = error

    def device_ns(self, step: DeviceStep) -> float:
        whole = self._estimate.device_ns(step)
        if not step.chunks or self._decode == self._prompt:
            return whole * (self._prompt if step.chunks else self._decode)
        decodes = self._estimate.device_ns(step._replace(chunks=())) if step.decodes else 0.0
        return self._decode * decodes + self._prompt * max(0.0, whole - decodes)
