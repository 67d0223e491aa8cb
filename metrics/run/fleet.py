"""Several servers behind a router as one run: a pooled run, and in it a run directory of each server.

The pooled run has all requests, each with the name of its server. It has no steps, since steps of two servers are no
one stream: batch, step time and KV use are of a server. Each server's run directory has its own steps, and the requests
that it served, so that whatever reads a run reads it.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import SERVER_KEYS, RunDirectory, section
from sojourn.metrics.run.segments import replace_table

OF_THE_FLEET = ("servers", "load_reasons")  # keys of the pooled `run.json` that a server's has not


def servers_of(run: RunDirectory, meta: dict[str, Any] | None = None) -> list[RunDirectory]:
    """The run directories of the servers of a fleet that recorded anything, in order of their numbers; [] for a run of
    one server."""
    named = (run.meta() if meta is None else meta).get("servers") or []
    members = [RunDirectory(run.path / str(entry["name"])) for entry in named]
    return [member for member in members if (member.path / "run.json").is_file()]


def siblings_of(run: RunDirectory, meta: dict[str, Any]) -> list[RunDirectory]:
    """The other servers of the fleet that a server's run lies in; [] for any other run."""
    if not meta.get("fleet"):
        return []
    pooled = RunDirectory(run.path.resolve().parent)
    if not (pooled.path / "run.json").is_file():
        return []
    return [member for member in servers_of(pooled) if member.name != run.name]


def server_run_of(run: RunDirectory, request_id: str) -> RunDirectory:
    """The run directory of the server that a request of a fleet went to; the run itself where it is of one server, or
    where no server recorded the request."""
    members = servers_of(run)
    if members:
        served = run.table("requests")
        names = served.server[served.request_id == request_id]
        for member in members:
            if len(names) and member.name == names.iloc[-1]:
                return member
    return run


def refuse_fleet(run: RunDirectory, what: str) -> None:
    """Raises RunDataError for a pooled run, where `what` needs the steps of one server."""
    if members := servers_of(run):
        places = ", ".join(str(member.path) for member in members)
        raise RunDataError(f"{run.path} is a fleet, and {what} is of one server; name the run of one: {places}")


def gather_servers(run: RunDirectory) -> None:
    """Completes the run directories of the servers, and the pooled table `requests`, once the load has ended and the
    client's table is whole. Nothing happens for a run of one server."""
    meta = run.meta()
    members = servers_of(run, meta)
    if not members:
        return
    served = {member.name: _named(member) for member in members}
    pooled = pa.concat_tables(served.values()).sort_by("arrived_ns")  # what a router sent twice: the last one answered
    replace_table(run.path / "requests.parquet", pooled)
    client = run.arrow("client")
    answered = dict(zip(pooled["request_id"].to_pylist(), pooled["server"].to_pylist(), strict=True))
    owner = pa.array([answered.get(name) for name in client["request_id"].to_pylist()], pa.string())
    for member in members:
        replace_table(member.path / "requests.parquet", served[member.name])
        replace_table(member.path / "client.parquet", client.filter(pc.equal(owner, member.name)))


def describe_servers(run: RunDirectory) -> None:
    """Writes into the `run.json` of each server what the pooled one says of the load, once that is judged."""
    meta = run.meta()
    entries = {str(entry["name"]): entry for entry in meta.get("servers") or []}
    common = {name: value for name, value in meta.items() if name not in OF_THE_FLEET}
    for member in servers_of(run, meta):
        own, entry = member.meta(), entries[member.name]
        engine = {name: value for name, value in section(meta, "engine").items() if name != "replicas"}
        engine |= section(entry, "settings") | {"served": entry.get("served") or engine.get("served")}
        known = {key: own[key] for key in SERVER_KEYS if own.get(key) is not None}
        member.write_json("run.json", common | known | {"engine": engine, "server": member.name, "fleet": run.name})


def _named(member: RunDirectory) -> pa.Table:
    """What a server recorded of requests, each with the server's name."""
    member.compact()
    rows = member.arrow("requests")
    place = SCHEMAS["requests"].get_field_index("server")
    names = pa.array([member.name] * len(rows), pa.string())
    return rows.set_column(place, SCHEMAS["requests"].field(place), names)
