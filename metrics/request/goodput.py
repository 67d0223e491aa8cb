"""Objectives, attainment and goodput. Pure functions over `RunDirectory.requests()`.

Goodput counts the requests that kept every objective of their class (DistServe, OSDI 2024). The denominator is
everything that was due: a failed, cancelled or missing request has kept no objective, so that a server gains nothing
by giving up on slow requests. Latencies run from the moment when a request was meant to be sent.
"""

import math
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.cells import lengths, weighted
from sojourn.metrics.request.latencies import quantiles
from sojourn.metrics.request.objectives import EVERY_CLASS, OBJECTIVES, SERVER_OBJECTIVES, objectives_of, short
from sojourn.metrics.statistics.intervals import Interval, share_interval

MOST_WINDOWS = 60  # points that a figure over time can show without becoming noise
SHORTEST_WINDOW_S = 1.0
UNMEASURED = {
    "ttft_ms": "ttft_unmeasured",
    "ttfa_ms": "ttfa_unmeasured",
    "tpot_ms": "tpot_unmeasured",
}  # columns: served, and nobody could measure it


class RateWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds that rates are per second of, and the measured requests of all classes."""

    seconds: float
    declared: bool  # by the scenario; else from the first due to the last byte
    sent: int
    kept_share: float = 1.0  # of the requests that were made: below 1 they are a sample, and rates are scaled up

    @property
    def sampled_seconds(self) -> float:
        """The seconds in which so many requests as are kept were made."""
        return self.seconds * self.kept_share

    @property
    def due_rps(self) -> float | None:
        return self.sent / self.sampled_seconds if self.seconds else None

    def sentence(self) -> str:
        """`rates over the declared 5 s, in which 1.4 requests/s were due`."""
        which = "declared " if self.declared else ""
        until = "" if self.declared else " from the first request due to the last byte"
        rate = "" if self.due_rps is None else f", in which {self.due_rps:.3g} requests/s were due"
        return f"rates over the {which}{self.seconds:.3g} s{until}{rate}"


class ClassGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """Attainment of one class of requests. The denominator is what was sent, failures included."""

    klass: str
    objectives: dict[str, float]  # {"ttft_ms": 500.0, ...}
    sent: int
    completed: int
    good: int
    attainment: float
    attainment_by_objective: dict[str, float]
    goodput_rps: float
    goodput_tokens_per_s: float | None  # None where the server reports no tokens
    quantiles_ms: dict[str, dict[str, float | None]]  # {"ttft_ms": {"p50": …, "p90": …, "p99": None if n too small}}
    attainment_interval: Interval | None = None  # 95%; None where nothing was sent
    judged_by_objective: dict[str, int] = {}  # the requests that each share is of: without those not measured
    window: RateWindow | None = None  # that the rates are of
    missed_by_objective: dict[str, int] = {}  # served requests above each bound; a failed one has no latency
    missed_alone: dict[str, int] = {}  # of these, the requests that meet every other bound


def measured(frame: pd.DataFrame, meta: dict[str, Any]) -> pd.DataFrame:
    """The requests that count: without the warm-up that the scenario's `measure` block declares.

    `warmup_requests` leaves out the first so many requests, `warmup_s` what was due in the first seconds after them.
    """
    measure = ((meta.get("scenario") or {}) if isinstance(meta.get("scenario"), dict) else {}).get("measure") or {}
    ordered = frame.sort_values("due_ns", ignore_index=True)
    seconds, requests = measure.get("warmup_s") or 0, measure.get("warmup_requests") or 0
    return ordered[after_warmup(ordered.due_ns.to_numpy(), seconds, int(requests))].reset_index(drop=True)


def after_warmup(due_ns: np.ndarray, warmup_s: float, warmup_requests: int) -> np.ndarray:
    """[n] bool: which requests count, by the moments at which they were due. The seconds begin after the requests."""
    counts = np.ones(len(due_ns), dtype=bool)
    counts[np.argsort(due_ns, kind="stable")[:warmup_requests]] = False
    if warmup_s and counts.any():
        counts &= due_ns >= due_ns[counts].min() + warmup_s * 1e9
    return counts


def measured_steps(steps: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """The steps that began when the first of the `measured` requests was due, or later."""
    return steps[steps.begin_ns >= requests.due_ns.min()].reset_index(drop=True) if len(requests) else steps


def judged(frame: pd.DataFrame, objectives: list[dict[str, Any]] | None) -> pd.DataFrame:
    """The frame with `<objective>_met` (bool, NA where the class has no such objective), the columns of UNMEASURED and
    `good`.

    Without any objective a request is good when it was served. A first token that never came misses its objective; one
    output token has no gap that could be too long. Where all tokens came in one read, nobody could measure their gaps:
    `tpot_met` is NA, and the request is good by its other objectives; likewise `ttft_met` of an answer with tokens of
    which nobody saw the first (not streamed), and `ttfa_met` where no answer has its reasoning apart. Where a server
    tells no token count, the chunks stand for the tokens: a chunk may hold several, so the time per output token is
    then an upper bound.
    """
    result = frame.copy()
    result["tpot_ms"] = _tpot_with_chunks(result)
    served = (result.status == "ok").to_numpy(copy=True)
    codes, classes = pd.factorize(result.klass, use_na_sentinel=False)
    stated = [objectives_of(klass, objectives) for klass in classes]
    good = served.copy()
    empty = pd.Series(math.nan, index=result.index)
    for name in OBJECTIVES:
        of_classes = np.array([bounds.get(name, math.nan) for bounds in stated], dtype="float64")
        bound = pd.Series(of_classes[codes], index=result.index)
        latency = result.get(name, empty).astype("float64")
        met = (latency <= bound).to_numpy(copy=True)
        applies = bound.notna().to_numpy(copy=True)
        unmeasured = served & latency.isna().to_numpy()
        if name == "tpot_ms":
            without_gap = (result.output_tokens <= 1).to_numpy(dtype=bool, na_value=False)
            met |= unmeasured & without_gap
            unmeasured &= ~without_gap
        elif name == "ttft_ms":  # an answer in one piece: its tokens came, and nobody saw the first one
            unmeasured &= (result.output_tokens > 0).to_numpy(dtype=bool, na_value=False)
        elif name == "ttfa_ms":  # where others have one, an answer without it never came to its first token
            unmeasured &= bool(latency.isna().all())
        if name in UNMEASURED:
            result[UNMEASURED[name]] = applies & unmeasured
            applies &= ~unmeasured
        met &= served
        result[f"{short(name)}_met"] = pd.array(np.where(applies, met, False), dtype="boolean")
        result.loc[~applies, f"{short(name)}_met"] = pd.NA
        good = good & (met | ~applies)
    result["good"] = good
    return result


def unmeasured_objectives(rows: pd.DataFrame) -> list[str]:
    """The objectives that could be measured of none of the `judged` requests that were served."""
    served = rows[rows.status == "ok"]
    return [
        name
        for name, column in UNMEASURED.items()
        if served[column].any() and served[f"{short(name)}_met"].isna().all()
    ]


def window_ns(frame: pd.DataFrame) -> tuple[int, int] | None:
    """From the first moment when a request was due to the last byte that any client read; None without a request."""
    if not len(frame):
        return None
    begin, last = int(frame.due_ns.min()), frame.last_byte_ns.max()
    end = int(frame.due_ns.max() if pd.isna(last) else max(last, frame.due_ns.max()))
    return begin, end


def rate_window(frame: pd.DataFrame, declared_s: float | None, kept_share: float = 1.0) -> RateWindow:
    """The declared window of an open load: what happened to come in it may have come within a part of it, and more good
    requests a second than were offered there cannot be. Without one: first due → last byte of the run."""
    if declared_s is not None and len(frame):
        due_s = float(frame.due_ns.max() - frame.due_ns.min()) / 1e9
        return RateWindow(seconds=max(declared_s, due_s), declared=True, sent=len(frame))
    span = window_ns(frame)
    seconds = (span[1] - span[0]) / 1e9 if span else 0.0
    return RateWindow(seconds=seconds, declared=False, sent=len(frame), kept_share=kept_share)


def class_goodput(
    frame: pd.DataFrame, objectives: list[dict[str, Any]] | None, declared_s: float | None = None,
    kept_share: float = 1.0,
) -> list[ClassGoodput]:  # fmt: skip
    """Goodput of all requests ("all"), then of each class, over one `rate_window`."""
    whole = judged(frame.sort_values("due_ns", ignore_index=True), objectives)
    window = rate_window(whole, declared_s, kept_share)
    rows = [_class_row(EVERY_CLASS, whole, objectives_of(EVERY_CLASS, objectives), window)]
    classes = sorted(klass for klass in whole.klass.unique() if klass != EVERY_CLASS)
    # A single class under the objectives of all would repeat the first row
    if len(classes) > 1 or any(objectives_of(klass, objectives) != rows[0].objectives for klass in classes):
        rows += [
            _class_row(klass, whole[whole.klass == klass], objectives_of(klass, objectives), window)
            for klass in classes
        ]
    return rows


def goodput_by_tpot(frame: pd.DataFrame, objectives: list[dict[str, Any]] | None) -> pd.DataFrame:
    """Throughput against time per output token, one row a time window of the run: the frontier that was reached.

    Columns: `begin_s` (from the first due), `tpot_ms` (mean over the tokens that clients read in the window, of the
    gap before each), `tokens_per_s` (all tokens read), `good_tokens_per_s` (those of good requests), `streams` (mean
    number of requests between first token and last byte), `tokens`. Windows in which nobody waited for a next token
    have a NaN `tpot_ms`. A window is at least a second, and a run has at most 60.

    What this cannot show: the frontier at loads that the run did not offer.
    """
    columns = ["begin_s", "tpot_ms", "tokens_per_s", "good_tokens_per_s", "streams", "tokens"]
    whole = judged(frame, objectives)
    span, streamed = window_ns(whole), with_text(whole)
    if span is None or not len(streamed):
        return pd.DataFrame(columns=columns, dtype="float64")
    width = max(SHORTEST_WINDOW_S, (span[1] - span[0]) / 1e9 / MOST_WINDOWS)
    edges = span[0] + np.arange(math.ceil((span[1] - span[0]) / 1e9 / width) + 1) * width * 1e9
    stamps, tokens = chunks_of(streamed)
    gaps = np.concatenate([np.diff(chunk_ns, prepend=np.nan) for chunk_ns in streamed.chunk_ns])
    good = np.repeat(streamed.good.to_numpy(dtype=bool), streamed.chunk_ns.map(len))
    place = np.clip(np.searchsorted(edges, stamps, side="right") - 1, 0, len(edges) - 2)
    size = len(edges) - 1

    def total(weights: np.ndarray) -> np.ndarray:
        return np.bincount(place, weights=weights, minlength=size)

    waited = ~np.isnan(gaps)
    waited_tokens = total(np.where(waited, tokens, 0))
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot_ms = np.where(waited_tokens > 0, total(np.where(waited, gaps, 0)) / 1e6 / waited_tokens, np.nan)
    all_tokens = total(tokens)
    return pd.DataFrame(
        {
            "begin_s": (edges[:-1] - span[0]) / 1e9,
            "tpot_ms": tpot_ms,
            "tokens_per_s": all_tokens / width,
            "good_tokens_per_s": total(np.where(good, tokens, 0)) / width,
            "streams": _mean_open_streams(streamed, edges),
            "tokens": all_tokens,
        }
    )[columns]


def with_text(requests: pd.DataFrame) -> pd.DataFrame:
    """The requests of whose answer a client read some text."""
    return requests[lengths(requests.chunk_ns) > 0]


def chunks_of(streamed: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """When each chunk was read, and its tokens; a chunk stands for a token where the server tells none."""
    stamps, tokens, _ = weighted(streamed.chunk_ns, streamed.chunk_tokens)
    return stamps.astype("float64"), tokens


def total_tokens(tokens: pd.Series) -> int | None:
    """The sum over requests; None where the server reported the tokens of no request."""
    return None if len(tokens) and not tokens.notna().any() else int(tokens.sum())


def tokens_per_s(tokens: pd.Series, seconds: float) -> float | None:
    """None where the server reported none; 0 for a window of 0 s."""
    reported = total_tokens(tokens)
    return None if reported is None else reported / seconds if seconds else 0.0


def _class_row(klass: str, rows: pd.DataFrame, bounds: dict[str, float], window: RateWindow) -> ClassGoodput:
    seconds = window.sampled_seconds
    sent, served = len(rows), rows[rows.status == "ok"]
    good = rows[rows.good]
    answers = {name: rows[f"{short(name)}_met"].dropna() for name in OBJECTIVES}
    answers = {name: met for name, met in answers.items() if len(met)}
    above = {name: (~served[f"{short(name)}_met"]).fillna(False).astype(bool) for name in answers}
    bounds_missed = sum((late.astype(int) for late in above.values()), start=pd.Series(0, index=served.index))
    return ClassGoodput(
        klass=klass,
        objectives=bounds,
        sent=sent,
        completed=len(served),
        good=len(good),
        attainment=len(good) / sent if sent else 0.0,
        attainment_by_objective={name: float(met.mean()) for name, met in answers.items()},
        goodput_rps=len(good) / seconds if seconds else 0.0,
        goodput_tokens_per_s=tokens_per_s(good.output_tokens, seconds),
        quantiles_ms={name: quantiles(served[name], failed=sent - len(served)) for name in _measured_of(served)},
        attainment_interval=share_interval(rows.good.to_numpy()) if sent else None,
        judged_by_objective={name: len(met) for name, met in answers.items()},
        window=window,
        missed_by_objective={name: int(late.sum()) for name, late in above.items()},
        missed_alone={name: int((late & (bounds_missed == 1)).sum()) for name, late in above.items()},
    )


def _measured_of(served: pd.DataFrame) -> tuple[str, ...]:
    """The latencies of OBJECTIVES, and the first token of the answer where reasoning stands apart from it."""
    known = "ttfa_ms" in served and served.ttfa_ms.notna().any()
    return OBJECTIVES if known else SERVER_OBJECTIVES


def _tpot_with_chunks(frame: pd.DataFrame) -> pd.Series:
    reported = frame.output_tokens.notna()
    if reported.all():
        return frame.tpot_ms.astype("float64")
    chunks = frame.chunk_ns.map(lambda stamps: 0 if stamps is None else len(stamps)).astype("float64")
    span = frame.chunk_ns.map(lambda s: float(s[-1] - s[0]) / 1e6 if s is not None and len(s) > 1 else math.nan)
    estimated = (span.astype("float64") / (chunks - 1)).where((frame.status == "ok") & (chunks > 1))
    return frame.tpot_ms.astype("float64").where(reported, estimated)


def _mean_open_streams(streamed: pd.DataFrame, edges: np.ndarray) -> np.ndarray:
    begin = streamed.chunk_ns.map(lambda stamps: stamps[0]).to_numpy(dtype="float64")
    end = streamed.chunk_ns.map(lambda stamps: stamps[-1]).to_numpy(dtype="float64")
    low, high = edges[:-1, None], edges[1:, None]
    inside = np.clip(np.minimum(end, high) - np.maximum(begin, low), 0, None)
    return inside.sum(axis=1) / np.diff(edges)
