"""A run that a server recorded alone has the server's stamps in place of a client's; any other run keeps its own."""

import pytest

from sojourn.metrics.run.server_alone import SERVER_ALONE, is_server_alone, meta_of, requests_of
from tests.metrics.synthetic import synthetic_run


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    def forget(records) -> None:
        records.client.clear()

    run = synthetic_run(tmp_path_factory.mktemp("runs") / "run", requests=12, keep=forget)
    run.update_meta(valid=False, invalid_reasons=[SERVER_ALONE])
    return run


def test_latencies_run_from_the_arrival_to_the_last_write(alone):
    rows, served = requests_of(alone, alone.meta()), alone.table("requests").sort_values("arrived_ns")
    assert len(rows) == 12 and (rows.status == "ok").all()
    assert rows.e2e_ms.tolist() == ((served.written_ns - served.arrived_ns) / 1e6).tolist()
    assert rows.ttft_ms.tolist() == ((served.first_written_ns - served.arrived_ns) / 1e6).tolist()
    assert rows.tpot_ms.notna().all() and (rows.unaccounted_ns.abs() < 1e6).all()
    assert meta_of(alone)["valid"] is None and not meta_of(alone)["invalid_reasons"]


def test_other_reasons_stay(alone, tmp_path):
    other = synthetic_run(tmp_path / "run", requests=5, keep=lambda records: records.client.clear())
    other.update_meta(valid=False, invalid_reasons=[SERVER_ALONE, "its folder was removed"])
    assert meta_of(other)["valid"] is False and meta_of(other)["invalid_reasons"] == ["its folder was removed"]


def test_run_with_a_client_keeps_its_own_stamps(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=5)
    assert not is_server_alone(run, run.meta()) and requests_of(run, run.meta()).equals(run.requests())
