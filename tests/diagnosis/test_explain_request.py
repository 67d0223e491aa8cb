"""`sojourn explain` tells one request's time, its waits, through whom, and its slow tokens; else a sentence."""

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from sojourn.diagnosis.explain_request import explain
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import replace_table
from tests.metrics.synthetic import synthetic_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    return synthetic_run(tmp_path_factory.mktemp("runs") / "run", plant="long_beside_chat", requests=40)


def printed(run: RunDirectory, request_id: str, token: int | None = None) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(explain(run, request_id, token))
    return captured.get()


def test_request_is_told_with_its_ledger_its_waits_its_offenders_and_its_slow_tokens(run):
    requests = run.requests()
    victim = requests[requests.klass == "chat"].nlargest(1, "ledger_request_interference_ns").iloc[0]
    text = printed(run, victim.request_id)
    for words in (
        "Where its time went",
        "What it waited for",
        "Requests that delayed it",
        "Its slowest tokens",
        "document",
    ):
        assert words in text
    assert f"{victim.ledger_request_interference_ns / 1e6:,.0f}" in text
    assert "request.interference: " in text and "prompt tokens of" in text


def test_one_gap_is_told_in_full(run):
    victim = run.requests().nlargest(1, "output_tokens").request_id.iloc[0]
    text = printed(run, victim, 1)
    assert "between token 0 and token 1" in text and "compute.decode" in text and "Its steps" in text
    assert "between its arrival and token 0" in printed(run, victim, 0)


def test_what_cannot_be_explained_is_refused_with_the_way_out(run, tmp_path):
    with pytest.raises(RunDataError, match="the run has no request absent; it has, among others, r00000"):
        explain(run, "absent")
    with pytest.raises(RunDataError, match="token 4000 of r00000 is not there: it has tokens 0 to"):
        explain(run, "r00000", 4000)
    foreign = synthetic_run(tmp_path / "run", requests=5, keep=lambda records: records.requests.clear())
    assert "No server recorded its steps" in printed(foreign, "r00001")
    with pytest.raises(RunDataError, match="no server recorded the steps of r00001"):
        explain(foreign, "r00001", 0)


def test_a_column_that_an_older_run_lacks_is_not_shown(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=2, keep=lambda records: records.requests.clear())
    table = run.path / "client.parquet"
    replace_table(table, pq.read_table(table).drop_columns(["tenant", "klass"]))
    assert printed(run, "r00001").startswith("request r00001 ·") and "nan" not in printed(run, "r00001")
