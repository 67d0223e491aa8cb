"""The normal speed beside a finished run: what `run.json` says of it, and what the run adds to the store.

The reference stands in the run itself, so that a diagnosis needs no other file and says the same everywhere. Where this
machine has none, and requests were late, it is measured once: real steps in a process of its own, after the run.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sojourn.diagnosis.symptoms import TOLERATED_MISSES
from sojourn.metrics.compute.speed_reference import (
    SPEED_SETTINGS,
    SpeedEntry,
    add_entry,
    family_of,
    of_one_process,
    read_entries,
    settings_of,
)
from sojourn.metrics.compute.speed_run import entry_of_run
from sojourn.metrics.request.goodput import judged, measured
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section
from sojourn.metrics.time_limit import TimeLimit

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 120.0  # of the process that measures, with the start of torch and the load of the model
SECONDS, QUICK_SECONDS = 3.0, 1.0  # of measuring alone; quick where a reader waits for the verdict
MOST_OWN, MOST_OTHER = 8, 8  # entries in `run.json`: of the run's own settings, and other settings
# The fastest kernels that compute the same, and all cores: what other settings cost is worth knowing.
FASTEST_KERNELS = {"attention_backend": "auto", "fused_operations": "auto"}
# Formats that a CPU may have in place of the run's: fewer bits, or more where fewer were chosen.
OTHER_FORMATS = {
    "weights": {"float32": "int8", "bfloat16": "int8", "float16": "int8", "int4": "int8"},
    "kv_cache_dtype": {"fp8": "auto", "int8": "auto", "int4": "auto"},
    "dtype": {"bfloat16": "float32", "float16": "float32"},
}


def add_reference(
    run: RunDirectory, *, planted: bool, progress: Callable[[], None] | None, limit: TimeLimit | None = None
) -> None:
    """Writes `speed_reference` into `run.json`, and adds a valid run to the store unless faults were planted.

    `progress` is called where it measures: that takes seconds, and None forbids it. Where the server still runs, and of
    a foreign engine, only earlier runs are the reference. A run without records of steps gets nothing. `run.json`
    says how many settings were not measured because they did not fit into the limit.
    """
    meta = run.meta()
    family, engine = family_of(meta), engine_settings(meta)
    if family is None:
        return
    own, own_settings = entry_of_run(run, meta), settings_of(meta, engine)
    entries, cores = read_entries(family), int(section(meta, "hardware").get("cores") or 0)
    left_out = 0
    if progress is not None and any_late(run, meta):
        progress()
        lacking = _lacking(engine, of_one_process(own_settings), entries, cores)
        measured_now, left_out = measure_within(limit, partial(measure_apart, str(engine["model"])), lacking)
        for found in measured_now:
            add_entry(family, found)
        entries = read_entries(family)
    same = [each for each in entries if each.settings == own_settings][-MOST_OWN:]
    others = _of_other_settings(entries, own_settings)
    told = {"left_out": left_out} if left_out else {}
    run.update_meta(speed_reference={"family": family, "entries": msgspec.to_builtins([*others, *same])} | told)
    if own is not None and meta["valid"] and not planted and not engine.get("faults"):
        add_entry(family, own)


def _of_other_settings(entries: list[SpeedEntry], own: dict[str, Any]) -> list[SpeedEntry]:
    """The last entry of each, those nearest to the run's settings last. Without this rule, several runs of one other
    setting would leave no room for the format that was measured for this run."""
    newest = {repr(sorted(each.settings.items())): each for each in entries if each.settings != own}
    differing = {
        key: sum(own.get(name) != value for name, value in each.settings.items()) for key, each in newest.items()
    }
    return [newest[key] for key in sorted(newest, key=lambda key: -differing[key])][-MOST_OTHER:]


def any_late(run: RunDirectory, meta: dict[str, Any]) -> bool:
    """Whether more requests of some class miss an objective than a healthy run may have."""
    rows = judged(measured(run.requests(), meta), meta.get("objectives") or [])
    return bool(len(rows)) and float(rows.groupby("klass").good.mean().min()) < 1 - TOLERATED_MISSES


def measure_within(
    limit: TimeLimit | None, measure: Callable[[dict[str, Any], float, float], SpeedEntry | None],
    lacking: list[dict[str, Any]],
) -> tuple[list[SpeedEntry], int]:  # fmt: skip
    """The entries of these settings, the first ones first, and how many did not fit into the limit. `measure` takes
    settings, the seconds that it may take, and those of them that it measures."""
    entries, left_out = [], 0
    for settings in lacking:
        left_s = MOST_SECONDS if limit is None else min(MOST_SECONDS, limit.left())
        found = measure(settings, left_s, SECONDS if limit is None else QUICK_SECONDS) if left_s > 0 else None
        if found is not None:
            entries.append(found)
        elif limit is not None and limit.left() <= 0:
            left_out += 1
    return entries, left_out


def measure_apart(model: str, settings: dict[str, Any], within_s: float, seconds: float) -> SpeedEntry | None:
    """An entry for these settings, from a process isolated from PYTHONPATH and from what that may load; None if it
    fails, or is not done within that time."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sojourn.engine.measure_speed import main; main()"
    command = [sys.executable, "-I", "-c", code, json.dumps({"model": model, "settings": settings, "seconds": seconds})]
    try:
        done = subprocess.run(command, capture_output=True, timeout=within_s, check=True)
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=SpeedEntry)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError):
        return None


def _lacking(
    engine: dict[str, Any], own: dict[str, Any], entries: list[SpeedEntry], cores: int
) -> list[dict[str, Any]]:
    """Settings to measure, where no entry has them: those of the run, the fastest that compute the same, and on a CPU
    other formats."""
    options, found = _options(engine), []
    if not any(each.settings == own for each in entries):
        found.append(options)
    fastest = own | FASTEST_KERNELS | {"threads": max(cores, own["threads"] or 0)}
    if own != fastest and not any(each.settings == fastest for each in entries):
        found.append(options | FASTEST_KERNELS | {"threads": fastest["threads"]})
    for name, instead in OTHER_FORMATS.items():
        other = instead.get(str(own[name])) if options["device"] == "cpu" else None
        then = own | {name: other}
        if name == "dtype" and own["weights"] == own["dtype"]:
            then["weights"] = other  # the checkpoint's own: they follow
        if other is not None and not any(each.settings == then for each in entries):
            found.append(options | {name: other})
    return found


def _options(engine: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run as options of an engine: what the server reports of its device is more than an option holds."""
    found = {name: engine[name] for name in (*SPEED_SETTINGS, "load_format") if engine.get(name) is not None}
    found["device"] = "cpu" if engine.get("device") == "cpu" else "auto"
    if found["device"] != "cpu" or found.get("weights") == "bfloat16":  # the checkpoint's own: no option has that name
        found.pop("weights", None)
    return found
