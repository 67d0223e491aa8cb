"""Two runs, or two sets of runs, compared: reads them, refuses what cannot be compared, weighs every metric."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from metrics.compare import (
    FEWEST_RUNS,
    Compared,
    Comparison,
    runs_evidence,
    statistic,
    together,
    untold,
    weigh,
    windows_evidence,
)
from metrics.compare_samples import (
    FEWEST_WINDOWS,
    METRICS,
    RunSamples,
    alike_steps,
    identity,
    num_windows,
    read_run,
    same_schedule,
    samples_of,
    settings,
    steps_of,
)
from metrics.differences import differences
from metrics.rundir import RunDirectory

OF_REQUESTS = ("ttft_mean", "tpot_mean", "e2e_mean", "attainment")  # a mean moves less by chance than a quantile
OF_STEPS = ("step_p50", "step_p95")  # where both sides have the server's records
ONE_RUN = "one run a side: what differs from run to run of the same system is not in the intervals"


class CompareError(Exception):
    """Runs that cannot be compared, with a sentence."""


def compare_runs(
    a: Sequence[RunDirectory], b: Sequence[RunDirectory], *, metrics: Sequence[str] = (), margin: float = 0.05,
    confidence: float = 0.95, force: bool = False, seed: int = 0,
) -> Comparison:  # fmt: skip
    """Whether B is worse than A. Without `metrics`: OF_REQUESTS, and OF_STEPS where both sides recorded steps.

    Raises CompareError where a run is not valid, where the runs are not of the same load, model and hardware (unless
    `force`), and for a metric that is not there.
    """
    if unknown := [name for name in metrics if name not in METRICS]:
        raise CompareError(f"there is no metric {unknown[0]}; there are {', '.join(METRICS)}")
    notes = check(a, b, force)
    sides = [[read_run(run) for run in side] for side in (a, b)]
    for each in (*sides[0], *sides[1]):
        if not len(each.requests):
            raise CompareError(f"{each.run.path} has no measured request, so there is nothing to compare")
    steps, share = _steps(sides)
    chosen = list(metrics) or [*OF_REQUESTS, *(OF_STEPS if steps else ())]
    if steps is None and any(METRICS[name].source == "steps" for name in chosen):
        raise CompareError(
            "a side has no steps that the other has the like of, which metrics of steps need; compare runs of "
            "`sojourn run`, or of `sojourn load --server-run`, or leave those metrics out"
        )
    if steps is not None and any(METRICS[name].source == "steps" for name in chosen):
        notes.append(f"{share:.0%} of the steps have their like on both sides; only those are compared")
    several = min(len(a), len(b)) >= FEWEST_RUNS
    if not several:
        notes.append(ONE_RUN)
        if max(len(a), len(b)) > 1:
            raise CompareError(
                f"A has {len(a)} runs and B has {len(b)}; give one run a side, or at least {FEWEST_RUNS} of each"
            )
    paired = len(a) == len(b) and all(map(same_schedule, *sides))
    windows = num_windows([*sides[0], *sides[1]])
    random = np.random.default_rng(seed)
    found = [
        _of_runs(name, sides, steps, paired, margin, confidence)
        if several
        else _of_windows(name, sides, steps, paired, windows, random, margin, confidence)
        for name in dict.fromkeys(chosen)
    ]
    return together(found, margin, confidence, notes)


def check(a: Sequence[RunDirectory], b: Sequence[RunDirectory], force: bool) -> list[str]:
    """What is to be said about the runs: the settings that differ, and with `force` what should not. Raises
    CompareError."""
    metas = [(run, run.meta()) for run in (*a, *b)]
    faults = [
        f"{run.path} is not valid: {'; '.join(meta.get('invalid_reasons') or ['no reason is given'])}"
        for run, meta in metas
        if not meta.get("valid")
    ]
    first = metas[0][1]
    for run, meta in metas[1:]:
        if different := differences(identity(first), identity(meta)):
            faults.append(f"{run.path} is not comparable with {metas[0][0].path}: {'; '.join(different[:5])}")
    if faults and not force:
        raise CompareError(f"{faults[0]}; measure again alike, or compare all the same with --force")
    changed = differences(settings(a[0].meta()), settings(b[0].meta()))
    notes = [f"forced: {fault}" for fault in faults]
    return notes + ([f"what differs: {'; '.join(changed[:8])}"] if changed else [])


def _steps(sides: list[list[RunSamples]]) -> tuple[list[list[pd.DataFrame]] | None, float]:
    tables = [[steps_of(each) for each in side] for side in sides]
    if any(not len(steps) for side in tables for steps in side):
        return None, 0.0
    alike, share = alike_steps(tables)
    return (alike, share) if all(len(steps) for side in alike for steps in side) else (None, 0.0)


def _of_windows(name, sides, steps, paired, windows, random, margin, confidence) -> Compared:
    metric = METRICS[name]
    if not windows:
        return untold(name, f"too short for {FEWEST_WINDOWS} windows of a few requests each; run longer, or more often")
    a, b = (
        samples_of(side[0], metric, windows, steps[place][0] if steps else None) for place, side in enumerate(sides)
    )
    if not len(a.values) or not len(b.values):
        return untold(name, "a side has no such value")
    # Steps are matched by what they hold and not one by one; tokens are read when they come, not when they are due.
    pairs = paired and metric.source == "requests"
    return weigh(name, metric, windows_evidence(a, b, metric, pairs, random), margin, confidence)


def _of_runs(name, sides, steps, paired, margin, confidence) -> Compared:
    metric = METRICS[name]
    values = [
        [
            statistic(samples_of(each, metric, 1, steps[place][number] if steps else None), metric)
            for number, each in enumerate(side)
        ]
        for place, side in enumerate(sides)
    ]
    if not np.isfinite(values[0] + values[1]).all():
        return untold(name, "a run has no such value, or too many of its requests failed")
    return weigh(name, metric, runs_evidence(values[0], values[1], metric, paired), margin, confidence)
