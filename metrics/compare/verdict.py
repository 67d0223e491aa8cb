"""Whether B is worse than A, beyond a margin, from one or several runs of each: no worse, worse, or cannot tell. Pure.

For each metric the ratio of B to A, turned so that above 1 is worse, with two one-sided tests on its logarithm: `worse`
rejects ratio ≤ 1 + margin, `no worse` rejects ratio ≥ 1 + margin (non-inferiority). "Worse" as a whole takes one metric
and is corrected for their number (Holm, 1979); "no worse" takes all of them, which needs no correction (Berger, 1982).

With several runs a side the standard error is that between runs. With one it is in `dependence`; what differs from run
to run of the same system is not in it: the margin has to hold that. Quantiles are Student's. A share (attainment,
served) is never surer than counting allows: steps or runs that agree by chance have no spread.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from sojourn.metrics.compare.metrics import QUANTILES, SHARES, Metric
from sojourn.metrics.compare.workload import Shift, Work
from sojourn.metrics.statistics.dependent_samples import t_quantile, t_tail

Verdict = Literal["no worse", "worse", "cannot tell"]
LEAST = 1e-3  # of a share or a latency: nothing has no logarithm
LARGEST = 700.0  # logarithm of what a float holds
FEWEST_RUNS = 2


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `ratio` is B / A; each of its bounds holds with the confidence."""

    metric: str
    verdict: Verdict
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None
    margin: float  # its own
    paired: bool
    clusters: int  # independent requests, parts of a series or runs, of both sides
    reason: str = ""
    needs: float | None = None  # times as many runs, or times as long, until it could tell; where it cannot
    p_worse: float = 1.0
    p_no_worse: float = 1.0
    p_better: float = 1.0
    better: bool = False  # by more than the margin: A is worse than B by it


class GoodPairs(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one schedule by whether they met their objectives in A and in B."""

    both: int
    only_a: int
    only_b: int
    neither: int

    def sentence(self) -> str:
        return (
            f"of the requests that both sent {self.both:,} were good in both, {self.only_a:,} only in A, "
            f"{self.only_b:,} only in B, {self.neither:,} in neither"
        )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All metrics, and what they say together."""

    schema: str = "sojourn.comparison/1"
    verdict: Verdict
    margin: float  # of the metrics that have none of their own
    confidence: float
    metrics: list[Compared]
    notes: list[str]
    work: tuple[Work, Work] | None = None
    good_pairs: GoodPairs | None = None  # of one run a side of the same schedule


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The logarithm of how much worse B is, its standard error and that error's degrees of freedom."""

    a: float
    b: float
    effect: float
    error: float
    degrees: float
    paired: bool
    clusters: int
    remembers: bool = False  # one realisation of a queue or a drift: what it shows says little of another run


def statistic(values: np.ndarray, metric: Metric) -> float:
    """Of all samples; NaN without any."""
    if not len(values):
        return math.nan
    if metric.statistic == "mean":
        return float(values.mean())
    place = math.ceil(QUANTILES[metric.statistic] * len(values)) - 1
    return float(np.partition(values, place)[place])


def runs_evidence(a: Sequence[float], b: Sequence[float], metric: Metric, paired: bool) -> Evidence:
    """From several runs a side, by the statistic of each: runs are resampled, in pairs where they are `paired`.

    The bootstrap of a mean has its standard error in closed form, so nothing is drawn.
    """
    logs_a, logs_b = (np.log(_floor(np.asarray(side, dtype="float64"))) for side in (a, b))
    sign = 1.0 if metric.lower else -1.0
    if paired:
        between = sign * (logs_b - logs_a)
        effect, error = float(between.mean()), float(between.std(ddof=1)) / math.sqrt(len(between))
        degrees: float = len(between) - 1
    else:
        parts = [float(side.var(ddof=1)) / len(side) for side in (logs_a, logs_b)]
        effect, error = sign * float(logs_b.mean() - logs_a.mean()), math.sqrt(sum(parts))
        scale = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (logs_a, logs_b), strict=True))
        degrees = error**4 / scale if scale > 0 else len(logs_a) + len(logs_b) - 2  # Welch, 1947
    means = (float(np.exp(logs_a.mean())), float(np.exp(logs_b.mean())))
    return Evidence(a=means[0], b=means[1], effect=effect, error=error, degrees=degrees, paired=paired,
                    clusters=len(logs_a) if paired else len(logs_a) + len(logs_b))  # fmt: skip


def counting_error(a: np.ndarray, b: np.ndarray, paired: bool) -> float:
    """Standard error of the logarithm of a ratio of two shares from counting alone, above 0 even where all agree.

    `a` and `b` hold a yes or no for each request, in pairs where they are `paired`. A success and a failure are added
    to each side (Agresti and Caffo, 2000), or a pair that differs in each of the two ways (Bonett and Price, 2012).
    """
    yes_a, yes_b = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    if not paired:
        shares = [(float(side.sum()) + 1, len(side) + 2) for side in (yes_a, yes_b)]
        return math.sqrt(sum((count - yes) / (count * yes) for yes, count in shares))
    count = len(yes_a) + 2
    lost, won = (float(np.sum(yes_a & ~yes_b)) + 1) / count, (float(np.sum(yes_b & ~yes_a)) + 1) / count
    share = float(yes_a.sum() + yes_b.sum() + 2) / (2 * count)
    return math.sqrt((lost + won - (lost - won) ** 2) / count) / share


