"""A run directory: the product's document. Creates it, reads it, also while the run is going on."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from sojourn.metrics.compute.cost_model import ModelShape, shape_from
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import ACCOUNTS, SERVER_ACCOUNTS, Account
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.front_turns import with_front_turns
from sojourn.metrics.run.routing import with_routing
from sojourn.metrics.run.segments import compact, read_segment, schema_of, sources
from sojourn.metrics.whole_file import write_whole

if TYPE_CHECKING:
    import pandas as pd

# What `run.json` has from the server, once its model is loaded: the ModelShape, how the core computes, the measured
# ceilings of its device, where the time of its starts went, and what several models of a front were.
SERVER_KEYS = ("model_shape", "core", "ceilings", "startups", "models")
STALL = f"ledger_{ACCOUNTS[Account.COMPUTE_STALL].column}"
REPORT, OLD_REPORT = "report.html", "report.old.html"
# Every key of `run.json` that readers rely on, its types and their words. Each may be null: not known.
REQUIRED: dict[str, tuple[tuple[type, ...], str]] = {
    "scenario": ((dict, str), "an object, or a name"),
    "seed": ((int,), "a whole number"),
    "engine": ((dict,), "an object"),
    "hardware": ((dict,), "an object"),
    "versions": ((dict,), "an object"),
    "wall_anchor": ((dict,), "an object"),
    "objectives": ((list,), "a list of objects"),
    "client_error": ((dict,), "an object"),
    "valid": ((bool,), "true or false"),
}


class RunDirectory:
    """One run: `run.json` and its tables. Reading never writes, and takes what is whole of segments as they come.

    `objectives`, where they are given, stand in for those of `run.json`: a reader judges the run by bounds of its own.
    """

    def __init__(self, path: Path | str, objectives: Sequence[Mapping[str, Any]] | None = None):
        self.path = Path(path)
        self.objectives = objectives

    @classmethod
    def create(cls, path: Path | str, meta: dict[str, Any]) -> "RunDirectory":
        """Makes the folder and `run.json`. Raises RunDataError if a run lives there already or `meta` lacks a key."""
        run = cls(path)
        if (run.path / "run.json").exists():
            raise RunDataError(f"{run.path} already holds a run; choose another folder, or remove it first")
        missing = [key for key in REQUIRED if key not in meta]
        if missing:
            raise RunDataError(f"run.json lacks {', '.join(missing)}")
        run.path.mkdir(parents=True, exist_ok=True)
        run.write_json("run.json", meta)
        return run

    @classmethod
    def open(cls, path: Path | str, objectives: Sequence[Mapping[str, Any]] | None = None) -> "RunDirectory":
        run = cls(path, objectives)
        if not run.path.is_dir():
            raise RunDataError(f"{run.path} is not a folder; give the path of a run directory, such as runs/demo")
        run.meta()
        return run

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def meta(self) -> dict[str, Any]:
        """What `run.json` says. Raises RunDataError where it is not what a run writes."""
        meta = self._written_meta()
        return meta if self.objectives is None else meta | {"objectives": list(self.objectives)}

    def _written_meta(self) -> dict[str, Any]:
        file = self.path / "run.json"
        try:
            meta = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunDataError(f"{self.path} holds no run.json, so it is not a run directory") from None
        except OSError as error:
            raise RunDataError(f"{file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise RunDataError(f"{file} is not UTF-8 text; restore it, or measure again") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise RunDataError(f"{file} is not JSON: {error}") from None
        if fault := _fault(meta):
            raise RunDataError(f"{file}: {fault}; restore the file, or measure again")
        return meta

    def update_meta(self, **changes: Any) -> None:
        self.write_json("run.json", self._written_meta() | changes)

    def write_json(self, name: str, content: Any) -> Path:
        """Writes a document such as `diagnosis.json`, all or nothing."""
        text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False, default=str)
        return write_whole(self.path / name, text + "\n")

    def current_diagnosis(self) -> Path | None:
        """Its `diagnosis.json`; None where there is none, or requests were recorded since it was made."""
        file = self.path / "diagnosis.json"
        segments = (each for table in ("requests", "client") for each in (self.path / f"{table}.parts").glob("*"))
        try:
            made_ns = file.stat().st_mtime_ns
            return None if any(segment.stat().st_mtime_ns > made_ns for segment in segments) else file
        except FileNotFoundError:  # there is none, or a segment was compacted just now
            return None

    def set_report_aside(self) -> None:
        """`report.html` shows what `diagnosis.json` says: before that changes, it gets another name."""
        if (report := self.path / REPORT).exists():
            report.replace(self.path / OLD_REPORT)

    def sources(self, table: str) -> list[Path]:
        return sources(self.path, table)

    def table(self, table: str) -> "pd.DataFrame":
        """All rows of one of the tables of `records.tables.SCHEMAS`, with all its columns.

        A column is null where a run of an older version lacks it. The table is empty where nothing was recorded.
        """
        return frame_of(self.arrow(table))

    def arrow(self, table: str, columns: Sequence[str] = ()) -> pa.Table:
        """The same as Arrow, which keeps a million lists flat. With `columns` no others are read.

        Requests have the time in which the engine stood still in `compute.stall`: see `metrics.request.stalls`."""
        rows = self._recorded(table, columns)
        if table != "requests" or not len(rows) or not _booked(rows.column_names):
            return rows
        from sojourn.metrics.request.stalls import COLUMNS, stalled  # takes pandas

        return self._without_stalls(columns) if len(stalled(self.arrow("steps", COLUMNS))[0]) else rows

    def _without_stalls(self, columns: Sequence[str]) -> pa.Table:
        from sojourn.metrics.request.stalls import without_stalls

        rows = self._recorded("requests")
        if (rows[STALL].fill_null(0).to_numpy() > 0).any():  # rows that were read like this, and written again
            return rows.select(list(columns)) if columns else rows
        moved = without_stalls(frame_of(rows), self.arrow("steps"), _shape(self.meta()))
        for name in _booked(rows.column_names):
            values = [list(cell.items()) for cell in moved[name]] if name == "waits" else moved[name]
            rows = rows.set_column(
                rows.column_names.index(name), name, pa.array(values, rows.schema.field(name).type, from_pandas=True)
            )
        return rows.select(list(columns)) if columns else rows

    def _recorded(self, table: str, columns: Sequence[str] = ()) -> pa.Table:
        try:
            try:
                parts = [read_segment(file, table, columns) for file in self.sources(table)]
            except FileNotFoundError:  # compacted meanwhile: by now the whole stands under its name
                parts = [read_segment(file, table, columns) for file in self.sources(table)]
        except (pa.ArrowException, OSError, ValueError) as error:  # a damaged name of a column is not UTF-8
            raise RunDataError(f"{self.path}: table {table} cannot be read: {error}") from None
        return pa.concat_tables(parts) if parts else schema_of(table, columns).empty_table()

    def compact(self) -> None:
        """Makes one file of each table's segments. Only for the process that wrote them, after its last write."""
        for table in SCHEMAS:
            compact(self.path, table)

    def requests(self, client: "pd.DataFrame | None" = None, server: "pd.DataFrame | None" = None) -> "pd.DataFrame":
        """One row a request that was due, client and server joined by `request_id`, in order of `due_ns`.

        Columns: those of `client` and of `requests` (the server's share of a common name as `server_<name>`), the
        client's accounts `ledger_client_*` and `ttft_client_*`, `unaccounted_ns`, `ttft_unaccounted_ns` (what no
        account explains), and in milliseconds `ttft_ms` and `e2e_ms` (from the intended send), and `tpot_ms`: from the
        first read with text to the last, a token that came after the first read. NaN where the request has none: not
        served, one token, or all tokens in one read, so that no client could see how fast they were made.
        `front_turns_ns` is the part of the way in that was spent in the server's socket: see `with_front_turns`.
        `client` and `server` stand in for the run's own tables `client` and `requests`.
        """
        client = self.table("client") if client is None else client
        server = self.table("requests") if server is None else server
        client = client.drop_duplicates("request_id")  # parsed under way and again at the end, for a moment
        clash = {name: f"server_{name}" for name in server.columns if name in client.columns and name != "request_id"}
        server = server.rename(columns=clash).drop_duplicates("request_id", keep="last")
        joined = client.merge(server, on="request_id", how="left").sort_values("due_ns", ignore_index=True)
        return with_latencies(self._with_way_in(_with_client_accounts(joined)))

    def _with_way_in(self, joined: "pd.DataFrame") -> "pd.DataFrame":
        """With the time between send and arrival booked to the front's loop of each server, and to a router."""
        if not joined.server.notna().any():
            return with_front_turns(joined, self.table("system"))
        import pandas as pd  # takes a third of a second, which a server need not wait for

        meta = self.meta()
        fronts = {entry["name"]: RunDirectory(self.path / entry["name"]) for entry in meta.get("servers") or []}
        parts = [
            with_front_turns(rows.copy(), fronts.get(name, self).table("system"))
            for name, rows in joined.groupby("server", dropna=False, sort=False)
        ]
        return with_routing(pd.concat(parts).sort_index(), meta)


