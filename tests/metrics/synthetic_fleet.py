"""A fleet with a known truth: one synthetic run for each of its servers, gathered as a real fleet is."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.fleet import describe_servers, gather_servers
from tests.metrics.synthetic import Plant, synthetic_run

ROUTER = {"name": "vllm-router", "policy": "round_robin", "url": "http://127.0.0.1:8000", "same_host": True}


def synthetic_fleet(
    path: Path, plants: Sequence[str | Plant], *, requests: Sequence[int] | int = 100, router: dict | None = ROUTER
) -> RunDirectory:
    """Server k has the load of `plants[k]`, with seed k. All servers begin at the same moment."""
    numbers = [requests] * len(plants) if isinstance(requests, int) else requests
    path.mkdir(parents=True)
    clients = []
    for k, (plant, number) in enumerate(zip(plants, numbers, strict=True)):
        member = synthetic_run(path / f"server-{k}", plant=plant, seed=k, requests=number)
        for table in ("client", "requests", "steps"):
            named = _renamed(pq.read_table(member.path / f"{table}.parquet"), f"s{k}-")
            pq.write_table(named, member.path / f"{table}.parquet")
        clients.append(pq.read_table(member.path / "client.parquet"))
        (member.path / "client.parquet").unlink()
    pq.write_table(pa.concat_tables(clients), path / "client.parquet")
    shutil.copy(path / "server-0" / "run.json", path / "run.json")
    run = RunDirectory(path)
    run.update_meta(servers=[{"name": f"server-{k}"} for k in range(len(plants))], router=router)
    run.update_meta(engine=run.meta()["engine"] | {"replicas": len(plants)})
    gather_servers(run)
    describe_servers(run)
    return RunDirectory.open(path)


def _renamed(table: pa.Table, prefix: str) -> pa.Table:
    """Each request with the prefix of its server, so that no two servers have one name."""
    for name in ("request_id", "request_ids", "preempted_ids", "preempted_for", "prefix_source"):
        if name in table.column_names:
            place, field = table.schema.get_field_index(name), table.schema.field(name)
            cells = [
                [prefix + each for each in cell] if isinstance(cell, list) else cell and prefix + cell
                for cell in table[name].to_pylist()
            ]
            table = table.set_column(place, field, pa.array(cells, field.type))
    return table
