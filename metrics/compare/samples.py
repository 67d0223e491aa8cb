"""What one run gives to a comparison: for each metric its samples in the order of time. Pure.

Tokens are counted in windows of the run, long beside a request. What neighbouring samples share is in `dependence`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sojourn.metrics.cells import flat_frame, lengths, row_sums
from sojourn.metrics.compare.metrics import SHARES, Metric
from sojourn.metrics.compute.utilisation import phases
from sojourn.metrics.records import COMPOSITIONS
from sojourn.metrics.request.goodput import chunks_of, judged, measured, measured_steps, window_ns, with_text
from sojourn.metrics.run.directory import RunDirectory, kept_share

FEWEST_WINDOWS, MOST_WINDOWS = 8, 40
WINDOW_LATENCIES = 3.0  # a window lasts at least so many median latencies
PARTS = 8  # of a window in which tokens are counted
WINDOW_REQUESTS = 5  # a window has at least so many requests, on average
SAME_DUE_NS = 1_000_000  # a schedule that is the same is due at the same moments
CONTEXT_RATIO = 1.25  # steps are alike if what they read differs by less
# A step is unsteady if it sticks out alone: it took more than so much of what is usual then, of the median of so many
# steps around it, each over what its like take, and neither the step before nor the one after did. What lasts for
# seconds (a busy host, a low clock) is usual, and what meets several steps in a row (another process or machine that
# takes the core) is the machine's: it differs from run to run four times as much as what is left.
STEADY_RATIO, STEPS_AROUND = 1.1, 21


class RunSamples(NamedTuple):
    """One run, from `begin_ns`, when its first measured request was due, for `span_s`."""

    run: RunDirectory
    requests: pd.DataFrame
    begin_ns: int
    span_s: float


FROM_INTENDED_SEND = ("ttft_ms", "e2e_ms")


def read_run(run: RunDirectory) -> RunSamples:
    """The measured requests of a run, judged by its objectives, and whether each was `served`."""
    meta = run.meta()
    return samples_from(run, measured(run.requests(), meta), meta.get("objectives"))


def without_lag(each: RunSamples) -> RunSamples:
    """The same with latencies from the moment at which each request was sent, and not was due: what they would be of a
    client that is never late, on a server that answers alike."""
    requests = each.requests.copy()
    lag_ms = ((requests.sent_ns.astype("float64") - requests.due_ns.astype("float64")) / 1e6).clip(lower=0).fillna(0)
    for name in FROM_INTENDED_SEND:
        requests[name] = requests[name].astype("float64") - lag_ms
    objectives = each.run.meta().get("objectives") or []
    return each._replace(requests=judged(requests, objectives))


def samples_from(run: RunDirectory, requests: pd.DataFrame, objectives: list[dict[str, Any]] | None) -> RunSamples:
    """The same of requests that were read already, or of a part of them."""
    requests = judged(requests, objectives or [])
    # Pairs are of one place in the schedule, also where all of it is due at once
    requests = requests.sort_values(["due_ns", "request_id"], ignore_index=True)
    requests["served"] = requests.status == "ok"
    span = window_ns(requests)
    begin, end = span if span else (0, 0)
    return RunSamples(run, requests, begin, (end - begin) / 1e9)


def same_schedule(first: RunSamples, second: RunSamples) -> bool:
    """Whether both sent the same requests at the same moments, so that they can be compared pair by pair."""
    a, b = first.requests, second.requests
    if len(a) != len(b) or not len(a):
        return False
    due = np.abs((a.due_ns.to_numpy() - first.begin_ns) - (b.due_ns.to_numpy() - second.begin_ns))
    return bool((due <= SAME_DUE_NS).all() and (a.klass.to_numpy() == b.klass.to_numpy()).all())


def num_windows(each: RunSamples) -> tuple[int, str]:
    """Windows that a run can be cut into, and why there are none: 0 where they would be fewer than FEWEST_WINDOWS."""
    requests, due_s = each.requests, float(each.requests.due_ns.max() - each.begin_ns) / 1e9
    sent = f"{each.run.path} has {len(requests):,} requests"
    if not requests.served.any():
        return 0, f"{sent} and served none, so nothing compares with it; measure it again"
    if not due_s > 0:
        return 0, f"{sent}, all due at once, so that one run has no windows in time; give two or more runs a side"
    latency_s = float(np.nanmedian(requests.e2e_ms.astype("float64"))) / 1e3
    found = min(MOST_WINDOWS, int(due_s / (WINDOW_LATENCIES * latency_s)), len(requests) // WINDOW_REQUESTS)
    if found >= FEWEST_WINDOWS:
        return found, ""
    return 0, (
        f"{sent} within {due_s:.3g} s, with a median latency of {latency_s:.3g} s: too short for {FEWEST_WINDOWS} "
        f"windows of {WINDOW_LATENCIES:g} latencies and {WINDOW_REQUESTS} requests each; run at least "
        f"{FEWEST_WINDOWS * WINDOW_REQUESTS} requests over {FEWEST_WINDOWS * WINDOW_LATENCIES * latency_s:,.0f} s, or "
        "give two or more runs a side"
    )


def samples_of(each: RunSamples, metric: Metric, windows: int, steps: pd.DataFrame | None = None) -> np.ndarray:
    """[samples] of a metric of a run, in the order of time; tokens in parts of so many windows. A request that
    failed is infinitely slow. `steps` are those of `alike_steps`, for metrics of steps."""
    if metric.source == "steps":
        return steps[metric.what].to_numpy(dtype="float64")
    if metric.source == "tokens":
        return _tokens(each, PARTS * windows)
    values = each.requests[metric.what].astype("float64").to_numpy(copy=True)
    if metric.what not in SHARES:
        values[each.requests.status != "ok"] = math.inf if metric.statistic != "mean" else math.nan
    return values[~np.isnan(values)]


def _tokens(each: RunSamples, parts: int) -> np.ndarray:
    """Output tokens per second, read in each part of the run's wall time."""
    stamps, tokens = chunks_of(with_text(each.requests))
    if not len(stamps):
        return np.zeros(0)
    place = np.clip(((stamps - each.begin_ns) / (each.span_s * 1e9) * parts).astype(int), 0, parts - 1)
    seconds = each.span_s / parts * kept_share(each.run.meta())  # in which so many tokens came as are kept
    return np.bincount(place, weights=tokens, minlength=parts) / seconds


