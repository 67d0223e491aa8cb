"""Two runs side by side: each account of the ledger and each class, with the interval of what differs. Pure.

Requests of a run are not independent, so windows of the run are the samples, as in `samples`. A run that is too short
for windows has its figures without an interval.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.compare.metrics import METRICS
from sojourn.metrics.compare.pairs import are_taken_by_pairs, blocks_evidence, blocks_of, latencies_of
from sojourn.metrics.compare.samples import RunSamples, num_windows, same_schedule, samples_of
from sojourn.metrics.compare.verdict import Compared, statistic, undecided, weigh, windows_evidence
from sojourn.metrics.ledger import ACCOUNTS, UNACCOUNTED
from sojourn.metrics.statistics.dependent_samples import t_quantile

ALL_ACCOUNTS = "all accounts"
OF_CLASSES = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p50", "e2e_p90", "attainment")
TWO_SIDED = 0.975  # one tail of a 95% interval
SEED = 0


class AccountDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the requests with a ledger on both sides. `low_ms` to `high_ms` is the 95% interval of B − A."""

    account: str
    a_ms: float
    b_ms: float
    difference_ms: float
    low_ms: float | None
    high_ms: float | None


class LedgerDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Account by account, in the order of the ledger; the last row is their sum."""

    rows: list[AccountDifference]
    requests: tuple[int, int]  # with a ledger, of A and of B
    paired: bool
    no_interval: str  # why there is none, or ""


class ClassComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One class, or all of them, by OF_CLASSES."""

    klass: str
    requests: tuple[int, int]
    metrics: list[Compared]
    no_interval: str


def accounts_ms(requests: pd.DataFrame, prefix: str = "ledger") -> pd.DataFrame:
    """Milliseconds by account, NaN in the rows without a whole ledger; `prefix` is `ledger` or `ttft`."""
    left_over = "unaccounted_ns" if prefix == "ledger" else "ttft_unaccounted_ns"
    columns = {f"{prefix}_{info.column}": info.name for info in ACCOUNTS} | {left_over: UNACCOUNTED}
    booked = requests[list(columns)].rename(columns=columns).astype("float64") / 1e6
    return booked.fillna(0.0).where(booked[UNACCOUNTED].notna())


def ledger_difference(a: RunSamples, b: RunSamples, prefix: str = "ledger") -> LedgerDifference | None:
    """None where a side has no request with a server's ledger. Requests of the same schedule are taken in pairs."""
    booked = [accounts_ms(side.requests, prefix).to_numpy() for side in (a, b)]
    known = [~np.isnan(values[:, -1]) for values in booked]
    paired = same_schedule(a, b) and bool((known[0] & known[1]).any())
    if paired:
        known = [known[0] & known[1]] * 2
    if not all(rows.any() for rows in known):
        return None
    values = [_with_sum(side[rows]) for side, rows in zip(booked, known, strict=True)]
    means = [side.mean(axis=0) for side in values]
    count, no_interval = num_windows(a)  # of both, so that a slow B has as many
    if paired and are_taken_by_pairs(a, b):
        half, no_interval = _half_of_pairs(a, b, values, known[0]), ""
    elif no_interval:
        half = np.full(len(means[0]), math.nan)
    else:
        half = _half_of_windows([_windows(side, rows, count) for side, rows in zip((a, b), known, strict=True)], values,
                                paired)  # fmt: skip
    names = [*(info.name for info in ACCOUNTS), UNACCOUNTED, ALL_ACCOUNTS]
    rows = [
        AccountDifference(
            account=name, a_ms=float(first), b_ms=float(second), difference_ms=float(second - first),
            low_ms=_finite(second - first - width), high_ms=_finite(second - first + width),
        )
        for name, first, second, width in zip(names, *means, half, strict=True)
        if first or second
    ]  # fmt: skip
    return LedgerDifference(
        rows=rows, requests=(len(values[0]), len(values[1])), paired=paired, no_interval=no_interval
    )


def _half_of_windows(places: list[np.ndarray], values: list[np.ndarray], paired: bool) -> np.ndarray:
    """[accounts] half the width of the intervals. `places`: the windows of the requests of each side."""
    if paired:
        errors, degrees = [_error_of_mean(values[1] - values[0], places[0])], len(np.unique(places[0])) - 1
    else:
        errors = [_error_of_mean(side, place) for side, place in zip(values, places, strict=True)]
        degrees = sum(len(np.unique(place)) - 1 for place in places)
    return np.sqrt(np.sum(np.square(errors), axis=0)) * t_quantile(TWO_SIDED, max(degrees, 1))


def _half_of_pairs(a: RunSamples, b: RunSamples, values: list[np.ndarray], known: np.ndarray) -> np.ndarray:
    latencies = latencies_of(*(side._replace(requests=side.requests[known]) for side in (a, b)))
    between = [blocks_of(column, latencies, "e2e_ms") for column in (values[1] - values[0]).T]
    largest = np.maximum(*(side.mean(axis=0) for side in values))
    return np.array([
        math.hypot(each.error, each.of_speed * ms) * t_quantile(TWO_SIDED, max(each.degrees, 1))
        for each, ms in zip(between, largest, strict=True)
    ])  # fmt: skip


