"""How far a hit rate can be trusted: another stretch of the same traffic would have had another one."""

import numpy as np

from sojourn.metrics.statistics.intervals import block_length, bootstrap_mean

MOST_GROUPS = 2_000


def rate_interval(hits: np.ndarray, queried: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """95% interval of a hit rate; `hits` and `queried` are tokens [lookups] in order of time.

    Neighbours hang together, so stretches are resampled as a whole. The ratio is made linear around its value.
    """
    if len(hits) > MOST_GROUPS:  # neighbours as one, so that long runs take no longer
        begins = np.linspace(0, len(hits), MOST_GROUPS + 1).astype(int)[:-1]
        hits, queried = np.add.reduceat(hits, begins), np.add.reduceat(queried, begins)
    total = float(queried.sum())
    if not total:
        return None, None
    rate = float(hits.sum()) / total
    values = rate + (hits - rate * queried) / (total / len(queried))
    found = bootstrap_mean(values, block=block_length(values))
    if found is None or found.low is None or found.high is None:
        return None, None
    return max(0.0, min(found.low, rate)), min(1.0, max(found.high, rate))
