"""Synthetic runs with what a server of ours tells of its machine: samples of the CPUs, and its model's shape."""

from collections.abc import Callable

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import RunDirectory

SHAPE = ModelShape(1000, 64, 10_000, 20_000, 256, ((None, 2),), 512, 100_000)


def known(run: RunDirectory, entries: list | None = None, **core) -> RunDirectory:
    """The run, with the model and the device that a server of ours would tell, and a reference."""
    core = {"device": "cpu", "dtype": "float32", "weights": "float32", "threads": 1} | core
    hardware = {"cpu": "simulated", "cores": 1}
    changes = {"model_shape": msgspec.to_builtins(SHAPE), "core": core, "hardware": hardware}
    reference = {"family": "simulated", "entries": msgspec.to_builtins(entries or [])}
    run.update_meta(**changes, speed_reference=reference)
    return run


def with_system(run: RunDirectory, **columns: Callable[[float], object]) -> RunDirectory:
    """The run, whose samples of the machine have these columns: a function of the seconds since the first."""
    rows = run.table("system").sort_values("ns", ignore_index=True)
    seconds = (rows.ns - rows.ns[0]).to_numpy("float64") / 1e9
    for name, value in columns.items():
        rows[name] = [value(second) for second in seconds]
    return _written(run, "system", rows)


def with_requests(run: RunDirectory, **columns: Callable[[pd.DataFrame], object]) -> RunDirectory:
    """The run, whose records of requests have these columns: a function of the server's table."""
    rows = run.table("requests")
    for name, value in columns.items():
        rows[name] = value(rows)
    return _written(run, "requests", rows.reindex(columns=SCHEMAS["requests"].names).replace({np.nan: None}))


def turns(every_s: float, lasting_ms: float) -> dict[str, Callable[[float], object]]:
    """Columns of a loop that is held for so long, again and again."""
    return {
        "loop_busy_ns": lambda s: int(s * lasting_ms * 1e6 / every_s),
        "front_loop_cpu_ns": lambda s: int(s * lasting_ms * 1e6 / every_s),
        "front_loop_queued_ns": lambda s: 0,
        "loop_turn_begin_ns": lambda s: [int(1e12 + s * 1e9)],
        "loop_turn_ns": lambda s: [int(lasting_ms * 1e6)],
    }


def _written(run: RunDirectory, table: str, rows: pd.DataFrame) -> RunDirectory:
    pq.write_table(pa.Table.from_pandas(rows, SCHEMAS[table], preserve_index=False), run.path / f"{table}.parquet")
    return run


def with_steps(run: RunDirectory, **columns: Callable[[pd.DataFrame], object]) -> RunDirectory:
    """The run, whose records of steps have these columns: a function of the table."""
    rows = run.table("steps")
    for name, value in columns.items():
        rows[name] = value(rows)
    return _written(run, "steps", rows.reindex(columns=SCHEMAS["steps"].names).replace({np.nan: None}))
