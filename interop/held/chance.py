"""What chance alone does to the mean of a summary or of two pages, which have no series of moments. Pure.

Requests of one queue depend on each other, and a mean does not show how much: SHARED of them are taken for one. The
spread is what the file states, or a usual one of that latency.
"""

import math

from sojourn.interop.held.held import BenchmarkFigures

SHARED = 6.0
SPREADS = {"ttft_ms": 1.0, "e2e_ms": 0.7, "tpot_ms": 0.3, "itl_ms": 0.3}  # standard deviation over mean
TWO_SIDED = 1.96  # of a normal distribution, 95%


def bounds_of_means(before: BenchmarkFigures, after: BenchmarkFigures) -> dict[str, tuple[float, float]]:
    """The interval of 95% of the ratio of each mean latency that both have."""
    found = {}
    for name in SPREADS:
        errors = [_relative_error(each, name) for each in (before, after)]
        a, b = (each.value(name) for each in (before, after))
        if a and b and a > 0 and b > 0 and errors[0] is not None and errors[1] is not None:
            half = TWO_SIDED * math.hypot(errors[0], errors[1])
            found[name] = (b / a * math.exp(-half), b / a * math.exp(half))
    return found


def _relative_error(figures: BenchmarkFigures, name: str) -> float | None:
    """Of a mean; None where the number of requests is not known."""
    requests = figures.value("requests", "total") or figures.value("succeeded", "total")
    mean, spread = figures.value(name), figures.value(name, "std")
    if not requests or not mean:
        return None
    share = SPREADS[name] if spread is None else spread / mean
    return share / math.sqrt(max(requests / SHARED, 1.0))
