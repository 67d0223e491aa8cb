"""Reads the tables of a run into the richest kind of evidence that they hold."""

import math
from collections import Counter
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd

from sojourn.diagnosis.chunk_facts import Chunks, chunks_of
from sojourn.diagnosis.evidence.accounts import Work
from sojourn.diagnosis.evidence.client import Arrivals, Client, declared_classes
from sojourn.diagnosis.evidence.means import Means
from sojourn.diagnosis.evidence.records import Records
from sojourn.diagnosis.evidence_level import EvidenceView, Level, view_at_level
from sojourn.diagnosis.fleet_facts import fleet_facts
from sojourn.diagnosis.kv_facts import KvFacts, kv_facts
from sojourn.diagnosis.launch_facts import launches_of
from sojourn.diagnosis.memory_facts import prefix_use
from sojourn.diagnosis.sensor_facts import Flight, SensorFacts, flight_of, sensor_facts, steal_of
from sojourn.diagnosis.stall_facts import stall_facts
from sojourn.diagnosis.step_facts import StepFacts, step_facts
from sojourn.diagnosis.stop_facts import NO_STOPS, Stops, stops_of
from sojourn.interop.sources.gain import gain_of_run
from sojourn.interop.sources.looks import looks_of
from sojourn.interop.sources.pressure import RUNNING, WAITING
from sojourn.interop.sources.view import ServerView, observe, timeline
from sojourn.metrics.compute.group_facts import group_facts
from sojourn.metrics.compute.machine_facts import machine_facts
from sojourn.metrics.compute.speed_facts import speed_facts
from sojourn.metrics.machine.steal import steal_within
from sojourn.metrics.request.goodput import judged, measured, measured_steps, window_ns
from sojourn.metrics.request.offenders import Book, TooLarge, book_of
from sojourn.metrics.request.waits import reasons
from sojourn.metrics.results.load import is_closed
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section, server_hardware
from sojourn.metrics.run.fleet import servers_of, siblings_of
from sojourn.metrics.run.server_alone import is_server_alone, meta_of, requests_of

MOST_STRETCHES, STRETCH_GAPS = 8, 25  # of a run, each with at least so many gaps
FEWEST_FOR_A_RATE = 10  # requests: a rate of fewer is good to a third at best
UNDER_WAY = "step"  # of a request's waits: it came while a step was computed, which no setting could have spared it


def read_evidence(run: RunDirectory, level: Level = "all") -> Client:
    """As much as the tables hold that a level allows: `Records`, else `Means` of the server's metrics, else `Client`.
    Empty tables, missing tables and a run under way are all fine."""
    run = view_at_level(run, level)
    meta = meta_of(run)
    requests = requests_of(run, run.meta())
    rows = judged(measured(requests, meta), meta.get("objectives") or [])
    steps = measured_steps(run.table("steps"), rows)
    known = _client(run, meta, rows, steps)
    members = servers_of(run)
    joined = int(rows[rows.status == "ok"].arrived_ns.notna().sum())
    server = observe(run, requests, rows) if not joined else None
    by_metrics = {"server": server, "batch_gain": gain_of_run(run) if not joined else None}
    known["stops"] = cache(lambda: _stops(run, known, server))
    if joined or len(steps) or members:
        servers = {member.name: cache(partial(read_evidence, member, level)) for member in members}
        return Records(**known, **by_metrics, **_records(run, meta, rows, steps, joined), servers=servers)
    return Client(**known) if server is None else Means(**known, **by_metrics)


