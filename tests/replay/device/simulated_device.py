"""A device estimate whose times are a formula."""

from dataclasses import dataclass, field

from sojourn.replay.device.estimate import Composition, Deployment, DeviceStep, KnownError


@dataclass
class FormulaDevice:
    """A step takes `base_ms`, and `token_ms` for each of its tokens. Keeps all steps that it was asked for."""

    composition: Composition = "mixed"
    base_ms: float = 10.0
    token_ms: float = 0.01
    kv_tokens: int = 1_000_000
    host_ns: float = 0.0
    deployment: Deployment = field(default_factory=lambda: Deployment(model="formula", device="formula"))
    provenance: str = "a formula"
    error: KnownError | None = None

    def __post_init__(self) -> None:
        self.asked: list[DeviceStep] = []

    def device_ns(self, step: DeviceStep) -> float:
        self.asked.append(step)
        return 1e6 * (self.base_ms + self.token_ms * (step.decodes + step.chunk_tokens))
