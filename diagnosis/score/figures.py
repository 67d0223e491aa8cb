"""The figures of a score: how often verdicts were right, per evidence level. Pure functions over judgements."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from statistics import median

import msgspec

from sojourn.diagnosis.score.judgement import Judgement
from sojourn.metrics.statistics.intervals import NORMAL_QUANTILE, wilson_bounds

# What is told of each group of verdicts, in the order of a table's columns.
CRITERIA = ("lifecycle", "first", "among_three", "kind", "remedy", "both", "false_alarm")
CONFIDENCE_EDGES = (0.0, 0.5, 0.6, 0.7, 0.75, 0.85, 0.95, 1.0)  # one range lies around 80%, the promise of a finding


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """`right` of `judged` verdicts. The interval (95%, Wilson) takes repeats of one case and severity for one sample,
    since they agree more often than not. Bounds of 0 to 1; all None where nothing was judged."""

    right: int
    judged: int
    independent: int  # cases and severities
    share: float | None
    low: float | None
    high: float | None


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts said with a confidence of `above` to `up_to`."""

    above: float
    up_to: float
    mean_confidence: float
    right: int
    said: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """How well the confidence of the first findings foretold whether they were right."""

    said: int
    brier: float  # mean squared difference; 0 is best, 0.25 is a coin's
    bins: list[Bin]


class LevelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one evidence level, or of the baseline."""

    level: str
    runs: int
    faults: int  # runs with a fault that hurt: the shares are of these
    controls: int
    left_out: int  # runs that no share counts: faults that did not hurt, and controls that were not what they should be
    shares: dict[str, Share]  # criterion → share
    no_cause: Share  # runs with a fault of which no cause was named
    by_workload: dict[str, dict[str, Share]]
    by_severity: dict[str, dict[str, Share]]
    lifecycle_confusion: dict[str, dict[str, int]]  # truth → said → runs
    cause_confusion: dict[str, dict[str, int]]
    smallest_severity: dict[str, int | None]  # case → mildest severity found in most of its repeats; None: in none
    calibration: Calibration | None  # None where no finding had a confidence
    median_seconds: float
    largest_seconds: float


def figures(level: str, judgements: Sequence[Judgement]) -> LevelFigures:
    """Of the judgements of one level."""
    counted = [each for each in judgements if each.counts]
    faults = [each for each in counted if each.record.truths]
    seconds = [each.said.seconds for each in judgements] or [0.0]
    return LevelFigures(
        level=level,
        runs=len(judgements),
        faults=len(faults),
        controls=sum(not each.record.truths for each in counted),
        left_out=len(judgements) - len(counted),
        shares=_shares(counted),
        no_cause=share_of(faults, lambda each: not each.said.causes),
        by_workload=_by(counted, lambda each: each.record.workload),
        by_severity=_by(faults, lambda each: str(each.record.severity)),
        lifecycle_confusion=_confusion(faults, lambda each: (each.true_lifecycle, each.said_lifecycle)),
        cause_confusion=_confusion(faults, lambda each: (each.true_key, each.said_key)),
        smallest_severity=smallest_severities(faults),
        calibration=calibration((each.said.causes[0].confidence, bool(each.first)) for each in faults
                                if each.said.causes and each.said.causes[0].confidence is not None),
        median_seconds=median(seconds),
        largest_seconds=max(seconds),
    )  # fmt: skip


def share_of(judgements: Iterable[Judgement], criterion: Callable[[Judgement], bool | None]) -> Share:
    """The share of those that a criterion applies to."""
    judged = [(each, verdict) for each in judgements if (verdict := criterion(each)) is not None]
    right = sum(bool(verdict) for _, verdict in judged)
    independent = len({(each.record.case, each.record.severity) for each, _ in judged})
    if not judged:
        return Share(right=0, judged=0, independent=0, share=None, low=None, high=None)
    share = right / len(judged)
    low, high = wilson_bounds(share, independent, NORMAL_QUANTILE)
    return Share(right=right, judged=len(judged), independent=independent, share=share, low=low, high=high)


def _shares(judgements: Sequence[Judgement]) -> dict[str, Share]:
    return {name: share_of(judgements, attrgetter(name)) for name in CRITERIA}


def _by(judgements: Sequence[Judgement], group: Callable[[Judgement], str]) -> dict[str, dict[str, Share]]:
    groups: dict[str, list[Judgement]] = defaultdict(list)
    for each in judgements:
        groups[group(each)].append(each)
    return {name: _shares(groups[name]) for name in sorted(groups)}


def _confusion(
    judgements: Sequence[Judgement], pair: Callable[[Judgement], tuple[str, str]]
) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in judgements:
        truth, said = pair(each)
        counts[truth][said] += 1
    return {truth: dict(counts[truth].most_common()) for truth in sorted(counts)}


def smallest_severities(faults: Sequence[Judgement]) -> dict[str, int | None]:
    """Case → the mildest severity that hurt and whose cause stood first in more than half of its repeats."""
    repeats: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for each in faults:
        repeats[each.record.case, each.record.severity].append(bool(each.first))
    found: dict[str, int | None] = dict.fromkeys(sorted({case for case, _ in repeats}))
    for case, severity in sorted(repeats, reverse=True):
        if sum(repeats[case, severity]) > len(repeats[case, severity]) / 2:
            found[case] = severity
    return found


def calibration(pairs: Iterable[tuple[float | None, bool]]) -> Calibration | None:
    """Of pairs (confidence, was it right)."""
    known = [(confidence, right) for confidence, right in pairs if confidence is not None]
    if not known:
        return None
    bins = []
    for above, up_to in pairwise(CONFIDENCE_EDGES):
        inside = [(c, right) for c, right in known if above < c <= up_to or c == above == 0.0]
        if inside:
            bins.append(Bin(above=above, up_to=up_to, mean_confidence=sum(c for c, _ in inside) / len(inside),
                            right=sum(right for _, right in inside), said=len(inside)))  # fmt: skip
    return Calibration(said=len(known), brier=sum((c - right) ** 2 for c, right in known) / len(known), bins=bins)
