"""`sojourn dev faults prove`: which runs it repeats, and what it refuses."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sojourn.commands.faults import faults
from sojourn.commands.faults_prove import _mendable_runs
from sojourn.diagnosis.score.truth import write_fault
from sojourn.loadgen.run.run_files import UNFINISHED, is_whole
from sojourn.metrics.errors import InputError
from tests.diagnosis.score.judgements import KV, TOKENISER, control, fault
from tests.metrics.foreign import Life, VllmPage, foreign_run, steady

LATE = [Life(due_s=0.2 * number, queue_s=0.3 * number) for number in range(30)]


def recorded(folder: Path, record, lives=LATE) -> None:
    write_fault(foreign_run(folder / f"{record.case}--{record.repeat}", lives, VllmPage()), record)


def test_only_planted_settings_that_hurt_are_repeated(tmp_path):
    recorded(tmp_path, control(repeat=1), steady(20))
    recorded(tmp_path, fault(KV, case="kv", repeat=1, base="chat"))
    recorded(tmp_path, fault(KV, case="kv", repeat=2, base="chat"))
    recorded(tmp_path, fault(KV, case="mild", repeat=1, base="chat"), steady(20))
    recorded(tmp_path, fault(TOKENISER, case="tokeniser", repeat=1, base="chat"))
    recorded(tmp_path, fault(KV, TOKENISER, case="two", repeat=1, base="chat"))
    assert [run.path.name for run in _mendable_runs(tmp_path, (), 1)] == ["kv--1"]
    assert [run.path.name for run in _mendable_runs(tmp_path, ["kv"], 2)] == ["kv--2"]
    assert not list(_mendable_runs(tmp_path, ["mild"], 1))
    with pytest.raises(InputError, match="no run of the case 'kw'"):
        list(_mendable_runs(tmp_path, ["kw"], 1))


def test_a_run_of_a_foreign_server_cannot_be_repeated(tmp_path):
    recorded(tmp_path, fault(KV, repeat=1))
    refused = CliRunner().invoke(faults, ["prove", str(tmp_path)])
    assert refused.exit_code and "cannot be repeated" in str(refused.exception)
    assert "no run of repeat 7" in str(CliRunner().invoke(faults, ["prove", str(tmp_path), "--repeat", "7"]).exception)


def test_a_proof_that_was_cut_short_is_made_again(tmp_path):
    assert not is_whole(tmp_path / "nowhere")
    run = foreign_run(tmp_path / "whole", steady(3), VllmPage())
    assert is_whole(run.path)
    run.update_meta(valid=False, invalid_reasons=[UNFINISHED])
    assert not is_whole(run.path)
