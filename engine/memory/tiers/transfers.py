"""What moves between the tiers, what a request waits for of that, and the counts. Data only."""

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
    until_ns: int = 0  # its request waits no longer than that
    is_late: bool = False  # ... and did not get all
    reads: bool = False  # that was cheaper than to compute
    held: list[bytes] = field(default_factory=list)  # pinned in host memory for its request
    ready_ns: int = 0  # when the last read ended
    error: str | None = None  # a tier that fails is no error of a request

    @property
    def is_done(self) -> bool:
        return self.waits_for == 0 or self.is_late


@dataclass(slots=True)
class TierCounts:
    """Of one tier, since the last `take_counts`; `blocks` is the state."""

    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_ns: int = 0
    store_ns: int = 0
    failures: int = 0  # reads and writes that failed, and damaged blocks
    refused: int = 0  # stores for which there was no room
    blocks: int = 0
