"""Whether a run was in a steady state while it was measured, and how long it took to get there. Pure functions.

Figures of a run whose queue grows are figures of how long it was let grow. Nothing is trimmed here: the figures are of
the declared measure window, and the verdict says whether that was steady. Only the time in which requests were due is
looked at, so that the drain at the end counts for nothing.

Methods: MSER-5 (White, 1997) for how long the warm-up lasted; the trend test of Mann and Kendall, its variance widened
for what neighbours share (Hamed and Rao, 1998), with the slope of Theil and Sen for its size; the coefficient of
variation over windows.

What this cannot tell: a state that is steady for the length of this run and drifts in an hour.
"""

import math
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.cells import weighted

FEWEST_REQUESTS = 40
FEWEST_WINDOWS, MOST_WINDOWS = 8, 20
REQUESTS_A_WINDOW = 5
SURE = 0.01  # chance of calling a trend what is none
GROWTH_IN_FLIGHT = 0.5  # of the mean over the whole window: less is no trend that changes a figure
GROWTH_THROUGHPUT = 0.3
LARGEST_VARIATION = 0.5  # of throughput between windows, or three times what independent arrivals explain

Verdict = Literal["steady", "no steady state", "cannot tell"]


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """How a series moves over its windows."""

    mean: float
    slope_per_s: float  # Theil and Sen: the median over all pairs
    growth: float  # slope times duration, as a share of the mean
    p: float  # two-sided: the chance of such an order without a trend
    variation: float  # coefficient of variation


