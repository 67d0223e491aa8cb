"""The figures of a recorded run that predictions are about, by the same names."""

import math
from collections.abc import Mapping
from typing import Any

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.prediction import Interval, Prediction
from sojourn.metrics.request.goodput import judged, measured, rate_window
from sojourn.metrics.results.load import declared_window_s
from sojourn.metrics.run.directory import RunDirectory, kept_share

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
SHARE = "attainment"


def measured_figures(run: RunDirectory) -> dict[str, float]:
    """`attainment` and `goodput_rps` where the run has objectives, and `ttft_ms:p50` and so on.

    A failed request counts as slower than all others. Raises RunDataError where nothing was measured.
    """
    meta = run.meta()
    rows = judged(measured(run.requests(), meta), meta.get("objectives") or [])
    if not len(rows):
        raise RunDataError(f"{run.path} has no measured request, so there is nothing to verify")
    found = {}
    if meta.get("objectives"):
        seconds = rate_window(rows, declared_window_s(meta), kept_share(meta)).sampled_seconds
        found = {SHARE: float(rows.good.mean()), "goodput_rps": float(rows.good.sum()) / seconds if seconds else 0.0}
    failed = int((rows.status != "ok").sum())
    for name in LATENCIES:
        values = sorted(rows[name].dropna().astype("float64"))
        for label, quantile in QUANTILES.items():
            rank = math.ceil(quantile * (len(values) + failed)) - 1
            if 0 <= rank < len(values):
                found[f"{name}:{label}"] = values[rank]
    return found


def num_measured(run: RunDirectory) -> int:
    return len(measured(run.requests(), run.meta()))


def predicted_figures(prediction: Prediction) -> dict[str, Interval]:
    """The same names → what was predicted."""
    of_latencies: Mapping[str, Any] = {name: getattr(prediction, name) for name in LATENCIES}
    return {SHARE: prediction.attainment, "goodput_rps": prediction.goodput_rps} | {
        f"{name}:{label}": interval for name, quantiles in of_latencies.items() for label, interval in quantiles.items()
    }
