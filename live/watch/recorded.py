"""The window of a watch as a run directory, and its diagnosis: what was seen can be opened again."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.repeat import LOOPBACK
from sojourn.diagnosis.verdict import Diagnosis, State
from sojourn.interop.sources.scrapes import UP
from sojourn.live.watch.devices import Devices
from sojourn.live.watch.document import State as WatchState
from sojourn.live.watch.document import WatchedServer
from sojourn.live.watch.observer import WINDOW_S, Observer
from sojourn.live.watch.periods import periods
from sojourn.live.watch.steady import WALL_NS
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.machine.host import hardware
from sojourn.metrics.prediction import Predictor
from sojourn.metrics.run.directory import RunDirectory, section, wall_anchor
from sojourn.metrics.run.segments import write_segment
from sojourn.metrics.time_limit import TimeLimit

BY_A_WATCH = "recorded by a watch: scrapes of a live server, and no request"
READ = "read from a log or from pages of /metrics: figures of a server, and no request"
STATES: dict[WatchState, State] = {
    "healthy": "healthy", "idle": "healthy", "degraded": "degraded", "overloaded": "overloaded", "stuck": "stuck",
    "cannot tell": "inconclusive", "unreachable": "inconclusive",
}  # fmt: skip
KEPT_S = 3600.0


def record(observer: Observer, folder: Path) -> Path:
    """Writes the window below a folder of runs, and returns its run directory. Raises RunDataError."""
    answered = observer.window.answered
    if len(answered) < 2:
        raise RunDataError("two scrapes must have been answered before there is something to record")
    path = folder / f"live-{time.strftime('%Y%m%d-%H%M%S')}"
    meta = recorded_meta(observer.url, observer.objectives, is_wall_clock=answered[-1].ns >= WALL_NS)
    return write_series(path, observer.window.rows(answered[0].ns), meta).path


def write_series(path: Path, rows: Sequence[dict[str, Any]], meta: dict[str, Any]) -> RunDirectory:
    """Rows of the table `scrapes` as a run directory with its diagnosis. Raises RunDataError."""
    try:
        run = RunDirectory.create(path, meta)
        write_segment(run.path, "scrapes", list(rows), f"{time.time_ns():020d}-{os.getpid()}")
        run.compact()
        run.write_json("diagnosis.json", msgspec.to_builtins(diagnose_recorded(run)))
    except (OSError, pa.ArrowException) as error:
        raise RunDataError(f"{path} cannot be written: {error}") from None
    return run


def recorded_meta(url: str, objectives: Mapping[str, float], is_wall_clock: bool) -> dict[str, Any]:
    """What run.json says of scrapes alone. `is_wall_clock`: their moments are ns since 1970.

    The hardware is that of this machine, so it is the server's only where the address is one of this machine's own."""
    is_here = not is_wall_clock and urlsplit(url).hostname in LOOPBACK
    return {
        "scenario": {"name": "watch", "description": "whatever clients sent"},
        "seed": None,
        "engine": {"base_url": url},
        "hardware": hardware() if is_here else None,
        "versions": {},
        "wall_anchor": _same_clock() if is_wall_clock else wall_anchor(),
        "objectives": [{"klass": "all", "source": "--slo", **objectives}] if objectives else [],
        "client_error": None,
        "valid": False,
        "invalid_reasons": [BY_A_WATCH],
    }


def _same_clock() -> dict[str, int]:
    """The anchor of scrapes of a Prometheus: their moments are ns since 1970."""
    now_ns = time.time_ns()
    return {"monotonic_ns": now_ns, "unix_ns": now_ns}


def diagnose_recorded(
    run: RunDirectory, against: RunDirectory | None = None, predictor: Predictor | None = None,
    limit: TimeLimit | None = None,
) -> Diagnosis:  # fmt: skip
    """The diagnosis of any run; of one that a watch recorded, the verdict of the watch. Raises RunDataError."""
    found = diagnose(run, against, predictor=predictor, limit=limit)
    reason = next((each for each in run.meta().get("invalid_reasons") or () if each in (BY_A_WATCH, READ)), None)
    if reason is None:
        return found
    if reason == READ:
        watched, headline, notes = _read(run)
    else:
        watched = _watched(run)
        headline, notes = watched.headline, []
    return msgspec.structs.replace(
        found, state=STATES[watched.state], headline=headline, findings=watched.findings, server=watched.view,
        devices=watched.devices, warnings=[reason, *notes, *watched.warnings, *watched.unknown], level="metrics",
        bottleneck=watched.findings[0].lifecycles[0] if watched.findings else None,
    )  # fmt: skip


def _read(run: RunDirectory) -> tuple[WatchedServer, str, list[str]]:
    """Of a log or of pages: the worst period, its headline with the times, and what the file cannot show."""
    table, meta = run.table("scrapes"), run.meta()
    rows = [
        {"ns": int(ns), "name": name, "labels": labels, "value": value}
        for ns, name, labels, value in zip(table["ns"], table["name"], table["labels"], table["value"], strict=True)
    ]
    found = periods(rows, run.name, _bounds(meta))
    if found is None:
        raise RunDataError(f"{run.path} has scrapes of one moment only, so nothing can be said over time")
    when, imported = found.when(), meta.get("imported") or {}
    notes = [str(each) for each in (*imported.get("notes", ()), *imported.get("unseen", ()))]
    headline = f"{found.worst.headline} ({when})" if when else found.worst.headline
    capped = imported.get("capped", "")
    return found.worst, f"{headline}; {capped}" if capped and found.bad else headline, notes


def _bounds(meta: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for entry in meta["objectives"] or ()
        for name, value in entry.items()
        if name.endswith("_ms") and value is not None
    }


def _watched(run: RunDirectory) -> WatchedServer:
    meta = run.meta()
    url = str((meta.get("engine") or {}).get("base_url", ""))
    scrapes = run.table("scrapes")
    is_window = scrapes.ns.max() - scrapes.ns.min() < 2 * WINDOW_S * 1e9  # of a watch, and no record of hours
    sensors, named = run.table("sensors"), section(meta, "sensors").get("devices_named", False)
    devices = Devices(lambda begin, end: sensors[sensors.ns.between(begin, end)], are_all=not named)
    observer = Observer(url, run.name, _bounds(meta), window_s=KEPT_S, is_now=is_window,
                        devices=devices)  # fmt: skip
    for ns, group in scrapes.groupby("ns"):
        rows = [
            {"ns": int(ns), "name": name, "labels": list(labels.items()), "value": value}
            for name, labels, value in zip(group["name"], group["labels"], group["value"], strict=True)
        ]
        if any(row["name"] != UP for row in rows):
            observer.add(int(ns), rows)
        else:
            observer.add_failure(int(ns), "a scrape failed")
    return observer.watched()