def _booked(columns: Sequence[str]) -> list[str]:
    """The columns of a ledger among these."""
    return [name for name in columns if name == "waits" or name.startswith(("ledger_", "ttft_"))]


def _shape(meta: dict[str, Any]) -> ModelShape | None:
    """None of a model of another version: tokens stand in."""
    try:
        return shape_from(meta)
    except msgspec.ValidationError:
        return None


def frame_of(rows: pa.Table) -> "pd.DataFrame":
    """A table as a frame with Python objects for lists and maps, and whole numbers that stay whole beside nulls."""
    import pandas as pd  # a third of a second, which a server that only records need not spend

    frame = rows.to_pandas(maps_as_pydicts="strict")
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if pa.types.is_integer(field.type) and 0 < column.null_count < len(column):
            # As floats, which pandas takes for nulls, nanoseconds would be rounded from 104 days on.
            frame[field.name] = column.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame


def _fault(meta: Any) -> str | None:
    """What is wrong with the content of a `run.json`: which field has which value, and what it should be."""
    if not isinstance(meta, dict):
        return f"it holds {_shown(meta)}, but should be an object with {', '.join(REQUIRED)}"
    for key, (kinds, should_be) in REQUIRED.items():
        if key not in meta:
            return f"`{key}` is missing; it should be {should_be}"
        if meta[key] is not None and not isinstance(meta[key], kinds):
            return f"`{key}` is {_shown(meta[key])}; it should be {should_be}"
    for position, objective in enumerate(meta["objectives"] or ()):
        place = f"`objectives[{position}]"
        if not isinstance(objective, dict):
            return f"{place}` is {_shown(objective)}; it should be an object with bounds such as ttft_ms"
        for name, bound in objective.items():
            if name.endswith("_ms") and bound is not None and not _is_bound(bound):
                return f"{place}.{name}` is {_shown(bound)}; it should be a number above 0, or null"
    return None