def weigh(
    name: str, metric: Metric, evidence: Evidence, margin: float, confidence: float, counted: float = 0.0
) -> Compared:
    """One metric on its own: its verdict is not yet corrected for the number of metrics. `counted` is the
    `counting_error` of a share."""
    bound = math.log1p(margin)
    if not math.isfinite(evidence.effect) or not math.isfinite(evidence.error):
        return undecided(name, margin, "a side has no such value, or too many requests failed", evidence)
    error, degrees = max(
        ((evidence.error, evidence.degrees), (counted, math.inf)),
        key=lambda known: known[0] * t_quantile(confidence, known[1]),
    )
    quantile = t_quantile(confidence, degrees)
    low, high = evidence.effect - quantile * error, evidence.effect + quantile * error
    if error > 0:
        p_worse = t_tail((evidence.effect - bound) / error, degrees)
        p_no_worse = t_tail((bound - evidence.effect) / error, degrees)
        p_better = t_tail((-bound - evidence.effect) / error, degrees)
    else:  # a device without any noise
        p_worse, p_no_worse = float(evidence.effect <= bound), float(evidence.effect >= bound)
        p_better = float(evidence.effect >= -bound)
    verdict: Verdict = "no worse" if high < bound else "worse" if low > bound else "cannot tell"
    distance = abs(bound - evidence.effect)
    depends = evidence.remembers and verdict == "cannot tell" and quantile * error > bound
    needs = (quantile * error / distance) ** 2 if verdict == "cannot tell" and distance > 0 and not depends else None
    ratios = sorted(_ratio(value if metric.lower else -value) for value in (low, high))
    if metric.what in SHARES and evidence.a > 0:  # no share is above all
        ratios = [min(ratio, 1 / evidence.a) for ratio in ratios]
    return Compared(
        metric=name, verdict=verdict, a=evidence.a, b=evidence.b, low=ratios[0], high=ratios[1], margin=margin,
        ratio=_ratio(evidence.effect if metric.lower else -evidence.effect), paired=evidence.paired,
        clusters=evidence.clusters, p_worse=p_worse, p_no_worse=p_no_worse, p_better=p_better, needs=needs,
        reason=_one_realisation(quantile * error) if depends else "",
    )  # fmt: skip


def _one_realisation(half_width: float) -> str:
    factor = _ratio(half_width)
    return (
        "its requests or steps depend on each other over more than a tenth of the run, so two runs of one server may "
        f"differ by a factor of {f'{factor:.2g}' if factor < 100 else 'a hundred and more'}"
    )


def outlasting(found: Compared, shift: Shift) -> Compared:
    """The verdict, if it is the same with B / A shifted; else there is none."""
    if found.verdict == "cannot tell" or found.low is None or found.high is None:
        return found
    low, high = (bound * math.exp(shift.log_ratio) for bound in (found.low, found.high))
    if high * (1 + found.margin) >= 1:
        found = msgspec.structs.replace(found, p_better=1.0)
    holds = high < 1 + found.margin if found.verdict == "no worse" else low > 1 + found.margin
    if holds:
        return found
    return msgspec.structs.replace(found, verdict="cannot tell", reason=shift.reason, p_worse=1.0, p_no_worse=1.0)


def undecided(name: str, margin: float, reason: str, evidence: Evidence | None = None) -> Compared:
    """A metric that nothing can be said about."""
    a, b = (None, None) if evidence is None else (evidence.a, evidence.b)
    return Compared(metric=name, verdict="cannot tell", a=a, b=b, ratio=None, low=None, high=None, margin=margin,
                    paired=False, clusters=0, reason=reason)  # fmt: skip


def together(
    found: Sequence[Compared], margin: float, confidence: float, notes: Sequence[str] = (),
    work: tuple[Work, Work] | None = None, pairs: GoodPairs | None = None,
) -> Comparison:  # fmt: skip
    """The verdict of all metrics. A metric stays `worse`, and is `better`, only where Holm's correction for their
    number lets it."""
    worse = _surely([(each.p_worse, each.metric) for each in found if each.verdict == "worse"], len(found), confidence)
    better = _surely([(each.p_better, each.metric) for each in found], len(found), confidence)
    reason = "worse on its own, not among so many metrics; compare fewer of them, or give more requests or runs"
    corrected = [
        msgspec.structs.replace(each, better=each.metric in better) if each.verdict != "worse" or each.metric in worse
        else msgspec.structs.replace(each, verdict="cannot tell", reason=reason)
        for each in found
    ]  # fmt: skip
    all_fine = bool(corrected) and all(each.verdict == "no worse" for each in corrected)
    verdict: Verdict = "worse" if worse else "no worse" if all_fine else "cannot tell"
    return Comparison(verdict=verdict, margin=margin, confidence=confidence, metrics=corrected, notes=list(notes),
                      work=work, good_pairs=pairs)  # fmt: skip


def _ratio(logarithm: float) -> float:
    return math.exp(min(logarithm, LARGEST))


def _surely(found: Sequence[tuple[float, str]], number: int, confidence: float) -> set[str]:
    """Those whose claim holds among `number` of them, by the probability of a wrong one (Holm, 1979)."""
    held: set[str] = set()
    for place, (probability, metric) in enumerate(sorted(found)):
        if probability > (1 - confidence) / (number - place):
            break
        held.add(metric)
    return held


def worsening(a: np.ndarray, b: np.ndarray, metric: Metric) -> np.ndarray:
    """The logarithm of how much worse `b` is than `a`."""
    with np.errstate(invalid="ignore"):  # two infinities differ by nothing that is known
        ratio = np.log(_floor(b)) - np.log(_floor(a))
    return ratio if metric.lower else -ratio


def _floor(values: np.ndarray) -> np.ndarray:
    """A share of nothing has no logarithm: a thousandth stands for it."""
    return np.maximum(values, LEAST)
