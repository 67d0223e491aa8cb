"""What a request waits for before it may be scheduled: the runner's work for it, and reads of KV tiers."""

from dataclasses import dataclass

from engine.memory.tiers.transfers import Prefetch
from engine.request.plan import Preparation
from engine.request.request import Request

NOT_YET_NS = 2**62


@dataclass(frozen=True, slots=True)
class Preparing:
    """Both run beside the loop, at the same time."""

    request: Request
    work: Preparation | None
    load: Prefetch | None

    @property
    def is_done(self) -> bool:
        return (self.work is None or self.work.is_done) and (self.load is None or self.load.is_done)

    @property
    def waits_for(self) -> str:
        """One of metrics.records.REFUSALS, while it is not done."""
        if self.work is not None and not self.work.is_done:
            return self.work.waits_for
        return "kv_load"

    @property
    def error(self) -> str | None:
        """A sentence, if the runner's work failed. A tier that fails is no error of a request."""
        return self.work.error if self.work is not None and self.work.is_done else None

    @property
    def adapter_ready_ns(self) -> int | None:
        return self.work.adapter_ready_ns if self.work is not None else None

    @property
    def load_ready_ns(self) -> int | None:
        """When the reads of KV tiers ended; None: there are none."""
        if self.load is None:
            return None
        return self.load.ready_ns if self.load.is_done else NOT_YET_NS

    @property
    def is_one_read(self) -> bool:
        """It waits, or waited, for one read and nothing else."""
        if self.work is None or self.load is None:
            return self.work is None or self.work.waits_for == "adapter"
        return False
