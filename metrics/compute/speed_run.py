"""A recorded run as an entry of the speed reference."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from sojourn.metrics.compute.cost_model import shape_from
from sojourn.metrics.compute.speed_reference import Line, SpeedEntry, fit_entry, line, settings_of
from sojourn.metrics.request.goodput import measured, measured_steps
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section
from sojourn.metrics.steps import rows_of

FEWEST_REQUESTS = 10  # for the cost of a text


def identity_of(meta: Mapping[str, Any]) -> int:
    """What tells this run from all others."""
    return int(section(meta, "wall_anchor").get("unix_ns") or 0)


def entry_of_run(run: RunDirectory, meta: dict[str, Any]) -> SpeedEntry | None:
    """None for a run without enough steps of our own engine."""
    shape = shape_from(meta)
    if shape is None or not meta.get("core"):
        return None
    rows = measured(run.requests(), meta)
    described = {
        "name": run.name, "identity": identity_of(meta), "settings": settings_of(meta, engine_settings(meta)),
        "measured_at": datetime.fromtimestamp(identity_of(meta) / 1e9, UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    return fit_entry(shape, rows_of(measured_steps(run.table("steps"), rows)), **described, **text_costs(rows))


def text_costs(rows: pd.DataFrame) -> dict[str, Line | None]:
    """What the front's own work for a request cost: encoding by characters, the others by output tokens."""
    output = "server_output_tokens" if "server_output_tokens" in rows else "output_tokens"
    units = {"encoding": "prompt_characters", "decoding": output, "writing": output}
    return {name: _cost(rows, f"{name}_ns", column) for name, column in units.items()}


def _cost(rows: pd.DataFrame, spent: str, units: str) -> Line | None:
    known = rows[[spent, units]].dropna().astype("float64")
    known = known[(known[spent] > 0) & (known[units] > 0)]
    if len(known) < FEWEST_REQUESTS:
        return None
    return line(known[units].to_numpy(), known[spent].to_numpy())
