"""Bounds for a run that names none: what the requests of a class may take, by what their own work took.

A server that records by itself knows no objectives. A request then counts as late where it takes more than twice the
own work of its class, and more than a reader notices. The bound is one of the class: of the requests with much work.
"""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from sojourn.diagnosis.excess import accounts_of
from sojourn.metrics.ledger import ACCOUNT_BY_NAME
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.server_alone import meta_of, requests_of

STRETCH = 2.0
NOTICEABLE_MS: Mapping[str, float] = {"ttft_ms": 200.0, "tpot_ms": 15.0}  # above the own work: less, nobody notices
MUCH_WORK = 0.9  # the quantile of a class's own work that its bound is of
OWN_WORK = "stands in because no objective is named: twice what the own work of the class takes"
BEYOND = {"request", "memory", "client"}  # lifecycles of waits, of others' work and of what is computed again


def with_expectation(run: RunDirectory) -> RunDirectory:
    """The run judged by such bounds; as it is where it names objectives, or where no server recorded its requests.

    Raises RunDataError where its tables cannot be read.
    """
    meta = meta_of(run)
    if meta.get("objectives") or not run.sources("requests"):
        return run
    bounds = expected_bounds(measured(requests_of(run, run.meta()), meta))
    return RunDirectory(run.path, bounds) if bounds else run


def is_expectation(objectives: list[dict[str, Any]]) -> bool:
    """Whether the objectives are no one's, but such bounds."""
    return bool(objectives) and all(entry.get("source") == OWN_WORK for entry in objectives)


def is_own_work(account: str) -> bool:
    """Whether an account is work of the request itself."""
    return ACCOUNT_BY_NAME[account].lifecycle not in BEYOND


def expected_bounds(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The bounds of each class as `objectives` of run.json has them; [] where no request has the server's accounts."""
    served = rows[(rows.status == "ok") & rows.unaccounted_ns.notna()]
    return [
        {"klass": klass, "source": OWN_WORK} | bounds
        for klass, each in served.groupby("klass")
        if (bounds := {name: bound for name in NOTICEABLE_MS if (bound := _bound_ms(each, name)) is not None})
    ]


def _bound_ms(served: pd.DataFrame, objective: str) -> float | None:
    accounts = accounts_of(served, objective)
    own_ms = accounts[[name for name in accounts if is_own_work(name)]].sum(axis=1)[served[objective].notna()]
    if own_ms.empty:
        return None
    much_ms = float(own_ms.quantile(MUCH_WORK))
    return _round(max(STRETCH * much_ms, much_ms + NOTICEABLE_MS[objective]))


def _round(bound_ms: float) -> float:
    """Up, to two digits."""
    unit = 10.0 ** (math.floor(math.log10(bound_ms)) - 1)
    return round(math.ceil(bound_ms / unit) * unit, 6)
