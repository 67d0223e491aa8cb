"""Client and server recorded apart, on one host or on two: one run of both, with the offset of their clocks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.clocks import ClockOffset, estimate_offset
from sojourn.metrics.run.directory import SERVER_KEYS, RunDirectory, engine_settings, section
from sojourn.metrics.run.segments import read_segment, replace_table

# When a row of a server's table happened.
_MOMENT = {"requests": "arrived_ns", "steps": "begin_ns", "system": "ns", "kernels": "begin_ns",
           "kv_events": "ns"}  # fmt: skip
# The columns that are times of the server's clock; all others that end with _ns are durations.
_STAMPS = {
    "requests": (
        "arrived_ns", "encoded_ns", "queued_ns", "scheduled_ns", "first_written_ns", "written_ns", "finished_ns",
        "token_ns",
    ),
    "steps": ("begin_ns", "end_ns", "planned_ns", "device_end_ns"),
    "system": ("ns", "loop_turn_begin_ns"),
    "kernels": ("begin_ns",),
    "kv_events": ("ns",),
}  # fmt: skip
PROBE = "probe"  # what run.json says of the probe that recorded a foreign server
ToClient = Callable[[np.ndarray], np.ndarray]  # times of a server's clock, int64 → those of the client's
SERVER_TABLES = tuple(_MOMENT)


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """What `run.json` keeps of a join, as `clock`."""

    server_run: str  # its name
    matched: int  # requests that both recorded
    of: int  # requests of the client
    same_host: bool  # one clock: no offset to estimate
    offset: ClockOffset | None  # None on one host

    @property
    def uncertainty_ns(self) -> float:
        return 0.0 if self.offset is None else self.offset.uncertainty_ns


def join_runs(client: RunDirectory, server: RunDirectory) -> Joined:
    """Adopts what a server recorded of a client's load into the client's run, on the client's clock.

    Raises RunDataError where they do not belong together or one cannot be read. The server's run stays as it is.
    """
    if any(client.sources(table) for table in ("requests", "steps")):
        raise RunDataError(f"{client.path} holds records of a server already; join the run of a client alone")
    sent, served = client.table("client"), server.table("requests")
    both = sent.drop_duplicates("request_id").merge(
        served.drop_duplicates("request_id", keep="last"), on="request_id", suffixes=("", "_server")
    )
    if both.empty:
        raise RunDataError(
            f"no request of {client.path} ({len(sent)}) is among those that {server.path} recorded ({len(served)}): "
            "these are not the client and the server of one load"
        )
    same_host = _same_host(client.meta(), server.meta())
    offset = None if same_host else _offset(both)
    joined = Joined(
        server_run=server.name, matched=len(both), of=sent.request_id.nunique(), same_host=same_host, offset=offset
    )
    margin = int(joined.uncertainty_ns)
    ends = sent[["due_ns", "sent_ns", "last_byte_ns"]].astype("float64").max().max()
    tables = {table: server.sources(table) for table in SERVER_TABLES}
    to_client = None if offset is None else offset.to_client
    adopt(client.path, tables, int(sent.due_ns.min()) - margin, int(ends) + margin, to_client)
    client.compact()
    client.update_meta(**_described(client.meta(), server.meta()), clock=msgspec.to_builtins(joined))
    return joined


def adopt_servers(client: RunDirectory, servers: Sequence[RunDirectory], begin_ns: int, end_ns: int) -> list[str]:
    """Adopts what servers on this host recorded of a client's load in a span of its clock: of one server into the
    client's run, of several into a folder each. Returns why the records are not whole, as sentences."""
    reasons = []
    entries = [{"name": f"server-{number}", "run": str(server.path)} for number, server in enumerate(servers)]
    for server, entry in zip(servers, entries, strict=True):
        meta = server.meta()
        place = client.path if len(servers) == 1 else client.path / entry["name"]
        tables = {table: server.sources(table) for table in SERVER_TABLES}
        if not adopt(place, tables, begin_ns, end_ns):
            reasons.append(f"{server.path} holds no records of this load: is it of this server, on this host?")
        if len(servers) == 1:
            known = {key: meta[key] for key in (*SERVER_KEYS, PROBE) if key in meta}
            client.update_meta(**known, server_versions=meta.get("versions"), **_served(client.meta(), meta))
        else:
            place.mkdir(exist_ok=True)
            RunDirectory(place).write_json("run.json", meta)
            entry["served"] = {"engine": engine_settings(meta)}
    if len(servers) > 1:
        meta = client.meta()
        alike = all(_same_host(meta, server.meta()) for server in servers)
        router = {"name": None, "policy": None, "url": section(meta, "engine").get("base_url"), "same_host": alike}
        client.update_meta(servers=entries, router=router)
    return reasons


