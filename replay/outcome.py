"""What the clients of one replay saw: latencies, and the requests that kept their objectives."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.errors import ReplayError
from sojourn.metrics.request.objectives import A_REPLAY, EVERY_CLASS, objectives_of, refuse_client_objectives
from sojourn.replay.load import Sent
from sojourn.replay.verdict.measured import LATENCIES, QUANTILES


@dataclass(frozen=True, slots=True)
class Answers:
    """The measured requests, in order of their due moments. Latencies are ms, NaN where a request has none."""

    klass: np.ndarray
    served: np.ndarray  # bool
    tpot_counts: np.ndarray  # bool: it has gaps, and a client that could measure them
    ttft_ms: np.ndarray
    tpot_ms: np.ndarray
    e2e_ms: np.ndarray
    due_ns: np.ndarray
    last_ns: np.ndarray  # NaN where nothing was read
    output_tokens: np.ndarray

    def stretched(self, factor: float) -> "Answers":
        """The same, each latency so many times as long."""
        return replace(
            self,
            ttft_ms=factor * self.ttft_ms,
            tpot_ms=factor * self.tpot_ms,
            e2e_ms=factor * self.e2e_ms,
            last_ns=self.due_ns + factor * (self.last_ns - self.due_ns),
        )


def replayed_answers(sent: Sequence[Sent]) -> Answers:
    rows = [each for each in sent if each.recorded.is_measured or each.copy]
    moments = [[s.due_ns, s.first_ns, s.last_text_ns, s.last_ns] for s in rows]
    due, first, text, last = np.array(moments, dtype=float).reshape(-1, 4).T  # None is NaN
    served = np.array([each.status == "ok" for each in rows], dtype=bool)
    outputs = np.array([each.output_tokens for each in rows], dtype=float)
    later = outputs - np.array([each.recorded.first_read_tokens for each in rows])
    counts = np.array([each.recorded.tpot_is_measured for each in rows], dtype=bool) & (later > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(counts & served, np.maximum(text - first, 0.0) / 1e6 / later, np.nan)
    return Answers(
        klass=np.array([each.recorded.klass for each in rows], dtype=object),
        served=served,
        tpot_counts=counts,
        ttft_ms=np.where(served, (first - due) / 1e6, np.nan),
        tpot_ms=tpot,
        e2e_ms=np.where(served, (last - due) / 1e6, np.nan),
        due_ns=due,
        last_ns=last,
        output_tokens=outputs,
    )


def recorded_answers(measured: pd.DataFrame) -> Answers:
    """Of the measured rows of `RunDirectory.requests()`."""

    def floats(name: str) -> np.ndarray:
        return measured[name].astype("float64").to_numpy(na_value=np.nan)

    return Answers(
        klass=measured.klass.to_numpy(dtype=object),
        served=(measured.status == "ok").to_numpy(),
        tpot_counts=measured.tpot_ms.notna().to_numpy(),
        ttft_ms=floats("ttft_ms"),
        tpot_ms=floats("tpot_ms"),
        e2e_ms=floats("e2e_ms"),
        due_ns=floats("due_ns"),
        last_ns=floats("last_byte_ns"),
        output_tokens=np.nan_to_num(floats("output_tokens")),
    )


def figures(
    answers: Answers, objectives: Sequence[Mapping[str, Any]] | None, window_s: float | None
) -> dict[str, float]:
    """`attainment`, `goodput_rps`, `output_tokens_per_s`, `attainment:CLASS`, and `ttft_ms:p50` and so on; NaN where
    there is none. A failed request counts as slower than all, as in metrics/request/goodput.py."""
    good = within(answers, objectives)
    count = len(good)
    ends = answers.last_ns[~np.isnan(answers.last_ns)]
    span_s = (max(ends.max(initial=0.0), answers.due_ns.max()) - answers.due_ns.min()) / 1e9 if count else 0.0
    seconds = window_s if window_s is not None else span_s
    if window_s is not None and count:
        seconds = max(window_s, float(answers.due_ns.max() - answers.due_ns.min()) / 1e9)
    found = {
        "attainment": float(good.mean()) if count else math.nan,
        "goodput_rps": float(good.sum() / seconds) if seconds > 0 else math.nan,
        "output_tokens_per_s": float(answers.output_tokens.sum() / span_s) if span_s > 0 else math.nan,
    }
    for klass in sorted(set(answers.klass.tolist())):
        found[f"attainment:{klass}"] = float(good[answers.klass == klass].mean())
    failed = int((~answers.served).sum())
    for name in LATENCIES:
        values = np.sort(getattr(answers, name)[~np.isnan(getattr(answers, name))])
        for label, quantile in QUANTILES.items():
            rank = math.ceil(quantile * (len(values) + failed)) - 1
            found[f"{name}:{label}"] = float(values[rank]) if 0 <= rank < len(values) else math.nan
    return found


def within(answers: Answers, objectives: Sequence[Mapping[str, Any]] | None) -> np.ndarray:
    """[requests] bool: served, and within every objective of its class. Raises ReplayError for one of clients alone."""
    good = answers.served.copy()
    named = {name for each in objectives or () for name, bound in each.items() if bound is not None}
    try:
        refuse_client_objectives(named, A_REPLAY)
    except ValueError as error:
        raise ReplayError(str(error)) from None
    for klass in set(answers.klass.tolist()):
        rows = answers.klass == klass
        for name, bound in objectives_of(klass or EVERY_CLASS, objectives).items():
            latency = getattr(answers, name)
            met = latency <= bound
            if name == "tpot_ms":
                met |= ~answers.tpot_counts
            good &= ~rows | met
    return good
