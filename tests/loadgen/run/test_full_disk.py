"""A disk that is full, and a run directory that is removed, while a load is recorded."""

import errno
import shutil

import pytest

from sojourn.loadgen.client import event_log
from sojourn.loadgen.record.live_table import LiveTable
from sojourn.loadgen.run import run_files
from sojourn.loadgen.run.run_files import begin_run, finish_run, recover
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.exit_codes import Ended, of_load
from sojourn.metrics.run.directory import RunDirectory
from tests.loadgen.scenarios import replay, scenario
from tests.loadgen.scripted_server import Script, ScriptedServer


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def run_dir(tmp_path):
    return begin_run(tmp_path / "run", scenario(), 0, {}).path


def test_a_run_that_cannot_be_gathered_is_not_valid_and_is_gathered_later(run_dir, monkeypatch):
    replay(scenario(), ScriptedServer(Script()).start().url, run_dir)
    (run_dir / "client.parquet").unlink()
    with monkeypatch.context() as disk:
        disk.setattr(run_files, "build_client_table", full)
        with pytest.raises(RunDataError, match=r"not a valid run.*No space left.*make room on the disk, then: sojourn"):
            finish_run(RunDirectory(run_dir), [])
    meta = RunDirectory.open(run_dir).meta()
    assert meta["valid"] is False and "could not be gathered" in meta["invalid_reasons"][0]
    assert recover(run_dir)
    assert set(RunDirectory.open(run_dir).table("client").status) == {"ok"}


def test_events_that_are_never_written_end_the_load_with_a_sentence_and_one_line_in_its_log(
    run_dir, monkeypatch, caplog
):
    monkeypatch.setattr(event_log, "write_events", full)
    monkeypatch.setattr(event_log, "FLUSH_SECONDS", 0.05)
    script = Script(gap_s=0.1, num_tokens=3)
    with pytest.raises(RunDataError, match=r"the last \d+ events cannot be written to .* \(\[Errno 28\] No space left"):
        replay(scenario(), ScriptedServer(script).start().url, run_dir)
    assert len([line for line in caplog.messages if "events stay in memory" in line]) == 1


def test_events_wait_in_memory_until_the_disk_takes_them(run_dir, monkeypatch):
    refusals = [True] * 3

    def nearly_full(*arguments, write=event_log.write_events, **options):
        return full() if refusals and refusals.pop() else write(*arguments, **options)

    monkeypatch.setattr(event_log, "write_events", nearly_full)
    monkeypatch.setattr(event_log, "FLUSH_SECONDS", 0.05)
    done = replay(scenario(), ScriptedServer(Script(gap_s=0.1, num_tokens=3)).start().url, run_dir)
    assert not refusals and {record.status for record in done.records} == {"ok"}


def test_a_removed_run_directory_is_logged_once_and_ends_in_a_sentence(tmp_path, run_dir, caplog):
    live = LiveTable(run_dir, [])
    live.update()
    shutil.rmtree(run_dir)
    live.update()
    live.update()
    assert len(caplog.messages) == 1 and "its folder was removed; the load goes on" in caplog.text
    with pytest.raises(RunDataError, match="was removed during the run"):
        finish_run(RunDirectory(run_dir), [])


@pytest.mark.parametrize(("valid", "served", "failed", "code"), [
    (True, 1, 0, 0), (True, 5, 5, 0), (True, 5, 6, Ended.MOST_FAILED), (True, 0, 0, Ended.MOST_FAILED),
    (False, 9, 0, Ended.NOT_VALID),
    (False, 0, 9, Ended.NOT_VALID),
])  # fmt: skip
def test_a_load_fails_where_more_requests_failed_than_were_served(valid, served, failed, code):
    assert of_load(valid, served, failed) == code
