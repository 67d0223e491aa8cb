"""The miss-ratio curve: what a KV pool of another size would have hit, from the records of a run.

The core draws the curve while it runs (`engine/memory/shadow/index.py`: Mattson et al., IBM Systems Journal 9 (1970))
and writes one point a size and request. Its shares are of the prompt tokens that asked the cache.
"""

from collections import Counter
from dataclasses import dataclass

import pandas as pd

from sojourn.metrics.memory.prefix_outcomes import RATIOS

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What a pool of `ratio` times the blocks would have hit; `ratio` is INFINITE for one that never evicts."""

    ratio: float
    hit_tokens: int
    queried_tokens: int

    @property
    def hit_ratio(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def miss_ratio(self) -> float:
        return 1.0 - self.hit_ratio if self.queried_tokens else 0.0


def miss_ratio_curve(requests: pd.DataFrame) -> list[CurvePoint]:
    """The curve of the rows of `requests.parquet`, smallest pool first, the infinite one last.

    [] where no row asked the cache, or the run is older than the columns. A size is left out where any row lacks it:
    it is more than the shadow index remembers. Where requests wait for memory, another size would also change when
    they run; the curve takes that as it was, and flatters a size that what ran together would have filled.
    """
    if "resized_hit_tokens" not in requests.columns or "prefix_outcomes" not in requests.columns:
        return []
    queried, hits_of_infinite, is_told = 0, 0, True
    hits, judged = [0] * len(RATIOS), len(RATIOS)
    rows = zip(requests.prefix_outcomes, requests.resized_hit_tokens, requests.infinite_hit_tokens, strict=True)
    for outcomes, resized, infinite in rows:
        if not outcomes or not isinstance(outcomes, dict):  # it did not ask, or no server recorded it
            continue
        queried += sum(outcomes.values())
        is_told = is_told and not pd.isna(infinite)
        hits_of_infinite += int(infinite) if is_told else 0
        judged = min(judged, len(resized))
        for index in range(judged):
            hits[index] += int(resized[index])
    if not queried:
        return []
    points = [CurvePoint(ratio, hit, queried) for ratio, hit in zip(RATIOS[:judged], hits, strict=False)]
    return [*points, *([CurvePoint(INFINITE, hits_of_infinite, queried)] if is_told else [])]


def prefix_outcomes(requests: pd.DataFrame) -> dict[str, int]:
    """Prompt tokens of all rows by the outcome of their first lookup; {} without a lookup."""
    if "prefix_outcomes" not in requests.columns:
        return {}
    totals: Counter[str] = Counter()
    for outcomes in requests.prefix_outcomes:
        totals.update(outcomes if isinstance(outcomes, dict) else {})
    return dict(totals)
