"""Which runs beside a run repeat it. Whoever reads a neighbour of a run reads it through this file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sojourn.metrics.compare.samples import RunSamples, same_schedule, samples_from
from sojourn.metrics.compare.settings import effective_settings, identity, states_settings
from sojourn.metrics.errors import SojournError
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.replay.verdict.changed import changed_settings

MOST_REPEATS = 8
MOST_NEIGHBOURS = 200  # in a folder


def repeats_of(run: RunDirectory, meta: Mapping[str, Any], rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The measured requests of each run in the folder of this one that repeats it; `rows` are its own."""
    found = 0
    for file in sorted(Path(run.path).resolve().parent.glob("*/run.json"))[:MOST_NEIGHBOURS]:
        if file.parent == run.path.resolve() or found >= MOST_REPEATS:
            continue
        try:
            other = RunDirectory.open(file.parent)
            other_meta = other.meta()
            if not may_repeat(meta, other_meta):
                continue
            its = measured(other.requests(), other_meta)
            if _sent_alike(meta, samples_from(run, rows, []), samples_from(other, its, [])):
                found += 1
                yield its
        except (SojournError, OSError, KeyError, ValueError):  # another run that cannot be read tells nothing
            continue


def may_repeat(meta: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a run was made as another one: load, seed, settings, model, machine and versions are known and the same.
    A run that is not valid repeats nothing, and settings that nobody knows are not the same."""
    if other.get("valid") is False or meta.get("seed") != other.get("seed"):
        return False
    alike = (_load, _model, _versions, _fleet)
    return (
        all(part(meta) == part(other) for part in alike)
        and states_settings(dict(meta))
        and states_settings(dict(other))
        and not changed_settings(meta, other)
    )


def _load(meta: Mapping[str, Any]) -> Any:
    """And the machine. With the description: a planted network or neighbour is in no setting, but its case says so."""
    scenario = {name: value for name, value in section(meta, "scenario").items() if name not in ("name", "engine")}
    return identity(dict(meta)), scenario


def _model(meta: Mapping[str, Any]) -> Any:
    """One name may be served from several checkpoints."""
    return meta.get("model_shape"), section(section(meta, "engine"), "served").get("root")


def _versions(meta: Mapping[str, Any]) -> Any:
    return meta.get("server_versions") or meta.get("versions")


def _fleet(meta: Mapping[str, Any]) -> Any:
    """The settings of each server, in their order."""
    members = meta.get("servers") or []
    return [effective_settings({"engine": {"served": section(each, "served")}}) for each in members]


def _sent_alike(meta: Mapping[str, Any], run: RunSamples, other: RunSamples) -> bool:
    """A closed loop sends when the server answers."""
    return section(meta, "arrivals").get("loop") == "closed" or same_schedule(run, other)