def class_comparisons(
    a: RunSamples, b: RunSamples, margin: float = 0.05, confidence: float = 0.95
) -> list[ClassComparison]:
    """Latencies and attainment of all requests, then of each class that both sides have where there are several."""
    names = [
        name for name in a.requests.klass.fillna("").value_counts().index if (b.requests.klass.fillna("") == name).any()
    ]
    groups: Mapping[str, tuple[RunSamples, RunSamples]] = {"all": (a, b)}
    if len(names) > 1:
        groups |= {name: (_of_class(a, name), _of_class(b, name)) for name in names}
    return [_class_comparison(name, *sides, margin, confidence) for name, sides in groups.items()]


def side_by_side(a: RunSamples, b: RunSamples, prefix: str = "ledger") -> pd.DataFrame:
    """One row a request of a schedule that both runs share, in its order: ids, class, `due_s`, latencies of both in
    ms, statuses, and the account whose time differs most with its difference. Empty where the schedules differ."""
    if not same_schedule(a, b):
        return pd.DataFrame()
    first, second = a.requests, b.requests
    change = accounts_ms(second, prefix).to_numpy() - accounts_ms(first, prefix).to_numpy()
    names = np.array([*(info.name for info in ACCOUNTS), UNACCOUNTED])
    size = np.nan_to_num(np.abs(change))
    most = size.argmax(axis=1)
    table = pd.DataFrame({
        "request_a": first.request_id.to_numpy(), "request_b": second.request_id.to_numpy(),
        "klass": first.klass.fillna("").to_numpy(), "due_s": (first.due_ns.astype("float64") - a.begin_ns) / 1e9,
        "status_a": first.status.to_numpy(), "status_b": second.status.to_numpy(),
    })  # fmt: skip
    for latency in ("ttft_ms", "tpot_ms", "e2e_ms"):
        table[f"{latency}_a"] = first[latency].astype("float64").to_numpy()
        table[f"{latency}_b"] = second[latency].astype("float64").to_numpy()
    table["account"] = np.where(size.max(axis=1) > 0, names[most], "")
    table["account_ms"] = change[np.arange(len(change)), most]
    return table


def _class_comparison(name: str, a: RunSamples, b: RunSamples, margin: float, confidence: float) -> ClassComparison:
    windows, reason = num_windows(a) if len(a.requests) and len(b.requests) else (0, "a side has no request")
    paired, random = same_schedule(a, b), np.random.default_rng(SEED)
    if by_pairs := are_taken_by_pairs(a, b):
        reason = ""
    found = []
    for key in OF_CLASSES:
        metric = METRICS[key]
        samples = [samples_of(side, metric, windows or 1) for side in (a, b)]
        if not all(len(side.values) for side in samples):
            continue
        if by_pairs or windows:
            evidence = (
                blocks_evidence(a, b, metric, random)
                if by_pairs
                else windows_evidence(*samples, metric, paired, random)
            )
            found.append(weigh(key, metric, evidence, margin, confidence))
            continue
        values = [_finite(statistic(side, metric)) for side in samples]
        ratio = values[1] / values[0] if values[0] and values[1] is not None else None
        seen = undecided(key, margin, "too few windows")
        found.append(msgspec.structs.replace(seen, a=values[0], b=values[1], ratio=ratio))
    return ClassComparison(klass=name, requests=(len(a.requests), len(b.requests)), metrics=found, no_interval=reason)


def _of_class(side: RunSamples, name: str) -> RunSamples:
    return side._replace(requests=side.requests[side.requests.klass.fillna("") == name].reset_index(drop=True))


def _with_sum(values: np.ndarray) -> np.ndarray:
    return np.column_stack([values, values.sum(axis=1)])


def _windows(side: RunSamples, rows: np.ndarray, count: int) -> np.ndarray:
    """[n] the window of each request among `rows`, by when it was due."""
    offsets = side.requests.due_ns.to_numpy(dtype="float64") - side.begin_ns
    place = (offsets / max(float(offsets.max()), 1.0) * count).astype(int)
    return np.clip(place, 0, count - 1)[rows]


def _error_of_mean(values: np.ndarray, window: np.ndarray) -> np.ndarray:
    """[accounts] standard error of the mean of `values` [n, accounts]: windows are drawn, with all their requests, and
    the mean is the ratio of two sums over them (Cochran, 1977)."""
    groups, place = np.unique(window, return_inverse=True)
    if len(groups) < 2:
        return np.full(values.shape[1], math.nan)
    off = values - values.mean(axis=0)
    sums = np.zeros((len(groups), values.shape[1]))
    np.add.at(sums, place, off)
    return np.sqrt(len(groups) / (len(groups) - 1) * np.square(sums).sum(axis=0)) / len(values)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
