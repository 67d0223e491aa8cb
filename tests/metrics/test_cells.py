"""Columns of lists and maps read flat. Oracle: the same table with Python objects in its cells, read cell by cell."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sojourn.metrics import cells
from sojourn.metrics.compute.utilisation import phases
from sojourn.metrics.records import composition
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.synthetic import synthetic_run

LISTS = pa.array([[1, 2, 3], [], None, [4], [5, 6]], pa.list_(pa.int64()))
MAPS = pa.array([[("a", 1), ("b", 0)], None, [], [("c", 5)], [("a", 2)]], pa.map_(pa.string(), pa.int64()))
SEEN = pa.table({"n": [0, 1, 2, 3, 4], "list": LISTS, "map": MAPS})


@pytest.fixture(params=["arrow", "objects", "a part of each"])
def frame(request):
    if request.param == "objects":
        return SEEN.to_pandas(maps_as_pydicts="strict")
    whole = cells.flat_frame(SEEN)
    return whole if request.param == "arrow" else cells.flat_frame(pa.concat_tables([SEEN, SEEN])).iloc[5:]


def test_lists_read_flat(frame):
    assert cells.lengths(frame["list"]).tolist() == [3, 0, 0, 1, 2]
    numbers, rows = cells.values(frame["list"])
    assert (numbers.tolist(), rows.tolist()) == ([1, 2, 3, 4, 5, 6], [0, 0, 0, 3, 4, 4])
    assert cells.row_sums(frame["list"]).tolist() == [6, 0, 0, 4, 11]
    assert cells.sums_by_place(frame["list"]).tolist() == [10, 8, 3]


def test_maps_read_flat(frame):
    found = cells.sums_by_key(frame["map"], ["a", "c", "none"])
    assert found.index.equals(frame.index)
    assert found.to_numpy().tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 5, 0], [2, 0, 0]]
    assert cells.keys_of(frame["map"]) == ["a", "c"]  # b is 0 everywhere


def test_nothing_reads_flat(frame):
    empty = frame.iloc[:0]
    assert cells.values(empty["list"])[0].tolist() == [] and cells.row_sums(empty["list"]).tolist() == []
    assert cells.sums_by_key(empty["map"], ["a"]).shape == (0, 1) and cells.keys_of(empty["map"]) == []


def test_objects_are_those_of_the_table(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=60)
    objects, flat = run.table("steps"), cells.flat_frame(run.arrow("steps"))
    picked = np.arange(len(flat)) % 3 == 1
    back = cells.as_objects(flat[picked])
    for name in ("kinds", "new_tokens", "refusals", "preempted_for"):
        for one, other in zip(back[name], objects[name][picked], strict=True):
            assert (one is None) == (other is None) and (one is None or list(one) == list(other))
    assert phases(flat).tolist() == [composition(list(kinds)) for kinds in objects.kinds]


def test_only_the_columns_that_are_asked_for_are_read(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=20)
    some = run.arrow("steps", ("step", "kinds"))
    assert some.schema.names == ["step", "kinds"]
    assert some.equals(run.arrow("steps").select(["step", "kinds"]))
    assert RunDirectory(tmp_path / "none").arrow("steps", ("step",)).schema.names == ["step"]


def test_a_frame_without_nested_columns_stays_as_it_is():
    table = pa.table({"a": [1, 2], "b": ["x", None]})
    pd.testing.assert_frame_equal(cells.flat_frame(table), table.to_pandas())