def steps_of(each: RunSamples) -> pd.DataFrame:
    """The steps of a run with what makes them alike: composition, sequences, new tokens and context, in classes."""
    columns = ("begin_ns", "end_ns", "kinds", "new_tokens", "past_tokens")
    steps = measured_steps(flat_frame(each.run.arrow("steps", columns)), each.requests)
    sequences = lengths(steps.new_tokens)
    steps, sequences = steps[sequences > 0], sequences[sequences > 0]
    new = row_sums(steps.new_tokens)
    context = row_sums(steps.past_tokens) + new
    kinds = phases(steps)
    classes = (
        np.searchsorted(sorted(COMPOSITIONS), kinds), sequences,
        np.where(kinds == "decode", new, _size_class(new)), _size_class(context),
    )  # fmt: skip
    return pd.DataFrame(
        {
            "begin_ns": steps.begin_ns.astype("float64"),
            "took_ns": (steps.end_ns - steps.begin_ns).astype("float64"),
            "like": _packed(*(each.astype("int64") for each in classes)),
        }
    )


def _size_class(tokens: np.ndarray) -> np.ndarray:
    """Numbers of one class differ by less than CONTEXT_RATIO."""
    return np.log(np.maximum(tokens, 1)) // math.log(CONTEXT_RATIO)


def _packed(*parts: np.ndarray) -> np.ndarray:
    """One number for four, each of which fits in the bits of its place."""
    result = parts[0]
    for part, bits in zip(parts[1:], (20, 28, 8), strict=True):
        result = (result << bits) | np.minimum(part, (1 << bits) - 1)
    return result


def alike_steps(sides: Sequence[Sequence[pd.DataFrame]], fewest: int = 4) -> tuple[list[list[pd.DataFrame]], float]:
    """Of each run, in the order of time, the steps that have their like on both sides, with `ratio`: their time over
    the median of their like on both sides, and `steady`. And the share of all steps that are in it."""
    tables = [pd.concat(side).assign(side=place) for place, side in enumerate(sides)]
    every = pd.concat(tables)
    counts = every.groupby(["like", "side"], sort=False).size().unstack(fill_value=0)
    shared = set(counts.index[(counts >= fewest).all(axis=1)]) if counts.shape[1] == len(sides) else set()
    # The median of the sides' medians: the side with more steps does not decide what is usual.
    medians = every.groupby(["like", "side"], sort=False).took_ns.median().groupby(level=0).mean()
    found, used = [], 0
    for side in sides:
        found.append([])
        for steps in side:
            alike = steps[steps.like.isin(shared)].sort_values("begin_ns")
            alike["ratio"] = alike.took_ns / alike.like.map(medians)
            usual = alike.ratio.rolling(STEPS_AROUND, center=True, min_periods=1).median()
            long = alike.ratio > STEADY_RATIO * usual
            alike["steady"] = ~long | long.shift(1, fill_value=False) | long.shift(-1, fill_value=False)
            used += len(alike)
            found[-1].append(alike)
    return found, used / max(len(every), 1)
