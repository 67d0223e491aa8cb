"""What the verbs leave behind when their reader goes away, or when they are stopped."""

import os
from dataclasses import replace

import pytest

from commands import frame, telling
from commands.frame import UnreadConsole, run_told_when_stopped
from loadgen.exit_code import NOT_VALID, NOTHING_SERVED
from tests.metrics.synthetic import PLANTS, synthetic_run


def test_a_reader_that_leaves_ends_the_printing_and_neither_the_report_nor_what_comes_after(tmp_path, monkeypatch):
    run = synthetic_run(tmp_path / "run", requests=20)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as unread:
        monkeypatch.setattr(telling, "out", UnreadConsole(file=unread))
        telling.tell(run)  # as `load | head`: no error, so a result file is still written after it
    assert (run.path / "report.html").stat().st_size > 100_000


@pytest.mark.parametrize(("meta", "failing", "code"), [
    ({}, 0.0, 0), ({"valid": False, "invalid_reasons": ["sent late"]}, 0.0, NOT_VALID), ({}, 1.0, NOTHING_SERVED),
])  # fmt: skip
def test_exit_code_tells_a_run_that_is_not_valid_and_one_in_which_nothing_was_served(tmp_path, meta, failing, code):
    run = synthetic_run(tmp_path / "run", requests=20, plant=replace(PLANTS["healthy"], failing_share=failing))
    run.update_meta(**meta)
    assert telling.tell(run) == code


@pytest.mark.parametrize(("error", "says"), [(KeyboardInterrupt, "stopped; what was recorded is in"),
                                             (ValueError, "what was recorded is in")])  # fmt: skip
def test_a_run_that_is_stopped_is_named_with_the_command_that_reads_it(tmp_path, capsys, monkeypatch, error, says):
    monkeypatch.setattr(frame, "out", UnreadConsole(width=40))
    for begun in (True, False):
        path = tmp_path / f"run-{begun}"
        with pytest.raises(error), run_told_when_stopped(path):
            if begun:
                synthetic_run(path, requests=20)
            raise error
        told = capsys.readouterr().out
        assert told == (f"{says} {path}: sojourn diagnose {path}\n" if begun else "")


def test_a_folder_that_held_a_run_before_is_not_named_as_if_it_were_this_one(tmp_path, capsys):
    path = synthetic_run(tmp_path / "run", requests=20).path
    with pytest.raises(ValueError, match="not empty"), run_told_when_stopped(path):
        raise ValueError(f"{path} is not empty")
    assert capsys.readouterr().out == ""
