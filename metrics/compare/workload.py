"""Whether both sides did the same work, sent in the same way: what makes a latency short and no server fast. Pure.

A reply of half the tokens ends sooner, a cached prompt starts sooner, a request that failed is in no mean, and what the
client sent late is in every latency from the intended send. Tokens and cache that surely differ by more than the margin
are faults; failures and lateness shift a ratio by a known amount, and a verdict that does not outlast it is none.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.compare.metrics import Metric
from sojourn.metrics.compare.samples import RunSamples
from sojourn.metrics.memory.prefix_share import client_or_server


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Of all runs of a side together. None without a record."""

    requests: int
    failed_share: float
    output_tokens: float | None  # of a served request, on average
    cached_share: float | None  # of the prompt tokens
    lag_ms: float | None  # sent after the intended moment, on average


class Shift(msgspec.Struct, frozen=True):
    """By how much the logarithm of B / A may be off, and why."""

    log_ratio: float
    reason: str


def work_of(runs: Sequence[RunSamples]) -> Work:
    rows = pd.concat([each.requests for each in runs])
    tokens = _tokens(rows).dropna()
    cached, prompt = _cached(rows)
    lag_ms = (rows.sent_ns.astype("float64") - rows.due_ns.astype("float64")).dropna() / 1e6
    return Work(
        requests=len(rows), failed_share=1 - float(rows.served.mean()),
        output_tokens=float(tokens.mean()) if len(tokens) else None,
        cached_share=float(cached.sum() / prompt.sum()) if prompt.sum() > 0 else None,
        lag_ms=float(lag_ms.mean()) if len(lag_ms) else None,
    )  # fmt: skip


def other_work(
    a: Sequence[RunSamples], b: Sequence[RunSamples], paired: bool, same_settings: bool, margin: float,
    confidence: float,
) -> list[str]:  # fmt: skip
    """In what the work of the sides surely differs by more than the margin. The cache is judged where the settings are
    the `same_settings`: other ones may well change what it holds, and that is then compared."""
    z, faults = NormalDist().inv_cdf(confidence), []
    ratio, error = _token_ratio(a, b, paired)
    if abs(math.log(ratio)) - z * error > math.log1p(margin):
        faults.append(f"a reply of B has {ratio:.2f} times the output tokens of one of A")
    shares = [_cached_share(side) for side in (a, b)]
    gap = abs(shares[1][0] - shares[0][0]) - z * math.hypot(shares[0][1], shares[1][1])
    if same_settings and gap > margin:
        faults.append(
            f"{shares[0][0]:.1%} of the prompt tokens of A were cached and {shares[1][0]:.1%} of those of B (a server "
            "that runs on remembers the load of the same seed)"
        )
    return faults


def shifts(metric: Metric, a: Work, b: Work, means: tuple[float, float], slowest: float) -> list[Shift]:
    """Of a latency of requests whose means on both sides are `means`, where `slowest` is the longest of either side."""
    if metric.source != "requests" or not metric.lower or not all(map(math.isfinite, means)):
        return []
    found = []
    more_failed = b.failed_share - a.failed_share
    if more_failed and metric.statistic == "mean":  # a quantile counts them as slower than all
        own = means[1] if more_failed > 0 else means[0]
        as_slow_as_any = math.log1p(abs(more_failed) * max(0.0, slowest / own - 1))
        found.append(Shift(
            math.copysign(as_slow_as_any, more_failed),
            f"{a.failed_share:.1%} of the requests of A failed and {b.failed_share:.1%} of those of B, which no mean "
            "holds",
        ))  # fmt: skip
    lags = a.lag_ms or 0.0, b.lag_ms or 0.0
    served = means[0] - lags[0], means[1] - lags[1]
    if metric.what != "tpot_ms" and min(served) > 0:
        found.append(Shift(
            math.log(served[1] / served[0]) - math.log(means[1] / means[0]),
            f"the client sent {lags[0]:.3g} ms late on A and {lags[1]:.3g} ms on B, on average: that is not the "
            "server's",
        ))  # fmt: skip
    return found


def _tokens(rows: pd.DataFrame) -> pd.Series:
    return rows.output_tokens.astype("float64").where(rows.served)


def _cached(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Cached and all prompt tokens of the served requests that tell both."""
    cached, prompt = (client_or_server(rows, name) for name in ("cached_tokens", "prompt_tokens"))
    recorded = rows.served & cached.notna() & prompt.notna()
    return cached[recorded], prompt[recorded]


def _token_ratio(a: Sequence[RunSamples], b: Sequence[RunSamples], paired: bool) -> tuple[float, float]:
    """Output tokens of B over those of A, and the standard error of its logarithm; (1, 0) where they are unknown."""
    tokens = [np.concatenate([_tokens(each.requests).to_numpy() for each in side]) for side in (a, b)]
    if paired:
        both = ~np.isnan(tokens[0]) & ~np.isnan(tokens[1])
        tokens = [side[both] for side in tokens]
    tokens = [side[~np.isnan(side)] for side in tokens]
    if any(len(side) < 2 or side.sum() <= 0 for side in tokens):
        return 1.0, 0.0
    ratio = float(tokens[1].mean() / tokens[0].mean())
    if paired:  # linearised, as of any ratio of sums (Cochran, 1977)
        return ratio, float(np.sqrt(np.sum((tokens[1] - ratio * tokens[0]) ** 2)) / tokens[1].sum())
    return ratio, math.hypot(*(float(side.std(ddof=1) / side.mean()) / math.sqrt(len(side)) for side in tokens))


def _cached_share(side: Sequence[RunSamples]) -> tuple[float, float]:
    """And its standard error; NaN where the server does not tell it."""
    cached, prompt = _cached(pd.concat([each.requests for each in side]))
    if not prompt.sum() > 0:
        return math.nan, math.nan
    share = float(cached.sum() / prompt.sum())
    return share, float(np.sqrt(np.sum((cached - share * prompt) ** 2)) / prompt.sum())
