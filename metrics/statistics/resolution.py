"""Whether a share of good requests is above or below a target, decided while they still come."""

from collections.abc import Mapping
from typing import Any

import msgspec

from sojourn.metrics.statistics.confidence_sequence import SequentialShare

LEVEL = 0.95
# Processes whose share of good requests does not change by plan. Of the others a part says nothing about the whole.
STEADY_PROCESSES = ("poisson", "constant", "gamma", "concurrency", "users")


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and what it rests on. `low` and `high` bound the share at `level`, at whatever time one looks."""

    target: float
    verdict: str  # "above" or "below"
    requests: int
    share: float
    low: float
    high: float
    level: float
    block_length: int  # consecutive requests that count as one observation

    def sentence(self) -> str:
        """`resolved: 61% of 240 requests met the SLO; 52%–70% (95% confidence sequence) lies below 90%`."""
        return (
            f"resolved: {self.share:.1%} of {self.requests:,} requests met the SLO; {self.low:.1%}–{self.high:.1%} "
            f"({self.level:.0%} confidence sequence) lies {self.verdict} {self.target:.0%}"
        )


def resolution_sentence(meta: Mapping[str, Any]) -> str | None:
    """How the question of a run ended that was to stop early; None of a run that was asked none."""
    if (found := meta.get("resolution")) is not None:
        return msgspec.convert(found, Resolution).sentence()
    return meta.get("unresolved")


def resolution(share: SequentialShare, target: float) -> Resolution | None:
    """None while the interval holds the target, or where latencies grow and the share is above: it may fall yet."""
    low, high = share.interval
    if low <= target <= high or (low > target and share.growing):
        return None
    return Resolution(
        target=target, verdict="above" if low > target else "below", requests=share.num_requests, share=share.share,
        low=low, high=high, level=LEVEL, block_length=share.block_length,
    )  # fmt: skip