def _client(run: EvidenceView, meta: dict[str, Any], rows: pd.DataFrame, steps: pd.DataFrame) -> dict[str, Any]:
    """The fields of Client."""
    system, span = run.table("system"), window_ns(rows)
    sensors = _sensors(run, meta, rows, span)
    served, unserved = rows[rows.status == "ok"], rows[rows.status != "ok"]
    gaps = np.diff(np.sort(rows.due_ns.to_numpy(dtype="float64"))) if len(rows) > 2 else np.array([])
    own_gaps = len(gaps) > 2 and not is_closed(meta)  # in a closed loop they are the server's too
    lag = (rows.sent_ns.astype("float64") - rows.due_ns.astype("float64")).dropna() / 1e6
    scenario = meta.get("scenario")
    chosen = meta.get("engine") if isinstance(meta.get("engine"), dict) else {}
    return {
        "name": run.name,
        "path": str(run.path),
        "scenario": str(scenario.get("name", "SCENARIO") if isinstance(scenario, dict) else scenario or "SCENARIO"),
        "meta": meta,
        "objectives": meta.get("objectives") or [],
        "engine": engine_settings(meta),
        "chosen": frozenset(name for name, value in chosen.items() if name != "served" and value is not None),
        "rows": rows,
        "sent": len(rows),
        "served": len(served),
        "errors": {str(name): int(n) for name, n in unserved.error.fillna(unserved.status).value_counts().items()},
        "offered_rps": float(len(gaps) / (gaps.sum() / 1e9)) if gaps.sum() > 0 else math.nan,
        "arrivals": _arrivals(gaps) if own_gaps and gaps.mean() > 0 else None,
        "lag_p90_ms": float(lag.quantile(0.9)) if len(lag) else None,
        "served_rps": _served_rps(rows, served),
        "declared_shared_share": _declared_shared_share(meta),
        "scraped": bool(run.sources("scrapes")),
        "level": run.level,
        "measured_by": "server" if is_server_alone(run, run.meta()) else "client",
        "steal": (steal_within(system, *span) if span else None) or steal_of(sensors),
        "sensors": sensors,
        "machine": machine_facts(meta, system, steps, rows, span, _siblings(run, meta)),
    }


def _sensors(
    run: EvidenceView, meta: dict[str, Any], rows: pd.DataFrame, span: tuple[int, int] | None
) -> SensorFacts | None:
    """While requests of this client were under way; without a client, while the server's gauges show some."""
    shown, are_all = run.table("sensors"), not section(meta, "sensors").get("devices_named", False)
    if not len(shown):
        return None
    if span is None:
        return sensor_facts(shown, _flight_of_gauges(run), are_all=are_all)
    sent = rows[rows.sent_ns.notna()]
    ends = sent.last_byte_ns.fillna(sent.sent_ns)
    flight = flight_of(sent.sent_ns.to_numpy("int64"), ends.to_numpy("int64"))
    within = shown[shown.ns.between(*span)]
    return sensor_facts(within, flight, are_all=are_all)


def _flight_of_gauges(run: EvidenceView) -> Flight | None:
    shown = timeline(run)
    if RUNNING not in shown:
        return None
    counts = shown[[name for name in (RUNNING, WAITING) if name in shown]].fillna(0.0).sum(axis=1)
    return Flight(counts.index.to_numpy("int64"), counts.to_numpy("float64"))


def _records(
    run: EvidenceView, meta: dict[str, Any], rows: pd.DataFrame, steps: pd.DataFrame, joined: int
) -> dict[str, Any]:
    """The fields of Records, but for those of Client, the metrics and the servers of a fleet."""
    served, found = rows[rows.status == "ok"], step_facts(steps)
    return {
        "waits": _waits(rows, found),
        "prefix": prefix_use(served),
        "work": _work(served),
        "cached_share": _cached_share(served),
        "joined": joined,
        "steps": found,
        "device_busy": _device_busy(rows, steps),
        "chunks": _chunks(steps, served, meta),
        "launches": launches_of(meta, steps),
        "book": cache(lambda: _book(run)),
        "speed": cache(lambda: speed_facts(meta, steps, rows)),
        "kv": cache(lambda: _kv(run, meta) if joined else None),
        "stalls": cache(lambda: stall_facts(run.arrow("steps"), run.table("system"), _cores(meta))),
        "group": cache(lambda: group_facts(meta, steps)),
        "fleet": cache(lambda: fleet_facts(run, rows, run.level)),
    }


def _stops(run: EvidenceView, known: dict[str, Any], server: ServerView | None) -> Stops:
    """None without a client: it takes the times of its texts."""
    if known["measured_by"] == "server" or not known["scraped"]:
        return NO_STOPS
    hits = server.hit_rate if server is not None else _cached_share(known["rows"])
    return stops_of(known["rows"], looks_of(run), hits or 0.0)


def _kv(run: EvidenceView, meta: dict[str, Any]) -> KvFacts | None:
    return kv_facts(engine_settings(meta), section(meta, "core"), run.table("requests"), run.table("steps"))


def _cores(meta: dict[str, Any]) -> int:
    return int(server_hardware(meta).get("cores") or 1)


