"""What a client measured of a run, in one struct: latencies, whether the run was steady, deadlines, costs, the load."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pandas as pd

from sojourn.metrics.request.deadlines import Deadlines, class_deadlines
from sojourn.metrics.request.latencies import LatencySummary, summaries
from sojourn.metrics.results.energy import EnergyUse
from sojourn.metrics.results.load import is_closed
from sojourn.metrics.results.prices import TokenCost, token_cost
from sojourn.metrics.run.directory import kept_share, section
from sojourn.metrics.statistics.steadiness import Steadiness, steadiness, undetermined


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How the load went out: the offered rate, and the one that the generator kept."""

    requested_rps: float | None  # requests due over the time in which they were; None of a single moment
    achieved_rps: float | None  # requests sent over the time in which they were sent
    send_duration_s: float
    schedule_delay_ms: dict[str, float | None]  # intended → actual send: mean, p50, p99, max of all that were sent


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All of it is of the declared measure window; `steady` says whether that was a steady state."""

    latencies: list[LatencySummary]
    steady: Steadiness
    deadlines: list[Deadlines]  # of each class with a ttft and a tpot objective
    load: LoadSummary
    cost: TokenCost | None  # None where neither a price nor power is known
    closed: bool = False  # a request was due when its turn had come, not at an intended time


def results(rows: pd.DataFrame, meta: dict[str, Any], energy: EnergyUse | None = None) -> Results:
    """Of the `judged` requests of a run and its run.json."""
    return Results(
        latencies=summaries(rows),
        steady=steady_of(rows, meta),
        deadlines=class_deadlines(rows, meta.get("objectives"), kept_share(meta)),
        load=load_summary(rows, kept_share(meta)),
        cost=token_cost(
            rows, section(section(meta, "scenario"), "measure").get("usd_per_hour"), energy, kept_share(meta)
        ),
        closed=is_closed(meta),
    )


def steady_of(rows: pd.DataFrame, meta: Mapping[str, Any]) -> Steadiness:
    """Undecided for a run that is not valid."""
    return undetermined("the run is not valid") if meta.get("valid") is False else steadiness(rows)


def load_summary(rows: pd.DataFrame, kept_share: float = 1.0) -> LoadSummary:
    """How the generator kept its schedule."""
    due, sent = rows.due_ns.dropna().astype("float64"), rows.sent_ns.dropna().astype("float64")
    lag = ((rows.sent_ns.astype("float64") - rows.due_ns.astype("float64")) / 1e6).dropna()
    delays = {"mean": lag.mean(), "p50": lag.quantile(0.5), "p99": lag.quantile(0.99), "max": lag.max()}
    return LoadSummary(
        requested_rps=_rate(due, kept_share),
        achieved_rps=_rate(sent, kept_share),
        send_duration_s=float(sent.max() - sent.min()) / 1e9 if len(sent) else 0.0,
        schedule_delay_ms={name: float(delay) if len(lag) else None for name, delay in delays.items()},
    )


def _rate(moments: pd.Series, kept_share: float) -> float | None:
    """Gaps per second: the last moment begins no gap. Of a sample, scaled up."""
    seconds = float(moments.max() - moments.min()) / 1e9 if len(moments) else 0.0
    return (len(moments) - 1) / seconds / kept_share if seconds > 0 else None
