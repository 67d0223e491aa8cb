"""Runs without objectives: what is late, which causes are named, and clients that leave before the first token."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.excess import excesses, losses
from sojourn.diagnosis.expectation import (
    MUCH_WORK,
    NOTICEABLE_MS,
    OWN_WORK,
    STRETCH,
    expected_bounds,
    is_own_work,
    with_expectation,
)  # fmt: skip
from sojourn.diagnosis.limits import NO_OBJECTIVE
from sojourn.diagnosis.shares import ledger_columns
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.server_alone import CLIENT_LEFT, SERVER_ALONE
from tests.metrics.synthetic import synthetic_run

MS = 1_000_000


def without_objectives(path, plant: str) -> RunDirectory:
    run = synthetic_run(path, plant=plant)
    run.update_meta(objectives=[])
    return run


def test_a_bound_is_twice_the_own_work_of_requests_with_much_of_it(tmp_path):
    run = without_objectives(tmp_path / "run", "healthy")
    rows = run.requests()
    (bounds,) = [entry for entry in expected_bounds(rows) if entry["klass"] == rows.klass.iloc[0]]
    same = rows[(rows.klass == rows.klass.iloc[0]) & (rows.status == "ok")]
    accounts = ledger_columns(same, "ttft")
    own_ms = accounts[[name for name in accounts if is_own_work(name)]].sum(axis=1).quantile(MUCH_WORK)
    least = max(STRETCH * own_ms, own_ms + NOTICEABLE_MS["ttft_ms"])
    assert least <= bounds["ttft_ms"] <= 1.1 * least
    assert bounds["source"] == OWN_WORK and "e2e_ms" not in bounds


def test_objectives_of_the_run_and_of_a_reader_stay(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="healthy")
    assert with_expectation(run) is run
    run.update_meta(objectives=[])
    judged = RunDirectory(run.path, [{"klass": "all", "ttft_ms": 5.0}])
    assert with_expectation(judged) is judged


def test_without_records_of_a_server_there_is_no_bound(tmp_path):
    run = without_objectives(tmp_path / "run", "healthy")
    (run.path / "requests.parquet").unlink()
    assert with_expectation(run) is run and "names no objective" in diagnose(run).headline


def test_a_healthy_run_without_objectives_is_healthy_by_its_own_work(tmp_path):
    found = diagnose(with_expectation(without_objectives(tmp_path / "run", "healthy")))
    assert (found.state, found.findings) == ("healthy", [])
    assert "take less than twice their own work" in found.headline and NO_OBJECTIVE in found.warnings


@pytest.mark.parametrize("plant", ["small_batch_cap", "overload", "slow_stream", "tiny_kv", "burst"])
def test_a_cause_is_the_same_with_and_without_objectives(tmp_path, plant):
    named = diagnose(synthetic_run(tmp_path / "with", plant=plant)).findings[0].key
    found = diagnose(with_expectation(without_objectives(tmp_path / "without", plant)))
    assert found.findings[0].key == named
    assert "their own work" in found.headline


def left_early(run: RunDirectory, leaves_after_ms: float) -> RunDirectory:
    """The run as a server alone recorded it, in which clients leave when they have waited so long for a token."""
    rows = pq.read_table(run.path / "requests.parquet").to_pylist()
    for row in rows:
        first, gives_up = row["first_written_ns"], row["arrived_ns"] + int(leaves_after_ms * MS)
        if first is not None and first > gives_up:
            spent = row["ttft_request_queue_ns"]
            row |= {name: 0 for name in row if name.startswith(("ledger_", "ttft_"))}
            row |= dict.fromkeys(("first_written_ns", "written_ns", "first_token_ns"))
            row |= {"token_ns": [], "output_tokens": 0, "finish_reason": "abort", "error": "", "finished_ns": gives_up,
                    "ledger_request_queue_ns": min(spent, int(leaves_after_ms * MS))}  # fmt: skip
    schema = pq.read_schema(run.path / "requests.parquet")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), run.path / "requests.parquet")
    (run.path / "client.parquet").unlink()
    run.update_meta(valid=False, invalid_reasons=[SERVER_ALONE])
    return RunDirectory.open(run.path)


def test_clients_that_leave_before_a_token_are_late_with_what_they_waited_for(tmp_path):
    run = left_early(synthetic_run(tmp_path / "run", plant="small_batch_cap"), leaves_after_ms=3000)
    facts = read_evidence(run)
    left = facts.rows[facts.rows.status == "cancelled"]
    assert len(left) > 10
    late = next(each for each in excesses(facts) if each.objective == "ttft_ms")
    assert set(left.index) <= set(late.missing) and late.ranked()[0][0] == "request.queue"
    assert not [each for each in losses(facts) if each.error == CLIENT_LEFT]
    assert diagnose(run).findings[0].key == "batch_cap"


def test_clients_that_leave_before_the_bound_are_lost_and_not_late(tmp_path):
    run = left_early(synthetic_run(tmp_path / "run", plant="small_batch_cap"), leaves_after_ms=3000)
    run = RunDirectory(run.path, [{"klass": "all", "ttft_ms": 5000.0}])
    facts = read_evidence(run)
    left = facts.rows[facts.rows.status == "cancelled"]
    assert not any(set(left.index) & set(each.missing) for each in excesses(facts))
    assert sum(each.missed for each in losses(facts) if each.error == CLIENT_LEFT) == len(left)
