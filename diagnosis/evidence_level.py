"""How much of a run a diagnosis may read: the same rules on less evidence, and what finer records are worth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa

from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import SERVER_KEYS, RunDirectory

Level = Literal["client", "metrics", "requests", "steps", "kernels", "all"]
LEVELS: tuple[Level, ...] = get_args(Level)
# The tables that each level adds to those before it.
_ADDED: Mapping[str, tuple[str, ...]] = {
    "client": ("client",),
    "metrics": ("scrapes", "sensors"),
    "requests": ("requests", "system"),
    "steps": ("steps",),
    "kernels": ("kernels",),
}
# What `run.json` records of a fault that was planted on purpose: a diagnosis finds it by its effects, or not at all.
PLANTED = ("faults", "fault")


def tables_of(level: Level) -> frozenset[str]:
    """The tables that a level may read."""
    if level == "all":
        return frozenset(SCHEMAS)
    upto = LEVELS[: LEVELS.index(level) + 1]
    return frozenset(table for each in upto for table in _ADDED[each])


class EvidenceView(RunDirectory):
    """A run as one level sees it: other tables are empty, and no level sees the record of a planted fault."""

    def __init__(self, run: RunDirectory, level: Level = "all"):
        super().__init__(run.path, run.objectives)
        self.level: Level = level
        self._tables = tables_of(level)

    def meta(self) -> dict[str, Any]:
        meta = _without_plant(super().meta())
        if self.level in ("client", "metrics"):  # the server's own word on itself
            meta = {name: value for name, value in meta.items() if name not in SERVER_KEYS} | {"engine": {}}
        return meta

    def sources(self, table: str) -> list[Path]:
        return super().sources(table) if table in self._tables else []

    def arrow(self, table: str, columns: Sequence[str] = ()) -> pa.Table:
        if table in self._tables:
            return super().arrow(table, columns)
        hidden = SCHEMAS[table].empty_table()
        return hidden.select(list(columns)) if columns else hidden


def view_at_level(run: RunDirectory, level: Level) -> EvidenceView:
    """The run as this level sees it."""
    return EvidenceView(run, level)


def _without_plant(content: Any) -> Any:
    """At any depth: a scenario repeats the settings of its engine, and so does what the server says of itself."""
    if not isinstance(content, dict):
        return content
    return {name: _without_plant(value) for name, value in content.items() if name not in PLANTED}
