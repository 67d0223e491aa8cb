"""Fleets of engines over the simulated device, each with its part of the requests, gathered as a real fleet is."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.fleet import describe_servers, gather_servers
from tests.replay.simulated_run import Ask, write_run

ROUTER = {"name": "vllm-router", "policy": "round_robin", "url": "http://127.0.0.1:8000", "same_host": True}


def write_fleet(
    path: Path, asks: Sequence[Ask], server_of: Callable[[Ask], int], count: int = 2, *,
    own: Mapping[int, dict[str, Any]] | None = None, objectives: Sequence[dict] = (), **settings: Any,
) -> RunDirectory:  # fmt: skip
    """`own` has the settings of single servers."""
    clients, entries = [], []
    for number in range(count):
        placed = [ask for ask in asks if server_of(ask) == number]
        member = write_run(path / f"server-{number}", placed, objectives=objectives,
                           **settings | (own or {}).get(number, {}))  # fmt: skip
        clients.append(pq.read_table(member.path / "client.parquet"))
        _name_blocks(member.path / "requests.parquet", placed, member.meta()["engine"]["block_size"])
        engine = member.meta()["engine"]
        entries.append({"name": member.name, "settings": {name: engine[name] for name in (own or {}).get(number, {})},
                        "served": engine["served"]})  # fmt: skip
    pq.write_table(pa.concat_tables(clients).sort_by("due_ns"), path / "client.parquet")
    meta = RunDirectory.open(path / "server-0").meta()
    run = RunDirectory(path)
    run.write_json("run.json", {name: value for name, value in meta.items() if name != "core"})
    run.update_meta(servers=entries, router=ROUTER)
    gather_servers(run)
    describe_servers(run)
    return RunDirectory.open(path)


def _name_blocks(table: Path, asks: Sequence[Ask], block_size: int) -> None:
    """Adds the hashes of the prompts' blocks, which are alike on all servers; those of outputs stay unknown."""
    known = {
        ask.id: [hash(tuple(ask.prompt[:end])) for end in range(block_size, len(ask.prompt) + 1, block_size)]
        for ask in asks
    }
    rows = pq.read_table(table)
    place = rows.schema.get_field_index("prompt_block_hashes")
    hashes = pa.array([known[name] for name in rows["request_id"].to_pylist()], rows.schema.field(place).type)
    pq.write_table(rows.set_column(place, rows.schema.field(place), hashes), table)
