"""A run that is too large to be held whole: a sample of its requests and steps, and what is looked up in its files.

The sample is every k-th request in the order of their sends, and every k-th step in the order of the file. What a
sample would miss is beside it: the slowest requests, the first ones, and the longest steps. Only compacted tables are
sampled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.request.goodput import after_warmup
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.metrics.run.segments import conformed

MOST_REQUESTS, MOST_STEPS = 50_000, 250_000  # of a run that is held whole
SAMPLED_REQUESTS, SAMPLED_STEPS = 20_000, 100_000  # of a larger one
EXTREMES = 100  # slowest by each latency, and first ones, beside the sample
LONGEST_STEPS = 20
MEMORY = "2GB"  # of a query; what does not fit goes to disk


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests of the sample and those beside it, with the server's records of both."""

    client: pa.Table
    server: pa.Table
    sampled: frozenset[str]
    total: int  # measured requests of the run
    warmup: int
    one_in: int
    first_due_ns: int


def is_large(run: RunDirectory) -> bool:
    requests, steps = _num_rows(run, "client") or 0, _num_rows(run, "steps") or 0
    return requests > MOST_REQUESTS or (requests > 0 and steps > MOST_STEPS)


def drawn_requests(run: RunDirectory, meta: Mapping[str, Any]) -> Drawn:
    """Raises RunDataError where a file cannot be read."""
    columns = "request_id, due_ns, first_token_ns, last_byte_ns, status"
    every = _query(f"SELECT file_row_number AS place, {columns} FROM {_table(run, 'client')}").to_pandas()
    every = every.drop_duplicates("request_id").sort_values("due_ns", kind="stable", ignore_index=True)
    measure = section(section(meta, "scenario"), "measure")
    seconds, requests = measure.get("warmup_s") or 0, int(measure.get("warmup_requests") or 0)
    rows = every[after_warmup(every.due_ns.to_numpy(), seconds, requests)]
    one_in = math.ceil(len(rows) / SAMPLED_REQUESTS) if len(rows) > MOST_REQUESTS else 1
    sampled = rows.iloc[one_in // 2 :: one_in]
    served = rows[rows.status == "ok"]
    beside = [rows.head(EXTREMES), rows[rows.status != "ok"].head(EXTREMES)]
    for end in ("first_token_ns", "last_byte_ns"):
        latency = served[end].astype("float64") - served.due_ns.astype("float64")
        beside.append(served.loc[latency.nlargest(EXTREMES).index])
    places = pd.concat([sampled, *beside]).drop_duplicates("place")[["place", "request_id"]]
    client, server = _both(run, pa.Table.from_pandas(places, preserve_index=False))
    return Drawn(
        client=client, server=server, sampled=frozenset(sampled.request_id), total=len(rows),
        warmup=len(every) - len(rows), one_in=one_in, first_due_ns=int(rows.due_ns.min()) if len(rows) else 0,
    )  # fmt: skip


def drawn_steps(run: RunDirectory, first_due_ns: int) -> tuple[pa.Table, int]:
    """The sample of the steps from then on, in their order, and how many there are in all."""
    if not run.sources("steps"):
        return conformed(pa.table({}), "steps"), 0
    table, measured = _table(run, "steps"), f"begin_ns >= {first_due_ns}"
    total = _query(f"SELECT count(*) AS n FROM {table} WHERE {measured}")["n"][0].as_py()
    one_in = math.ceil(total / SAMPLED_STEPS) if total > MOST_STEPS else 1
    longest = (
        f"SELECT file_row_number FROM {table} WHERE {measured} ORDER BY end_ns - begin_ns DESC LIMIT {LONGEST_STEPS}"
    )
    taken = f"file_row_number % {one_in} = {one_in // 2} OR file_row_number IN ({longest})"
    found = _query(
        f"SELECT * EXCLUDE (file_row_number) FROM {table} WHERE {measured} AND ({taken}) ORDER BY step", True
    )
    return conformed(found, "steps"), total


def steps_between(run: RunDirectory, first: float, last: float) -> pa.Table:
    """All steps of these numbers, both included."""
    where = f"step BETWEEN {int(first)} AND {int(last)}"
    found = _query(f"SELECT * EXCLUDE (file_row_number) FROM {_table(run, 'steps')} WHERE {where} ORDER BY step")
    return conformed(found, "steps")


def looked_up(run: RunDirectory, request_id: str) -> tuple[pa.Table, pa.Table]:
    """The client's and the server's record of a request, by its id; empty tables where there is none."""
    wanted = pa.table({"wanted": [request_id]})
    places = _query(
        f"SELECT file_row_number AS place, request_id FROM {_table(run, 'client')} "
        "WHERE request_id IN (SELECT wanted FROM wanted) LIMIT 1",
        wanted=wanted,
    )
    return _both(run, places)


def _both(run: RunDirectory, places: pa.Table) -> tuple[pa.Table, pa.Table]:
    client = _query(
        f"SELECT c.* EXCLUDE (file_row_number) FROM {_table(run, 'client')} c SEMI JOIN places "
        "ON c.file_row_number = places.place",
        places=places,
    )
    if not run.sources("requests"):
        return conformed(client, "client"), conformed(pa.table({}), "requests")
    server = _query(
        f"SELECT r.* EXCLUDE (file_row_number) FROM {_table(run, 'requests')} r SEMI JOIN places USING (request_id)",
        places=places,
    )
    return conformed(client, "client"), conformed(server, "requests")


def _num_rows(run: RunDirectory, table: str) -> int | None:
    """Of a compacted table; None of one that is still written, or cannot be read."""
    files = run.sources(table)
    if files != [run.path / f"{table}.parquet"]:
        return None
    try:
        return pq.read_metadata(files[0]).num_rows
    except (pa.ArrowException, OSError):
        return None  # whoever reads it says what is wrong


def _table(run: RunDirectory, table: str) -> str:
    path = str(Path(run.path / f"{table}.parquet").resolve()).replace("'", "''")
    return f"read_parquet('{path}', file_row_number = true)"


def _query(sql: str, is_beside_pages: bool = False, **tables: pa.Table) -> pa.Table:
    """`is_beside_pages`: pages are drawn meanwhile, and need a core."""
    import duckdb  # a tenth of a second, which a small run need not wait for

    try:
        with duckdb.connect() as connection:
            connection.execute(f"SET memory_limit = '{MEMORY}'")
            if is_beside_pages:
                connection.execute("SET threads = 1")
            for name, table in tables.items():
                connection.register(name, table)
            return connection.sql(sql).to_arrow_table()
    except duckdb.Error as error:
        raise RunDataError(f"a table of the run cannot be read: {error}") from None
