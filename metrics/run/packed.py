"""Segments of packed records: cheap to write while a server serves; columns are made of them when somebody reads.

A file is a run of frames: the length of its compressed content and that of the content (4 bytes each, little-endian),
then the content in LZ4: msgpack of the table's records, with the names of their ledgers' accounts, or of a batch of
steps, with the names of its numbers. The last frame may be under way, or cut off for ever.
"""

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from metrics.ledger import ACCOUNTS
from metrics.records import RECORDS, columns
from metrics.steps import COSTS, NUMBERS, Makeup, Others, Steps

PACKED = ".packed"
_HEAD = struct.Struct("<II")
_ACCOUNTS = tuple(info.column for info in ACCOUNTS)  # in the order of a ledger
_BOOKS = ("ledger", "ttft")
Record = TypeVar("Record")


class PackedSteps(msgspec.Struct, frozen=True, array_like=True):
    """A batch of steps as it is kept, with its costs."""

    names: tuple[str, ...]  # of the numbers: another version may have others
    numbers: bytes  # int64 [names, steps]
    makeups: list[Makeup]
    others: Others


class PackedRecords(msgspec.Struct, Generic[Record], frozen=True, array_like=True):
    """Records of any other table as they are kept."""

    accounts: tuple[str, ...]  # of their ledgers: another version may have others
    records: list[Record]


def packed_records(records: list[Record]) -> PackedRecords[Record]:
    return PackedRecords(_ACCOUNTS, records)


def packed_steps(steps: Steps) -> PackedSteps:
    return PackedSteps(NUMBERS + COSTS, steps.numbers.tobytes(), steps.makeups, steps.others)


class PackedSegment:
    """A segment that grows. After a write that failed nothing behind it could be read: begin another one."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("xb", buffering=0)
        self._has_frames = False

    def write(self, content: bytes) -> None:
        """One frame: `encode` of PackedRecords or PackedSteps. Raises OSError."""
        # With the pool of its own, Arrow would fetch memory anew for each frame (engine/heap.py).
        compressed = pa.compress(content, codec="lz4_raw", asbytes=True, memory_pool=pa.system_memory_pool())
        frame = _HEAD.pack(len(compressed), len(content)) + compressed
        if self._file.write(frame) != len(frame):
            raise OSError("the disk took only a part of it")
        self._has_frames = True

    def close(self) -> None:
        """Leaves no file in which nothing can be read: on a full disk there would be one more each second."""
        self._file.close()
        if not self._has_frames:
            self._path.unlink()


encode = msgspec.msgpack.Encoder().encode


def tables_of(path: Path, table: str) -> Iterator[pa.Table]:
    """The frames of a segment that are whole, each as rows of SCHEMAS[table]."""
    for content in _frames(path):
        if table == "steps":
            yield _steps_table(_decoder(PackedSteps)(content))
        else:
            yield _records_table(table, _decoder(PackedRecords[RECORDS[table]])(content))


def _frames(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, whole_size = _HEAD.unpack(head)
            compressed = file.read(size)
            if not size or len(compressed) < size:  # cut off, or zeros: the power went before the disk had it
                return
            yield pa.decompress(compressed, whole_size, codec="lz4_raw", asbytes=True)


def _steps_table(packed: PackedSteps) -> pa.Table:
    """Numbers that this version does not know are left out; it is null in those that the writer did not know."""
    numbers = np.frombuffer(packed.numbers, np.int64).reshape(len(packed.names), -1)
    steps = Steps.empty(numbers.shape[1], packed.makeups, packed.others)
    for name, column in zip(packed.names, numbers, strict=True):
        if name in NUMBERS + COSTS:
            steps[name][:] = column
    return steps.table()


def _records_table(table: str, packed: PackedRecords) -> pa.Table:
    """Accounts that this version does not know are left out; it is null in those that the writer did not know."""
    if packed.accounts == _ACCOUNTS or table != "requests":
        return columns(table, packed.records)
    places = [packed.accounts.index(name) if name in packed.accounts else None for name in _ACCOUNTS]
    records = [
        msgspec.structs.replace(record, **{book: _moved(getattr(record, book), places) for book in _BOOKS})
        for record in packed.records
    ]
    content = columns(table, records)
    for name in (name for name, place in zip(_ACCOUNTS, places, strict=True) if place is None):
        for book in _BOOKS:
            at = content.column_names.index(f"{book}_{name}")
            content = content.set_column(at, content.field(at), pa.nulls(len(records), pa.int64()))
    return content


def _moved(ledger: list[int], places: list[int | None]) -> list[int]:
    return [0 if place is None else ledger[place] for place in places]


@cache
def _decoder(kind: type) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(kind).decode
