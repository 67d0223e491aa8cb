"""The tables of the flight recorder in Arrow: a column for each field of a record, and the records as their rows."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from sojourn.metrics.ledger import ACCOUNTS, CLIENT_ACCOUNTS
from sojourn.metrics.records import (
    STAGES,
    ClientRecord,
    KernelRecord,
    KvEventRecord,
    RequestRecord,
    StepRecord,
    SystemRecord,
    step,
)

_ARROW_TYPES: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bool: pa.bool_(),
    list[float]: pa.list_(pa.float64()),
    list[int]: pa.list_(pa.int64()),
    tuple[int, ...]: pa.list_(pa.int64()),
    list[str]: pa.list_(pa.string()),
    dict[str, int]: pa.map_(pa.string(), pa.int64()),
}


def arrow_type(annotation: Any) -> pa.DataType:
    if annotation in _ARROW_TYPES:
        return _ARROW_TYPES[annotation]
    members = [member for member in annotation.__args__ if member is not type(None)]
    return _ARROW_TYPES[members[0]]


def _types(record: type[msgspec.Struct]) -> dict[str, Any]:
    """The columns of a record, those of its parts among them, and their types."""
    return step.TYPES if record is StepRecord else {each.name: each.type for each in msgspec.structs.fields(record)}


def _fields(record: type[msgspec.Struct]) -> list[pa.Field]:
    """One Arrow column a field, but for the lists that `row` spreads over named columns."""
    columns: list[pa.Field] = []
    for name, kind in _types(record).items():
        if name == "stages":
            columns += [pa.field(f"stage_{stage}_ns", pa.int64()) for stage in STAGES]
        elif name in ("ledger", "ttft"):
            columns += [pa.field(f"{name}_{info.column}", pa.int64()) for info in ACCOUNTS]
        else:
            columns.append(pa.field(name, arrow_type(kind)))
    return columns


RECORDS: dict[str, type[msgspec.Struct]] = {  # of the tables whose rows are records
    "steps": StepRecord, "requests": RequestRecord, "client": ClientRecord, "system": SystemRecord,
    "kernels": KernelRecord, "kv_events": KvEventRecord,
}  # fmt: skip
SCHEMAS: dict[str, pa.Schema] = {
    **{table: pa.schema(_fields(record)) for table, record in RECORDS.items()},
    "scrapes": pa.schema([("ns", pa.int64()), ("name", pa.string()), ("labels", pa.map_(pa.string(), pa.string())),
                          ("value", pa.float64())]),
    "sensors": pa.schema([("ns", pa.int64()), ("device", pa.string()), ("name", pa.string()),
                          ("value", pa.float64())]),
}  # fmt: skip


def row(record: msgspec.Struct) -> dict[str, Any]:
    """The record as one row of its table in SCHEMAS. The client's accounts are null: no server can see them."""
    values = record.columns() if isinstance(record, StepRecord) else msgspec.structs.asdict(record)
    if "stages" in values:
        for stage, duration in zip(STAGES, values.pop("stages"), strict=True):
            values[f"stage_{stage}_ns"] = duration
    for ledger in ("ledger", "ttft"):
        if ledger in values:
            booked = values.pop(ledger)
            for info in ACCOUNTS:
                values[f"{ledger}_{info.column}"] = None if info in CLIENT_ACCOUNTS else booked[info.account]
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = list(value.items())
    return values


def columns(table: str, records: Sequence[Any]) -> pa.Table:
    """Records, at least one, as their table in SCHEMAS: what `row` says of each, made by columns: it is cheaper."""
    schema = SCHEMAS[table]
    arrays: list[pa.Array] = []
    of_steps = isinstance(records[0], StepRecord)
    for name in _types(type(records[0])):
        found = step.values_of(records, name) if of_steps else map(attrgetter(name), records)
        if found is None:
            arrays.append(_repeated(step.default_of(name), schema.field(name).type, len(records)))
            continue
        values = list(found)
        if name == "stages":
            arrays += map(pa.array, zip(*values, strict=True))
        elif name in ("ledger", "ttft"):
            booked, nulls = np.array(values, np.int64).T, pa.nulls(len(values), pa.int64())
            for info in ACCOUNTS:
                arrays.append(nulls if info in CLIENT_ACCOUNTS else pa.array(booked[info.account]))
        else:
            kind = schema.field(name).type
            arrays.append(
                pa.array([list(value.items()) for value in values] if pa.types.is_map(kind) else values, kind)
            )
    return pa.Table.from_arrays(arrays, schema=schema)


def _repeated(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """A container that is repeated is empty."""
    return pa.array([[]] * count, kind) if isinstance(value, list | dict) else pa.repeat(pa.scalar(value, kind), count)
