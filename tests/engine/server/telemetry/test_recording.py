"""A server's run directory on a disk that is full, and one that was removed: what remains, and what is reported."""

import errno
import shutil
from random import Random

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.server import serve
from sojourn.engine.server.telemetry.recording import REMOVED, Recording
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.random_records import random_request


def recording(folder) -> Recording:
    return Recording(EngineConfig(model="tiny-model", run_dir=folder))


def add(recorded: Recording, index: int) -> None:
    recorded.recorder.append("requests", random_request(Random(index), index))


def test_a_run_without_a_loss_ends_with_the_number_of_its_requests(tmp_path, capsys):
    recorded = recording(tmp_path / "run")
    add(recorded, 1)
    assert recorded.close() is None
    assert capsys.readouterr().out == f"Sojourn has stopped; 1 requests are recorded in {tmp_path / 'run'}\n"


def test_tables_that_cannot_be_joined_stay_readable_and_the_reason_is_a_sentence(tmp_path, monkeypatch, capsys):
    recorded = recording(tmp_path / "run")
    add(recorded, 1)
    monkeypatch.setattr(RunDirectory, "compact", lambda run: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
    lost = recorded.close()
    assert "tables stay in segments" in lost and "no space" in lost and lost.endswith("1 requests are recorded")
    assert not capsys.readouterr().out
    assert len(RunDirectory.open(tmp_path / "run").table("requests")) == 1


def test_a_removed_run_directory_is_described_again_and_its_loss_is_reported(tmp_path):
    recorded = recording(tmp_path / "run")
    add(recorded, 1)
    recorded.recorder.flush()
    shutil.rmtree(tmp_path / "run")
    recorded.recorder.flush()
    recorded.restore()
    add(recorded, 2)
    lost = recorded.close()
    assert "1 records could not be written (their file was removed)" in lost and "1 requests are recorded" in lost
    run = RunDirectory.open(tmp_path / "run")
    assert run.table("requests").request_id.tolist() == [random_request(Random(2), 2).request_id]
    assert REMOVED in run.meta()["invalid_reasons"]


def test_a_server_that_lost_records_fails_at_its_end(tmp_path, monkeypatch):
    async def serve_nobody(server, core, listener, url):
        listener.close()
        server.config.app.state.front.first.telemetry.failure = "12 records could not be written"

    monkeypatch.setattr(serve, "_run", serve_nobody)
    with pytest.raises(RunDataError, match="12 records could not be written"):
        serve.serve(EngineConfig(model="tiny-model", port=0))
