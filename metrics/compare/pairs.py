"""Two runs of one schedule request by request: which were good in both, and how much of two loads is alike. Pure."""

import math

import numpy as np

from sojourn.metrics.compare.samples import SAME_DUE_NS, RunSamples
from sojourn.metrics.compare.verdict import GoodPairs


def good_pairs(a: RunSamples, b: RunSamples) -> GoodPairs:
    """Of two runs of the same schedule. `attainment` weighs the same pairs."""
    first, second = (side.requests.good.to_numpy(dtype=bool) for side in (a, b))
    return GoodPairs(
        both=int((first & second).sum()), only_a=int((first & ~second).sum()), only_b=int((~first & second).sum()),
        neither=int((~first & ~second).sum()),
    )  # fmt: skip


def common_beginning(a: RunSamples, b: RunSamples) -> int:
    """How many requests from the first one both sent alike, at the same moments and of the same class, such that all
    had ended on both sides before one side sent a request that the other did not."""
    first, second = a.requests, b.requests
    count = min(len(first), len(second))
    due = [side.requests.due_ns.to_numpy(dtype="float64") - side.begin_ns for side in (a, b)]
    alike = np.abs(due[0][:count] - due[1][:count]) <= SAME_DUE_NS
    alike &= first.klass.to_numpy()[:count] == second.klass.to_numpy()[:count]
    count = count if alike.all() else int(alike.argmin())
    parted = min((side[count] for side in due if len(side) > count), default=math.inf)
    for side in (a, b):
        ends = side.requests.last_byte_ns.astype("float64").to_numpy()[:count] - side.begin_ns
        late = np.flatnonzero(~(ends <= parted))  # a request without an end may have been open to the last
        count = min(count, int(late[0]) if len(late) and math.isfinite(parted) else count)
    return count
