"""The figures of replays are those of recorded runs."""

import math

import pandas as pd
import pytest

from sojourn.metrics.request.goodput import measured
from sojourn.metrics.results.load import declared_window_s
from sojourn.replay.outcome import figures, recorded_answers, replayed_answers
from sojourn.replay.verdict.measured import measured_figures
from tests.metrics.synthetic import synthetic_run


def test_a_recorded_run_has_the_same_figures_in_a_replay_and_in_a_verdict(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=40)
    table = pd.read_parquet(run.path / "client.parquet")
    table.loc[::9, "status"] = "error"
    table.to_parquet(run.path / "client.parquet")
    meta = run.meta()
    answers = recorded_answers(measured(run.requests(), meta))
    found, known = figures(answers, meta["objectives"], declared_window_s(meta)), measured_figures(run)
    assert known == pytest.approx({name: found[name] for name in known})
    assert 0 < known["attainment"] < 1 and {"goodput_rps", "ttft_ms:p50", "tpot_ms:p50", "e2e_ms:p50"} <= known.keys()


def test_a_replay_that_sends_nothing_measured_has_no_share():
    answers = replayed_answers([])
    assert len(answers.due_ns) == 0 and math.isnan(figures(answers, [{"ttft_ms": 1.0}], None)["attainment"])