def _siblings(run: RunDirectory, meta: dict[str, Any]) -> list[pd.DataFrame]:
    """The samples of the fleet's other servers that ran on the same machine."""
    boot = server_hardware(meta).get("boot_id")
    return [
        member.table("system") for member in siblings_of(run, meta)
        if boot is not None and server_hardware(member.meta()).get("boot_id") == boot
    ]  # fmt: skip


def _arrivals(gaps_ns: np.ndarray) -> Arrivals:
    stretches = np.array_split(gaps_ns, np.clip(len(gaps_ns) // STRETCH_GAPS, 1, MOST_STRETCHES))
    around = np.concatenate([stretch / (stretch.mean() or 1.0) for stretch in stretches])
    return Arrivals(
        cv=float(gaps_ns.std() / gaps_ns.mean()), local_cv=float(around.std()),
        peak_rps=max(len(stretch) / (stretch.sum() / 1e9 or math.inf) for stretch in stretches),
    )  # fmt: skip


def _chunks(steps: pd.DataFrame, served: pd.DataFrame, meta: dict[str, Any]) -> Chunks | None:
    known = served[served.server_prompt_tokens.notna()]
    prompts = dict(zip(known.request_id, known.server_prompt_tokens.astype("int64"), strict=True))
    return chunks_of(steps, prompts, engine_settings(meta))


def _served_rps(rows: pd.DataFrame, served: pd.DataFrame) -> float | None:
    """Served requests over the whole span of the run: what the server can do at least, since it may have idled."""
    span = window_ns(rows)
    if span is None or len(served) < FEWEST_FOR_A_RATE:
        return None
    return len(served) / max((span[1] - span[0]) / 1e9, 1e-9)


def _book(run: RunDirectory) -> Book | None:
    """None also where a run is too large for it: findings then name no offenders."""
    try:
        return book_of(run)
    except TooLarge:
        return None


def _device_busy(rows: pd.DataFrame, steps: pd.DataFrame) -> float | None:
    """Device time / time in which at least one request was inside the server, between its arrival and its finish."""
    spans = rows[["arrived_ns", "finished_ns"]].dropna().sort_values("arrived_ns").to_numpy(dtype="float64")
    if not len(steps) or not len(spans):
        return None
    present, end = 0.0, -np.inf
    for begin, until in spans:
        present += max(0.0, until - max(begin, end))
        end = max(end, until)
    inside = (steps.begin_ns < end) & (steps.end_ns > spans[0][0])
    return float(min(1.0, steps.device_ns[inside].sum() / present)) if present > 0 else None


def _declared_shared_share(meta: dict[str, Any]) -> float:
    shared = total = 0.0
    for klass in declared_classes(meta):
        length = klass.get("prompt_tokens") or 0
        if isinstance(length, dict):  # a distribution: its middle is near enough for a share
            bounds = [length.get(name) or 0 for name in ("min_tokens", "max_tokens")]
            length = length.get("tokens") or length.get("median_tokens") or sum(bounds) / 2
        weight = klass.get("weight") or 1.0
        shared += weight * min(klass.get("shared_prefix_tokens") or 0, length)
        total += weight * length
    return shared / total if total else 0.0


def _cached_share(served: pd.DataFrame) -> float | None:
    prompt = served.server_prompt_tokens.astype("float64")
    cached = served.server_cached_tokens.astype("float64")
    known = prompt.notna() & cached.notna() & (prompt > 0)
    return float(cached[known].sum() / prompt[known].sum()) if known.any() else None


def _work(served: pd.DataFrame) -> Work | None:
    rows = served[served.server_prompt_tokens.notna() & (served.server_output_tokens.astype("float64") > 0)]
    if not len(rows):
        return None
    prompt, output = rows.server_prompt_tokens.astype("float64"), rows.server_output_tokens.astype("float64")
    return Work(
        prompt_tokens=float(prompt.mean()),
        computed_tokens=float((prompt - rows.server_cached_tokens.astype("float64").fillna(0)).clip(lower=1).mean()),
        output_tokens=float(output.mean()),
        context_tokens=float(((prompt + output / 2) * output).sum() / output.sum()),
    )


def _waits(rows: pd.DataFrame, steps: StepFacts | None) -> dict[str, float]:
    """As the scheduler booked it for each request; where an older run has no such column, what the steps refused."""
    booked: Counter[str] = Counter()
    for cell in rows.waits:
        booked.update(reasons(cell))
    del booked[UNDER_WAY]
    total = booked.total()
    if total > 0:
        return {reason: ns / total for reason, ns in booked.items()}
    return steps.waits if steps is not None else {}
