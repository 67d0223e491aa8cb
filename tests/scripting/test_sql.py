"""SQL over a run: the tables' own rows, and no way to anything else."""

import time

import pytest

from sojourn.metrics.errors import InputError
from sojourn.scripting.sql import query
from tests.metrics.synthetic import synthetic_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return synthetic_run(tmp_path_factory.mktemp("runs") / "run", requests=30)


def test_rows_are_those_of_the_tables(run):
    found = query(run, "SELECT request_id, ttft_ms FROM requests ORDER BY ttft_ms DESC", 3)
    expected = run.requests().nlargest(3, "ttft_ms")
    assert found.columns == ["request_id", "ttft_ms"] and found.truncated
    assert found.rows == [[row.request_id, row.ttft_ms] for row in expected.itertuples()]
    steps = query(run, "SELECT count(*), sum(end_ns - begin_ns) FROM steps").rows[0]
    table = run.table("steps")
    assert steps[0] == len(table) and float(steps[1]) == (table.end_ns - table.begin_ns).sum()
    assert query(run, "WITH late AS (SELECT * FROM requests WHERE e2e_ms > 1e9) SELECT * FROM late").rows == []


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("COPY requests TO '{path}/out.csv'", "give one SELECT"),
        ("SELECT 1; SELECT 2", "give one SELECT"),
        ("", "give one SELECT"),
        ("SET enable_external_access = true", "give one SELECT"),
        ("ATTACH '{path}/run.json'", "give one SELECT"),
        ("INSTALL httpfs", "give one SELECT"),
        ("SELECT * FROM read_text('{path}/run.json')", "query failed"),
        ("SELECT * FROM '{path}/requests.parquet'", "query failed"),
        ("SELECT * FROM glob('/*')", "query failed"),
        ("SELECT * FROM run", "query failed"),  # a variable of Python
        ("SELECT FROM WHERE", "not SQL"),
    ],
)
def test_nothing_but_the_tables_can_be_read_or_written(run, sql, says):
    before = sorted(run.path.rglob("*"))
    with pytest.raises(InputError, match=says):
        query(run, sql.format(path=run.path))
    assert sorted(run.path.rglob("*")) == before


def test_query_is_bounded_in_time_rows_and_text(run):
    begin = time.monotonic()
    with pytest.raises(InputError, match=r"stopped after 0\.3 s"):
        query(run, "SELECT count(*) FROM range(100000000000) a, range(1000) b", most_seconds=0.3)
    assert time.monotonic() - begin < 5
    with pytest.raises(InputError, match="most_rows is 5000"):
        query(run, "SELECT 1", 5000)
    long = query(run, "SELECT repeat('x', 50000) FROM range(100)", 100)
    assert long.truncated and len(long.rows) < 5
