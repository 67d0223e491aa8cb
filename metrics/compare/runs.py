"""Two runs, or two sets of runs, compared: reads them, refuses what cannot be compared, weighs every metric."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.compare.comparable import begun_alike, faults_between, is_only_late, what_differs
from sojourn.metrics.compare.dependence import FEWEST_REQUESTS, requests_evidence, series_evidence
from sojourn.metrics.compare.metrics import METRICS, SHARES, Metric
from sojourn.metrics.compare.pairs import good_pairs
from sojourn.metrics.compare.samples import (
    RunSamples,
    alike_steps,
    num_windows,
    read_run,
    same_schedule,
    samples_of,
    steps_of,
    without_lag,
)
from sojourn.metrics.compare.settings import setting_differences
from sojourn.metrics.compare.steal import left_out, undisturbed_requests, undisturbed_steps
from sojourn.metrics.compare.verdict import (
    FEWEST_RUNS,
    Compared,
    Comparison,
    Evidence,
    counting_error,
    outlasting,
    runs_evidence,
    statistic,
    together,
    undecided,
    weigh,
)
from sojourn.metrics.compare.workload import Work, other_work, shifts, work_of
from sojourn.metrics.errors import InputError
from sojourn.metrics.machine.steal import steal_sentence, steal_within
from sojourn.metrics.run.directory import RunDirectory, kept_share

OF_REQUESTS = ("ttft_mean", "tpot_mean", "e2e_mean", "attainment")  # a mean moves less by chance than a quantile
OF_STEPS = ("step_p50", "steady_steps")  # where both sides have the server's records
VERSIONS = ("versions", "server_versions")
NO_MARGINS: Mapping[str, float] = {}


def compare_runs(
    a: Sequence[RunDirectory], b: Sequence[RunDirectory], *, metrics: Sequence[str] = (), margin: float = 0.05,
    margins: Mapping[str, float] = NO_MARGINS, confidence: float = 0.95, force: bool = False,
    max_steal: float | None = None, read: Callable[[RunDirectory], RunSamples] = read_run,
) -> Comparison:  # fmt: skip
    """Whether B is worse than A. Without `metrics`: OF_REQUESTS, and OF_STEPS where both sides recorded steps; those
    that no run has are left out. Where a request failed, how many were served is compared as well. `margins` are of
    metrics that have one of their own. With `max_steal`, a share, requests and steps are left out that met a second in
    which other machines took more of the CPU time; `served` counts all requests all the same. `read` gives what a run
    has, for a caller who has read it.

    Raises InputError where a run is not valid, where the runs are not of the same load, model and hardware or did not
    do the same work (unless `force`), where A is too short or `max_steal` leaves nothing, and for a metric that is not
    there or not compared.
    """
    late = [run for run in (*a, *b) if is_only_late(run.meta())]
    options = {"metrics": metrics, "margin": margin, "margins": margins, "confidence": confidence, "force": force,
               "max_steal": max_steal}  # fmt: skip
    found = _compare(a, b, read=read, **options)
    if not late or force:
        return found
    other = _compare(a, b, read=lambda run: without_lag(read(run)), **options)
    return _where_both_agree(found, other, late)


def _where_both_agree(found: Comparison, other: Comparison, late: Sequence[RunDirectory]) -> Comparison:
    """Of runs whose client was late: what the delay, which latencies from the intended send hold, does not decide."""
    there = {each.metric: each for each in other.metrics}
    reason = "it is another verdict without the client's own delay: measure again with a client that keeps its schedule"
    metrics = [
        each if (each.verdict, each.better) == (there[each.metric].verdict, there[each.metric].better)
        else msgspec.structs.replace(each, verdict="cannot tell", better=False, reason=reason)
        for each in found.metrics
    ]  # fmt: skip
    verdicts = {each.verdict for each in metrics}
    verdict = next((each for each in ("worse", "cannot tell") if each in verdicts), "no worse")
    names = " and ".join(run.name for run in late)
    note = f"{names} sent requests late: what is said of each metric holds with and without that delay"
    return msgspec.structs.replace(found, verdict=verdict, metrics=metrics, notes=[note, *found.notes])


def _compare(
    a: Sequence[RunDirectory], b: Sequence[RunDirectory], *, metrics: Sequence[str], margin: float,
    margins: Mapping[str, float], confidence: float, force: bool, max_steal: float | None,
    read: Callable[[RunDirectory], RunSamples],
) -> Comparison:  # fmt: skip
    _check_names(metrics, margins, max_steal)
    found_faults = faults_between(a, b)
    notes = _faults(found_faults.certain, force)
    whole = [[read(run) for run in side] for side in (a, b)]
    several = _several(whole)
    whole, of_load, about = begun_alike(whole, found_faults.of_load)
    notes += [*_faults(of_load, force), *about]
    notes += what_differs(a[0].meta(), b[0].meta())
    sides, steps, share, steal_notes = _undisturbed(whole, max_steal)
    way = _way(whole, several)
    chosen = list(dict.fromkeys(metrics)) or _usual(sides, steps is not None and not way.too_short, notes)
    of_steps = _of_steps(chosen, steps is not None)
    notes += _about(whole, steal_notes, share if of_steps else None, several)
    work = work_of(whole[0]), work_of(whole[1])
    if len(of_steps) < len(chosen):  # alike steps hold the same work, whatever the runs did
        notes += _faults(_other_work(whole, way.paired, margin, confidence), force)
        if "served" in margins or work[0].failed_share or work[1].failed_share:
            chosen = list(dict.fromkeys((*chosen, "served")))
    if idle := [name for name in margins if name not in chosen]:
        raise InputError(f"{idle[0]} has a margin and is not compared; compared are {', '.join(chosen)}")
    undisturbed = sides, (work_of(sides[0]), work_of(sides[1]))
    pairs = good_pairs(*whole[0], *whole[1]) if way.pairs else None
    notes += [*way.notes(chosen), *([pairs.sentence()] if pairs is not None else [])]
    found = [
        _compared(name, margins.get(name, margin), *((whole, work) if name == "served" else undisturbed), steps, way,
                  confidence, several)
        for name in chosen
    ]  # fmt: skip
    return together(found, margin, confidence, notes, work, pairs)


class _Way(NamedTuple):
    """What is weighed: whole runs, or one run a side, its requests by themselves and the rest by windows."""

    paired: bool
    windows: int  # for steps and tokens; 0 with several runs a side
    too_short: str  # why A has none, or ""
    few_requests: bool  # so few in A that not even they are weighed
    pairs: int  # of one run a side

    def notes(self, chosen: Sequence[str]) -> list[str]:
        of_windows = any(METRICS[name].source != "requests" for name in chosen)
        return [self.too_short] if self.too_short and (self.few_requests or of_windows) else []


def _way(sides: list[list[RunSamples]], several: bool) -> _Way:
    a, b = sides
    paired = len(a) == len(b) and all(map(same_schedule, a, b))
    windows, too_short = (0, "") if several else num_windows(a[0])
    few = not several and len(a[0].requests) < FEWEST_REQUESTS
    return _Way(paired, windows, too_short, few, len(a[0].requests) if paired and not several else 0)


def _compared(
    name: str, margin: float, sides: list[list[RunSamples]], work: tuple[Work, Work],
    steps: list[list[pd.DataFrame]] | None, way: _Way, confidence: float, several: bool,
) -> Compared:  # fmt: skip
    """One metric of the `sides`, which did the `work`."""
    metric, in_pairs = METRICS[name], way.paired and all(map(same_schedule, *sides))
    of_requests = metric.source == "requests"
    if not several and (way.few_requests if of_requests else way.too_short):
        return _seen_only(name, margin, sides, steps)
    if of_requests and not several:
        evidence = requests_evidence(sides[0][0], sides[1][0], metric, in_pairs)
    else:
        evidence = _evidence(metric, sides, steps, in_pairs, way.windows)
    if isinstance(evidence, str):
        return undecided(name, margin, evidence)
    found = weigh(name, metric, evidence, margin, confidence, _counted(metric, sides, steps, in_pairs))
    return _beside(found, metric, sides, work)


def _check_names(metrics: Sequence[str], margins: Mapping[str, float], max_steal: float | None) -> None:
    if unknown := [name for name in (*metrics, *margins) if name not in METRICS]:
        raise InputError(f"there is no metric {unknown[0] or 'without a name'}; there are {', '.join(METRICS)}")
    if max_steal is not None and (of_wall := [name for name in metrics if METRICS[name].source == "tokens"]):
        raise InputError(
            f"{of_wall[0]} is of the whole time of a run, of which --max-steal can leave nothing out; drop one"
        )


def _of_steps(chosen: Sequence[str], has_steps: bool) -> list[str]:
    """The metrics of steps among those. Raises InputError where there are no steps for them."""
    found = [name for name in chosen if METRICS[name].source == "steps"]
    if found and not has_steps:
        raise InputError(
            "a side has no steps that the other has the like of, which metrics of steps need; compare runs of "
            "`sojourn run`, or of `sojourn load --server-run`, or leave those metrics out"
        )
    return found


def _other_work(sides: list[list[RunSamples]], paired: bool, margin: float, confidence: float) -> list[str]:
    # Another build with the same settings has to do the same work
    metas = [{name: value for name, value in side[0].run.meta().items() if name not in VERSIONS} for side in sides]
    same_settings = not setting_differences(*metas).lines()
    faults = other_work(*sides, paired, same_settings, margin, confidence)
    return [f"the sides did not do the same work: {fault}" for fault in faults]


def _about(
    sides: list[list[RunSamples]], steal_notes: list[str | None], share: float | None, several: bool
) -> list[str]:
    """What a reader must know of the samples. `share`: of the steps that are compared; None where none are."""
    notes = [f"{name}: {sentence}" for name, sentence in zip("AB", steal_notes, strict=True) if sentence]
    if share is not None:
        notes.append(f"{share:.0%} of the steps have their like on both sides; only those are compared")
    shares = [min(kept_share(each.run.meta()) for each in side) for side in sides]
    notes += [
        f"{name} is a sample: its tool kept {share:.1%} of the requests. Shares and latencies are of those, tokens per "
        "second are scaled to all of them"
        for name, share in zip("AB", shares, strict=True) if share < 1
    ]  # fmt: skip
    if not several:
        notes.append("one run a side: what differs from run to run of the same system is not in the intervals")
    return notes


def _several(sides: list[list[RunSamples]]) -> bool:
    """Whether runs are resampled, and not windows of one run a side. Raises InputError where neither can be done."""
    for each in (*sides[0], *sides[1]):
        if not len(each.requests):
            raise InputError(f"{each.run.path} has no measured request, so there is nothing to compare")
    fewest, most = sorted(map(len, sides))
    if fewest < FEWEST_RUNS and most > 1:
        raise InputError(
            f"A has {len(sides[0])} runs and B has {len(sides[1])}; give one run a side, or at least {FEWEST_RUNS} of "
            "each"
        )
    if fewest < FEWEST_RUNS:
        first = sides[0][0]  # A alone: a B that is too slow for its windows is worse, not untold
        if not first.requests.served.any() or not first.requests.due_ns.max() > first.begin_ns:
            raise InputError(num_windows(first)[1])
    elif dead := [each for each in (*sides[0], *sides[1]) if not each.requests.served.any()]:
        raise InputError(f"{dead[0].run.path} served none of its requests; measure it again, or leave it out")
    return fewest >= FEWEST_RUNS


def _stolen(side: list[RunSamples]) -> str | None:
    """Of the run that lost most to other machines, where that is worth a word."""
    found = [
        steal_within(each.run.table("system"), each.begin_ns, each.begin_ns + round(each.span_s * 1e9)) for each in side
    ]
    steal_note = steal_sentence(max((steal for steal in found if steal), key=lambda steal: steal.mean, default=None))
    return f"in the worst run, {steal_note}" if steal_note and len(side) > 1 else steal_note


def _usual(sides: list[list[RunSamples]], steps: bool, notes: list[str]) -> list[str]:
    """The default metrics that a run has; what is left out is noted."""
    known = [
        name
        for name in OF_REQUESTS
        if any(each.requests[METRICS[name].what].notna().any() for side in sides for each in side)
    ]
    notes += [f"no run has {name}, so it is left out" for name in OF_REQUESTS if name not in known]
    return [*known, *(OF_STEPS if steps else ())]


class NotComparable(InputError):
    """Runs that differ in load, model or machine, or that are not valid. Each caller names its own way to force it."""


def _faults(faults: list[str], force: bool) -> list[str]:
    """With `force` notes, else NotComparable."""
    if faults and not force:
        raise NotComparable(f"{faults[0]}; measure again alike, or compare all the same")
    return [f"forced: {fault}" for fault in faults]


def _undisturbed(
    whole: list[list[RunSamples]], max_steal: float | None
) -> tuple[list[list[RunSamples]], list[list[pd.DataFrame]] | None, float, list[str | None]]:
    """The runs, or what is left of them; their alike steps and the share of these; what is to be said of each side."""
    tables = [[steps_of(each) for each in side] for side in whole]
    if max_steal is None:
        return (whole, *_alike(tables), [_stolen(side) for side in whole])
    sides = undisturbed_requests(whole, 100 * max_steal)
    undisturbed = undisturbed_steps(whole, tables, 100 * max_steal)
    alike, share = _alike(undisturbed)
    if alike is None and _alike(tables)[0] is not None:
        raise InputError(
            f"with at most {100 * max_steal:.3g}% of the CPU time taken no steps are left that have their like on both "
            "sides; allow more, or measure again"
        )
    steal_notes = [
        left_out(runs, left, steps, left_steps, 100 * max_steal) or _stolen(runs)  # what is allowed is told, too
        for runs, left, steps, left_steps in zip(whole, sides, tables, undisturbed, strict=True)
    ]
    return sides, alike, share, steal_notes


def _alike(tables: list[list[pd.DataFrame]]) -> tuple[list[list[pd.DataFrame]] | None, float]:
    if any(not len(steps) for side in tables for steps in side):
        return None, 0.0
    alike, share = alike_steps(tables)
    return (alike, share) if all(len(steps) for side in alike for steps in side) else (None, 0.0)


def _evidence(
    metric: Metric, sides: list[list[RunSamples]], steps: list[list[pd.DataFrame]] | None, paired: bool, windows: int
) -> Evidence | str:
    """From the series of one run a side, or from whole runs where `windows` is 0; or why there is none."""
    tables = steps or [[None] * len(side) for side in sides]
    samples = [
        [samples_of(each, metric, windows or 1, table) for each, table in zip(side, of_side, strict=True)]
        for side, of_side in zip(sides, tables, strict=True)
    ]
    if windows:
        (a,), (b,) = samples
        if not len(a) or not len(b):
            return f"{'B' if len(a) else 'A'} has no such value"
        return series_evidence(a, b, metric)
    a, b = ([statistic(each, metric) for each in side] for side in samples)
    if not np.isfinite(a + b).all():
        return "a run has no such value, or too many of its requests failed"
    return runs_evidence(a, b, metric, paired)


def _counted(metric: Metric, sides: list[list[RunSamples]], steps, paired: bool) -> float:
    if metric.what == "steady":  # steps are matched by what they hold, and not one by one
        return counting_error(*(np.concatenate([each.steady for each in side]) for side in steps), False)
    if metric.what not in SHARES:
        return 0.0
    return counting_error(*(np.concatenate([each.requests[metric.what] for each in side]) for side in sides), paired)


def _seen_only(
    name: str, margin: float, sides: list[list[RunSamples]], steps: list[list[pd.DataFrame]] | None
) -> Compared:
    """What both runs show of a metric, where they are too short to tell it from chance."""
    metric, tables = METRICS[name], steps or [[None], [None]]
    a, b = (
        statistic(samples_of(side[0], metric, 1, table[0]), metric) for side, table in zip(sides, tables, strict=True)
    )
    known = [None if np.isnan(value) else value for value in (a, b)]
    ratio = b / a if a and np.isfinite(a) and np.isfinite(b) else None
    reason = "too few requests" if metric.source == "requests" else "too few windows"
    return msgspec.structs.replace(undecided(name, margin, reason), a=known[0], b=known[1], ratio=ratio)


def _beside(found: Compared, metric: Metric, sides, work: tuple[Work, Work]) -> Compared:
    """What failed requests and the client itself may have added to a latency, a verdict has to outlast."""
    if metric.source != "requests" or found.a is None or found.b is None:
        return found
    slowest = max(float(each.requests[metric.what].max()) for side in sides for each in side)
    for shift in shifts(metric, *work, (found.a, found.b), slowest):
        found = outlasting(found, shift)
    return found