class Steadiness(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on the declared measure window, with the reason and the window that was looked at, in seconds from
    the first measured request."""

    verdict: Verdict
    reason: str
    begin_s: float
    end_s: float
    window_s: float | None  # length of each of the windows
    in_flight: Trend | None
    tokens_per_s: Trend | None
    warmup_s: float | None  # MSER-5: how much more of the beginning would be better left out; None where it cannot tell

    @property
    def queue_grows(self) -> bool:
        return self.in_flight is not None and self.in_flight.slope_per_s > 0 and _moves(self.in_flight)


def steadiness(frame: pd.DataFrame) -> Steadiness:
    """Of the measured requests of a run, as `RunDirectory.requests()` gives them."""
    rows = frame.sort_values("due_ns", ignore_index=True)
    seconds = float(rows.due_ns.iloc[-1] - rows.due_ns.iloc[0]) / 1e9 if len(rows) else 0.0
    windows = min(MOST_WINDOWS, len(rows) // REQUESTS_A_WINDOW)
    if len(rows) < FEWEST_REQUESTS or windows < FEWEST_WINDOWS or seconds <= 0:
        return undetermined(
            f"{len(rows)} requests due within {seconds:.3g} s are too few for a verdict; it takes {FEWEST_REQUESTS} "
            "over a time", seconds,
        )  # fmt: skip
    edges = float(rows.due_ns.iloc[0]) + np.linspace(0, seconds, windows + 1) * 1e9
    width = seconds / windows
    begin, end = _open_times(rows)
    flight = trend(_mean_open(begin, end, edges), width)
    tokens = trend(_tokens_read(rows, edges) / width, width)
    warmup_s = _warmup_s(begin, end)
    arrivals = np.histogram(rows.due_ns.to_numpy(dtype="float64"), edges)[0]
    faults = _faults(flight, tokens, float(arrivals.mean()))
    if faults:
        reason = "; ".join(faults)
        if warmup_s is not None and warmup_s > 0:
            reason += f"; without the first {warmup_s:.3g} s it may be (MSER-5): set measure.warmup_s"
    else:
        reason = (
            f"{flight.mean:.3g} requests in flight and {tokens.mean:,.4g} output tokens/s on average, without a trend "
            f"over {windows} windows of {width:.3g} s"
        )
    return Steadiness(
        verdict="no steady state" if faults else "steady", reason=reason, begin_s=0.0, end_s=seconds, window_s=width,
        in_flight=flight, tokens_per_s=tokens, warmup_s=warmup_s,
    )  # fmt: skip


def undetermined(reason: str, end_s: float = 0.0) -> Steadiness:
    return Steadiness(
        verdict="cannot tell", reason=reason, begin_s=0.0, end_s=end_s, window_s=None, in_flight=None,
        tokens_per_s=None, warmup_s=None,
    )  # fmt: skip


def trend(series: np.ndarray, width_s: float) -> Trend:
    """The trend of equally wide windows: Mann and Kendall's test, Theil and Sen's slope."""
    values = np.asarray(series, dtype="float64")
    count, mean = len(values), float(np.mean(values))
    later, earlier = np.tril_indices(count, -1)
    slopes = (values[later] - values[earlier]) / ((later - earlier) * width_s)
    slope = float(np.median(slopes))
    score = float(np.sum(np.sign(values[later] - values[earlier])))
    ties = np.unique(values, return_counts=True)[1]
    variance = (count * (count - 1) * (2 * count + 5) - float(np.sum(ties * (ties - 1) * (2 * ties + 5)))) / 18
    variance *= _shared_by_neighbours(values, slope, width_s)
    z = (score - math.copysign(1, score)) / math.sqrt(variance) if score and variance > 0 else 0.0
    return Trend(
        mean=mean,
        slope_per_s=slope,
        growth=slope * count * width_s / mean if mean else 0.0,
        p=2 * (1 - NormalDist().cdf(abs(z))),
        variation=float(np.std(values, ddof=1)) / mean if mean else 0.0,
    )


def mser_5(values: np.ndarray) -> int | None:
    """How many of the first values to leave out, so that the mean of the rest is best known: the minimum of its
    squared standard error over batches of five. None where that lies in the second half: the series never settles."""
    batches = np.asarray(values[: len(values) // 5 * 5], dtype="float64").reshape(-1, 5).mean(axis=1)
    count = len(batches)
    if count < 4:
        return None
    rest = np.arange(count, 0, -1)
    sums, squares = np.cumsum(batches[::-1])[::-1], np.cumsum(batches[::-1] ** 2)[::-1]
    spread = np.maximum(squares - sums**2 / rest, 0.0)
    best = int(np.argmin((spread / rest**2)[: count - 2]))
    return best * 5 if best <= count // 2 else None


def _faults(flight: Trend, tokens: Trend, arrivals_a_window: float) -> list[str]:
    faults = []
    if _moves(flight):
        way = "the queue grows" if flight.slope_per_s > 0 else "requests in flight fall"
        faults.append(f"{way}: {flight.slope_per_s:+.3g} requests in flight each second, p = {_p(flight.p)}")
    if tokens.p < SURE and abs(tokens.growth) > GROWTH_THROUGHPUT:
        way = "grow" if tokens.slope_per_s > 0 else "fall"
        faults.append(f"output tokens/s {way}: {tokens.slope_per_s:+.3g} each second, p = {_p(tokens.p)}")
    by_chance = 3 / math.sqrt(arrivals_a_window)
    if tokens.variation > max(LARGEST_VARIATION, by_chance):
        faults.append(f"output tokens/s swing: coefficient of variation {tokens.variation:.2f} between windows")
    return faults


def _moves(flight: Trend) -> bool:
    return flight.p < SURE and abs(flight.growth) > GROWTH_IN_FLIGHT


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else "0.0001 or less"


def _open_times(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """When each request was due and when it ended. One that was given up without an answer is taken to have been open
    as long as the longest answer took; one that was refused, or never sent, not at all."""
    begin, end = (
        rows[name].to_numpy(dtype="float64", na_value=np.nan, copy=True) for name in ("due_ns", "last_byte_ns")
    )
    abandoned = rows.status.isin(["timeout", "cancelled"]).to_numpy()
    longest = np.nanmax(end - begin, initial=0.0)
    return begin, np.where(np.isnan(end), begin + np.where(abandoned, longest, 0.0), end)


def _mean_open(begin: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    def until(moment: float) -> float:
        return float(np.sum(np.clip(np.minimum(end, moment) - begin, 0, None)))

    return np.diff([until(edge) for edge in edges]) / np.diff(edges)


def _tokens_read(rows: pd.DataFrame, edges: np.ndarray) -> np.ndarray:
    stamps, tokens, _ = weighted(rows.chunk_ns, rows.chunk_tokens)
    return np.histogram(stamps.astype("float64"), edges, weights=tokens)[0]


def _warmup_s(begin: np.ndarray, end: np.ndarray) -> float | None:
    """Until when the number of open requests, as each new one found it, had not settled."""
    found = np.arange(len(begin)) - np.searchsorted(np.sort(end), begin, side="right")
    left_out = mser_5(found.astype("float64"))
    return None if left_out is None else float(begin[left_out] - begin[0]) / 1e9


def _shared_by_neighbours(values: np.ndarray, slope: float, width_s: float) -> float:
    """By how much the variance of the score grows because windows in a row are alike: at least 1."""
    count = len(values)
    rest = values - slope * width_s * np.arange(count)
    ranks = np.argsort(np.argsort(rest, kind="stable"), kind="stable").astype("float64")
    centred = ranks - ranks.mean()
    power = float(centred @ centred)
    if power == 0:
        return 1.0
    factor = 1.0
    for lag in range(1, count // 2):
        alike = float(centred[:-lag] @ centred[lag:]) / power
        if abs(alike) > 1.96 / math.sqrt(count):
            rest_of = (count - lag) * (count - lag - 1) * (count - lag - 2)
            factor += 2 * rest_of * alike / (count * (count - 1) * (count - 2))
    return max(1.0, factor)