def _is_bound(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _finite(content: Any) -> Any:
    """The same with null for NaN and infinity, which JSON has not."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def section(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object of that name in `run.json`, or in an object of it; {} where there is none."""
    found = meta.get(name)
    return found if isinstance(found, dict) else {}


def kept_share(meta: Mapping[str, Any]) -> float:
    """Of the requests that were made, the share that the run has: below 1 where another tool kept a sample."""
    return float(section(meta, "imported").get("kept_share") or 1.0)


def server_hardware(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The machine of the server: another than that of the load generator where two recordings were joined."""
    return section(meta, "server_hardware") or section(meta, "hardware")


def engine_settings(meta: dict[str, Any]) -> dict[str, Any]:
    """The settings in force: what the server said of itself (`engine.served.engine`), and above it what it was started
    with, as far as they are known."""
    engine = section(meta, "engine")
    chosen = {name: value for name, value in engine.items() if name != "served" and value is not None}
    return section(section(engine, "served"), "engine") | chosen


def wall_anchor() -> dict[str, int]:
    """One pair of readings that maps the monotonic clock of this host to the time of day."""
    return {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}


def _with_client_accounts(joined: "pd.DataFrame") -> "pd.DataFrame":
    """Books what only both sides together can know, from their own readings, and shows what is left over.

    A client may read the last byte before the server, back from its write, looks at the clock: what the server booked
    to `request.stream` after that is no part of the client's latency, and is taken off.
    """
    stamps = [column for column in joined.columns if column.endswith("_ns") and column not in ("chunk_ns", "token_ns")]
    numbers = joined.astype(dict.fromkeys(stamps, "float64"))
    lag = numbers.sent_ns - numbers.due_ns
    way_in = numbers.arrived_ns - numbers.sent_ns
    ends = {"ledger": ("written_ns", "last_byte_ns"), "ttft": ("first_written_ns", "first_token_ns")}
    recorded = numbers.arrived_ns.notna()
    for prefix, (written, read) in ends.items():
        for column in (f"{prefix}_{info.column}" for info in SERVER_ACCOUNTS):
            if (unknown := recorded & joined[column].isna()).any():  # the server of this run had no such account yet
                joined[column] = numbers[column].mask(unknown, 0.0)
        way_out = numbers[read] - numbers[written]
        joined[f"{prefix}_request_stream_ns"] = numbers[f"{prefix}_request_stream_ns"] + way_out.clip(upper=0)
        joined[f"{prefix}_client_lag_ns"] = lag
        joined[f"{prefix}_client_network_ns"] = way_in + way_out.clip(lower=0)
        booked = joined[[f"{prefix}_{info.column}" for info in ACCOUNTS]].astype("float64").sum(axis=1, skipna=False)
        latency = numbers[read] - numbers.due_ns
        joined["unaccounted_ns" if prefix == "ledger" else "ttft_unaccounted_ns"] = latency - booked
    return joined


def with_latencies(joined: "pd.DataFrame") -> "pd.DataFrame":
    """Adds `ttft_ms`, `ttfa_ms`, `tpot_ms` and `e2e_ms` from the intended send to rows of `client`."""
    due = joined.due_ns.astype("float64")
    first, last = joined.first_token_ns.astype("float64"), joined.last_byte_ns.astype("float64")
    served = joined.status == "ok"
    joined["ttft_ms"] = ((first - due) / 1e6).where(served)
    answer = joined.first_answer_ns.astype("float64")
    apart = bool((answer.notna() & (answer != first)).any())  # else nobody knows what is reasoning
    joined["ttfa_ms"] = ((answer - due) / 1e6).where(served & apart)
    joined["e2e_ms"] = ((last - due) / 1e6).where(served)
    final = joined.chunk_ns.map(lambda stamps: stamps[-1] if stamps is not None and len(stamps) else None)
    span = final.astype("float64").fillna(joined.last_token_ns.astype("float64")) - first
    later = joined.output_tokens.astype("float64") - _first_read_tokens(joined)
    joined["tpot_ms"] = (span / 1e6 / later).where(served & (later > 0) & (span > 0))
    return joined


def _first_read_tokens(joined: "pd.DataFrame") -> np.ndarray:
    """Tokens in the first read with text; 1 where the server reports no tokens of a chunk."""
    from sojourn.metrics.cells import lengths, values  # with pandas

    chunks = lengths(joined.chunk_ns)
    counted = (chunks > 0) & (lengths(joined.chunk_tokens) == chunks)
    stamps, rows = values(joined.chunk_ns[counted])
    first = np.cumsum(chunks[counted]) - chunks[counted]
    counts = np.where(stamps == stamps[first][rows], values(joined.chunk_tokens[counted])[0], 0) if len(rows) else []
    tokens = np.ones(len(joined))
    tokens[counted] = np.bincount(rows, counts, minlength=int(counted.sum()))
    return tokens
