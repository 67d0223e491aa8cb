"""What the verbs leave behind when their reader goes away, or when they are stopped."""

import os
from dataclasses import replace

import pytest

from sojourn.commands import cli, summary
from sojourn.commands.cli import PipeSafeConsole, run_progress
from sojourn.metrics.exit_codes import Ended
from tests.metrics.synthetic import PLANTS, synthetic_run


def test_a_reader_that_leaves_ends_the_printing_and_nothing_else(tmp_path, monkeypatch):
    run = synthetic_run(tmp_path / "run", requests=20)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as unread:
        monkeypatch.setattr(summary, "out", PipeSafeConsole(file=unread))
        summary.summarise(run)  # as `load | head`: no error, so a result file is still written after it
    assert (run.path / "report.html").stat().st_size > 100_000


@pytest.mark.parametrize(("meta", "failing", "code"), [
    ({}, 0.0, 0), ({"valid": False, "invalid_reasons": ["sent late"]}, 0.0, Ended.NOT_VALID),
    ({}, 1.0, Ended.MOST_FAILED),
    ({}, 0.9, Ended.MOST_FAILED),
])  # fmt: skip
def test_exit_code_tells_a_run_that_is_not_valid_and_one_in_which_most_failed(tmp_path, capsys, meta, failing, code):
    run = synthetic_run(tmp_path / "run", requests=20, plant=replace(PLANTS["healthy"], failing_share=failing))
    run.update_meta(**meta)
    assert summary.summarise(run) == code
    assert ("of 20 measured requests failed" in capsys.readouterr().err) == (code == Ended.MOST_FAILED)


@pytest.mark.parametrize(("error", "says"), [(KeyboardInterrupt, "stopped; what was recorded is in"),
                                             (ValueError, "what was recorded is in")])  # fmt: skip
def test_a_run_that_is_stopped_is_named_with_the_command_that_reads_it(tmp_path, capsys, monkeypatch, error, says):
    monkeypatch.setattr(cli, "out", PipeSafeConsole(width=40))
    for started in (True, False):
        path = tmp_path / f"run-{started}"
        with pytest.raises(error), run_progress(path):
            if started:
                synthetic_run(path, requests=20)
            raise error
        printed = capsys.readouterr().out
        assert printed == (f"{says} {path}: sojourn diagnose {path}\n" if started else "")


def test_parts_of_a_stopped_load_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "out", PipeSafeConsole(width=40))
    with pytest.raises(KeyboardInterrupt), run_progress(tmp_path / "first"):
        synthetic_run(tmp_path / "first-alone", requests=20)
        raise KeyboardInterrupt
    assert f"stopped; what was recorded is in {tmp_path / 'first-alone'}: " in capsys.readouterr().out


def test_a_folder_that_held_a_run_before_is_not_named_as_if_it_were_this_one(tmp_path, capsys):
    path = synthetic_run(tmp_path / "run", requests=20).path
    with pytest.raises(ValueError, match="not empty"), run_progress(path):
        raise ValueError(f"{path} is not empty")
    assert capsys.readouterr().out == ""
