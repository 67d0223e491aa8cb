"""A run as a filter leaves it: its tables, and the figures of its diagnosis that are sums over requests."""

from dataclasses import replace

import msgspec

from sojourn.diagnosis.shares import by_lifecycle
from sojourn.metrics.request.goodput import class_goodput, judged
from sojourn.metrics.results.replicas import fleet_view
from sojourn.metrics.results.summary import Results, results
from sojourn.metrics.run.directory import RunDirectory
from sojourn.ui.filters import RunFilter
from sojourn.ui.run_data import RunData, once_made
from sojourn.ui.tables.request import accounts_ms


def narrowed(run: RunData, chosen: RunFilter) -> RunData:
    """The run with what passes. State, findings, warnings and closure stay those of the whole run."""
    objectives = run.meta.get("objectives")
    requests = chosen.requests(run.requests, objectives, run.begin_ns).reset_index(drop=True)
    of_requests = chosen.of_requests() or chosen.from_s is not None or chosen.to_s is not None
    return replace(
        run,
        key=f"{run.key} {sorted(chosen.query().items())}",
        requests=requests,
        open_steps=once_made(lambda: chosen.steps(run.steps, requests, run.begin_ns)),
        system=chosen.during(run.system, run.system.ns, run.begin_ns),
        server=chosen.during(run.server, run.server.index.to_series(), run.begin_ns),
        fleet=fleet_view(RunDirectory(run.path), requests) or run.fleet if run.fleet is not None and of_requests
        else run.fleet,
        diagnosis=_diagnosis(run, chosen, requests) if of_requests else run.diagnosis,
        sent=len(run.requests),
        extremes=None if run.extremes is None else chosen.requests(run.extremes, objectives, run.begin_ns),
    )  # fmt: skip


def results_of(run: RunData) -> Results | None:
    """What a client measured of the requests that pass; None where nobody knows."""
    if run.diagnosis is None or run.diagnosis.results is not None or not 0 < len(run.requests) < run.sent:
        return None if run.diagnosis is None else run.diagnosis.results
    return results(judged(run.requests, run.meta.get("objectives")), run.meta)


def _diagnosis(run: RunData, chosen: RunFilter, requests):
    if run.diagnosis is None:
        return None
    objectives = run.meta.get("objectives")
    whole = run.diagnosis.goodput[0].window if run.diagnosis.goodput else None
    seconds = whole.seconds if whole is not None else None
    if seconds is not None and (chosen.from_s is not None or chosen.to_s is not None):
        seconds = min(chosen.to_s if chosen.to_s is not None else seconds, seconds) - max(chosen.from_s or 0.0, 0.0)
    booked = accounts_ms(requests)
    total = float(booked.to_numpy().sum())
    shares = (booked.sum() / total).to_dict() if total > 0 else {}
    return msgspec.structs.replace(
        run.diagnosis,
        goodput=class_goodput(requests, objectives, seconds) if len(requests) else [],
        ledger_share=shares,
        lifecycle_share=by_lifecycle(shares),
        results=run.diagnosis.results if len(requests) == len(run.requests) else None,  # `results_of` makes them
    )