def clock_of(meta: dict[str, Any]) -> Joined | None:
    """How the clocks of a run were joined; None where client and server recorded it together."""
    recorded = meta.get("clock")
    try:
        return msgspec.convert(recorded, Joined) if recorded else None
    except msgspec.ValidationError:
        return None


def uncertainty_sentence(meta: dict[str, Any]) -> str:
    """What to say wherever `client.network` is shown; "" where client and server shared a clock."""
    joined = clock_of(meta)
    if joined is None or joined.offset is None:
        return ""
    return (
        f"client and server ran on different hosts: their clocks were joined from {joined.offset.bounds:,} stamps to "
        f"within ± {joined.uncertainty_ns / 1e6:.3f} ms, and client.network of a request is that uncertain"
    )


def _same_host(client: dict[str, Any], server: dict[str, Any]) -> bool:
    """Whether both saw the same start of the same kernel, whose monotonic clock they then share."""
    boots = [section(meta, "hardware").get("boot_id") for meta in (client, server)]
    return boots[0] is not None and boots[0] == boots[1]


def _offset(both: pd.DataFrame) -> ClockOffset:
    """From every request: sent → arrived, first token → first text read, last token → last byte read.

    The last bound only holds where the client read to the end: for one that gave up the server goes on a while.
    `written_ns` would be a tighter bound, but a server looks at the clock after a write, when the client may have read.
    """
    way_in = both[["sent_ns", "arrived_ns"]].dropna().astype("int64")
    answers, read = [], []
    for place, column, rows in ((0, "first_token_ns", both), (-1, "last_byte_ns", both[both.status == "ok"])):
        answered = rows[rows[column].notna() & rows.token_ns.map(lambda stamps: stamps is not None and len(stamps) > 0)]
        answers.append(answered.token_ns.map(lambda stamps, place=place: int(stamps[place])).to_numpy(dtype="int64"))
        read.append(answered[column].to_numpy(dtype="int64"))
    return estimate_offset(
        way_in.sent_ns.to_numpy(), way_in.arrived_ns.to_numpy(), np.concatenate(answers), np.concatenate(read)
    )


def _served(client: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
    """The settings of a server that a probe describes: its `/v1/models` does not tell them, as ours does."""
    if PROBE not in server:
        return {}
    engine = section(client, "engine")
    return {"engine": engine | {"served": section(engine, "served") | {"engine": engine_settings(server)}}}


def _described(client: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
    """What the client's run could not know of the server."""
    engine = section(client, "engine")
    served = section(engine, "served") | {"engine": engine_settings(server)}
    changes: dict[str, Any] = {"engine": engine | {"served": served}}
    changes |= {key: server[key] for key in (*SERVER_KEYS, PROBE) if server.get(key) is not None}
    return changes | {"server_hardware": server.get("hardware"), "server_versions": server.get("versions")}


def adopt(
    directory: Path, sources: dict[str, list[Path]], begin_ns: int, end_ns: int, to_client: ToClient | None = None
) -> int:
    """Copies what a server recorded in a span of the client's monotonic clock into another run directory; returns the
    rows. `to_client` where the server's clock was another one.

    `sources` are the files (`RunDirectory.sources`) of each of SERVER_TABLES.
    """
    rows = 0
    for table, files in sources.items():
        for file in files:
            content = read_segment(file, table)
            for column in _STAMPS[table] if to_client is not None else ():
                place = content.column_names.index(column)
                content = content.set_column(place, content.field(place), _moved(content[column], to_client))
            moment = content[_MOMENT[table]]
            within = content.filter(pc.and_(pc.greater_equal(moment, begin_ns), pc.less_equal(moment, end_ns)))
            if within.num_rows:
                replace_table(directory / f"{table}.parts" / f"{file.stem}.parquet", within)
                rows += within.num_rows
    return rows


def _moved(column: pa.ChunkedArray, to_client: ToClient) -> pa.Array:
    """The same moments on the client's clock; nulls stay null."""
    whole = column.combine_chunks()
    whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    if pa.types.is_list(whole.type):
        moved = _moved(pa.chunked_array([whole.flatten()]), to_client)
        lengths = pc.fill_null(pc.list_value_length(whole), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.append(0, np.cumsum(lengths)).astype("int32"))
        return pa.ListArray.from_arrays(offsets, moved, type=whole.type, mask=whole.is_null())
    values = to_client(pc.fill_null(whole, 0).to_numpy(zero_copy_only=False))
    return pa.array(values, whole.type, mask=whole.is_null().to_numpy(zero_copy_only=False))
