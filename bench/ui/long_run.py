"""A run of any length: a synthetic run laid end to end, with ids, steps and times of its own in each copy."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sojourn.diagnosis.diagnose import diagnose
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import REQUIRED, RunDirectory
from tests.metrics.synthetic import CLOCK_START_NS, synthetic_run

BASE_REQUESTS = 2_000
PAUSE_NS = 1_000_000_000  # between two copies
NUMBERS = ("step", "first_step", "last_step")


def long_run(folder: Path, requests: int, *, plant: str = "long_beside_chat") -> RunDirectory:
    """A run with its diagnosis, of about so many requests: whole copies of BASE_REQUESTS of them, or of all of few."""
    count = min(requests, BASE_REQUESTS)
    with TemporaryDirectory() as scratch:
        base = synthetic_run(Path(scratch) / "base", plant=plant, requests=count)
        meta = {key: base.meta().get(key) for key in (*REQUIRED, *base.meta())}
        run = RunDirectory.create(folder, meta)
        client, steps = base.arrow("client"), base.arrow("steps")
        begin, end = pc.min(client["due_ns"]).as_py(), pc.max(client["last_byte_ns"]).as_py()
        length_ns, num_steps = end - begin + PAUSE_NS, (pc.max(steps["step"]).as_py() or 0) + 1
        for name in SCHEMAS:
            table = base.arrow(name)
            if not table.num_rows:
                continue
            with pq.ParquetWriter(folder / f"{name}.parquet", table.schema) as writer:
                for copy in range(round(requests / count)):
                    columns = [
                        _moved(column.combine_chunks(), field.name, copy, copy * length_ns, copy * num_steps)
                        for field, column in zip(table.schema, table.columns, strict=True)
                    ]
                    writer.write_table(pa.table(columns, schema=table.schema))
        run.write_json("diagnosis.json", msgspec.to_builtins(diagnose(base)))
    return run


def _moved(values: Any, name: str, copy: int, by_ns: int, by_steps: int) -> pa.Array:
    """A column of one copy: moments of the clock are later, ids and steps are its own; all else stays."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    kind = values.type
    if pa.types.is_map(kind):
        return values
    if pa.types.is_list(kind):
        inner = _moved(values.values, name, copy, by_ns, by_steps)
        return pa.ListArray.from_arrays(
            values.offsets, inner, kind, mask=values.is_null() if values.null_count else None
        )
    if pa.types.is_struct(kind):
        parts = [_moved(values.field(place), field.name, copy, by_ns, by_steps) for place, field in enumerate(kind)]
        return pa.StructArray.from_arrays(
            parts, fields=list(kind), mask=values.is_null() if values.null_count else None
        )
    if pa.types.is_integer(kind) and name.endswith("ns") and copy:
        is_moment = pc.fill_null(pc.greater_equal(values, pa.scalar(CLOCK_START_NS, kind)), False)
        return pc.if_else(is_moment, pc.add(values, pa.scalar(by_ns, kind)), values)
    if name in NUMBERS:
        return pc.add(values, pa.scalar(by_steps, kind))
    if pa.types.is_string(kind) and name.endswith(("_id", "_ids", "preempted_for")) and copy:
        return pc.binary_join_element_wise(f"c{copy}", values, "-")
    return values


def rows_of(run: "RunDirectory | Any") -> dict[str, int]:
    return {name: pq.ParquetFile(run.path / f"{name}.parquet").metadata.num_rows
            for name in ("client", "steps") if (run.path / f"{name}.parquet").exists()}  # fmt: skip


def median_ms(seconds: list[float]) -> float:
    return 1e3 * float(np.median(seconds))
