"""What a step copies between the device and host memory, and the reads that a request waits for."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Transfers:
    """What a step copies between the device and slots of host memory, before it computes."""

    stores: list[tuple[int, int]] = field(default_factory=list)  # device block → slot
    loads: list[tuple[int, int]] = field(default_factory=list)  # slot → device block, behind the copies of the step
    stored_keys: list[bytes] = field(default_factory=list)
    loaded_keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Prefetch:
    """Reads into host memory that a request waits for. A Preparation, as the loop knows it."""

    waits_for: int = 0
    is_cancelled: bool = False
    held: list[bytes] = field(default_factory=list)  # pinned in host memory for its request
    ready_ns: int = 0  # when the last read ended
    error: str | None = None  # a tier that fails is no error of a request

    @property
    def is_done(self) -> bool:
        return self.waits_for == 0
