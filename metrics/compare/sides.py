"""Two runs side by side: each account of the ledger and each class, with the interval of what differs. Pure.

Requests of a run are not independent: the intervals are those of `dependence`. A run of few requests has its figures
without one.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.compare.dependence import FEWEST_REQUESTS, Error, Queue, error_of_mean, queue_of, requests_evidence
from sojourn.metrics.compare.metrics import METRICS
from sojourn.metrics.compare.samples import RunSamples, same_schedule, samples_of
from sojourn.metrics.compare.verdict import Compared, statistic, undecided, weigh
from sojourn.metrics.ledger import ACCOUNTS, UNACCOUNTED
from sojourn.metrics.statistics.dependent_samples import t_quantile

ALL_ACCOUNTS = "all accounts"
OF_CLASSES = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p50", "e2e_p90", "attainment")
TWO_SIDED = 0.975  # one tail of a 95% interval


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
    no_interval = _no_interval(a)
    half = np.full(len(means[0]), math.nan) if no_interval else _half_widths(a, b, values, known, paired)
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


def _no_interval(a: RunSamples) -> str:
    """Why there is none, or "": by A, so that a slow B has one."""
    if len(a.requests) >= FEWEST_REQUESTS:
        return ""
    return f"{a.run.path} has {len(a.requests):,} requests, which is too short: run at least {FEWEST_REQUESTS}"


def _half_widths(
    a: RunSamples, b: RunSamples, values: list[np.ndarray], known: list[np.ndarray], paired: bool
) -> np.ndarray:
    """[accounts] half the width of the intervals, of `values` [requests, accounts] of the `known` requests."""
    queues = [_of_rows(queue_of(side), rows) for side, rows in zip((a, b), known, strict=True)]
    if paired:
        groups = [[error_of_mean(column, queues, "e2e_ms") for column in (values[1] - values[0]).T]]
    else:
        groups = [[error_of_mean(column, [queue], "e2e_ms") for column in side.T]
                  for side, queue in zip(values, queues, strict=True)]  # fmt: skip
    largest = np.maximum(*(side.mean(axis=0) for side in values))
    return np.array([_half_width(errors, ms) for errors, ms in zip(zip(*groups, strict=True), largest, strict=True)])


def _half_width(errors: Sequence[Error], ms: float) -> float:
    error = math.hypot(*(each.error for each in errors))
    parts = sum(each.error**4 / each.degrees for each in errors)
    degrees = error**4 / parts if parts > 0 else 1.0
    whole = math.hypot(error, *(each.of_speed * ms for each in errors))
    return whole * t_quantile(TWO_SIDED, max(degrees, 1.0))


def _of_rows(queue: Queue, rows: np.ndarray) -> Queue:
    return queue._replace(levels=queue.levels[rows])


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
    reason = _no_interval(a) if len(a.requests) and len(b.requests) else "a side has no request"
    paired, found = same_schedule(a, b), []
    for key in OF_CLASSES:
        metric = METRICS[key]
        samples = [samples_of(side, metric, 1) for side in (a, b)]
        if not all(len(side) for side in samples):
            continue
        evidence = reason or requests_evidence(a, b, metric, paired)
        if not isinstance(evidence, str):
            found.append(weigh(key, metric, evidence, margin, confidence))
            continue
        values = [_finite(statistic(side, metric)) for side in samples]
        ratio = values[1] / values[0] if values[0] and values[1] is not None else None
        seen = undecided(key, margin, "too few requests")
        found.append(msgspec.structs.replace(seen, a=values[0], b=values[1], ratio=ratio))
    return ClassComparison(klass=name, requests=(len(a.requests), len(b.requests)), metrics=found, no_interval=reason)


def _of_class(side: RunSamples, name: str) -> RunSamples:
    return side._replace(requests=side.requests[side.requests.klass.fillna("") == name].reset_index(drop=True))


def _with_sum(values: np.ndarray) -> np.ndarray:
    return np.column_stack([values, values.sum(axis=1)])


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
