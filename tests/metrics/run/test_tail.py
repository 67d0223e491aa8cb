"""The tail of a table: the last seconds of what the whole table holds, however it was written, and no row twice."""

from random import Random

import msgspec
import pyarrow.compute as pc
import pytest

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.records.tables import SCHEMAS, columns
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import StreamSegment, compact
from sojourn.metrics.run.tail import TableTail
from tests.metrics.random_records import random_request

S = 1_000_000_000


def ended(seconds: range):
    """A request that ended in each of these seconds."""
    made = (random_request(Random(second), second) for second in seconds)
    return columns("requests", [msgspec.structs.replace(each, finished_ns=second * S)
                                for second, each in zip(seconds, made, strict=True)])  # fmt: skip


def test_it_is_the_end_of_the_table_while_that_grows_is_cut_and_is_compacted(tmp_path):
    directory, draw = RunDirectory(tmp_path / "run"), Random(5)
    written, growing = tmp_path / "0.arrows", directory.path / "requests.parts" / "0.arrows"
    segment = StreamSegment(written, SCHEMAS["requests"])
    for first in range(0, 80, 4):
        segment.append(ended(range(first, first + 4)))
    content, tail = written.read_bytes(), TableTail(directory.path, "requests", "finished_ns", 30.0)
    growing.parent.mkdir(parents=True)
    growing.touch()
    for size in [*sorted(draw.sample(range(len(content)), 6)), len(content)]:
        with growing.open("ab") as file:
            file.write(content[file.tell() : size])
        table = directory.arrow("requests")
        newest_ns = pc.max(table["finished_ns"]).as_py() or 0
        assert tail.read().equals(table.filter(pc.greater_equal(table["finished_ns"], newest_ns - 30 * S)))
    assert sum(len(batch) for file in tail._files.values() for _, batch in file.batches) <= 32
    before = tail.read()
    compact(directory.path, "requests")
    assert tail.read().equals(before)
    assert tail.read(end_ns=75 * S)["finished_ns"][0].as_py() == 49 * S


def test_a_damaged_batch_is_told_at_each_reading(tmp_path):
    segment = StreamSegment(path := tmp_path / "requests.parts" / "0.arrows", SCHEMAS["requests"])
    segment.append(ended(range(4)))
    begin = path.stat().st_size
    for first in (4, 8):
        segment.append(ended(range(first, first + 4)))
    content = bytearray(path.read_bytes())
    content[begin + 8 : begin + 16] = b"?" * 8  # of its description
    path.write_bytes(content)
    tail = TableTail(tmp_path, "requests", "finished_ns", 30.0)
    for _ in range(2):
        with pytest.raises(RunDataError, match="table requests cannot be read"):
            tail.read()
