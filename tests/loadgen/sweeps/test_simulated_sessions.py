"""The most sessions of a recorded closed loop, by replays alone."""

import pytest

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.sweeps.simulated_sessions import simulate_sessions
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.predictor import predictor_of
from tests.replay.simulated_run import random_asks, write_run

SLO = [{"klass": "all", "ttft_ms": 25.0, "source": "made up"}]


def closed_run(path, objectives=SLO) -> RunDirectory:
    run = write_run(path, random_asks(3, 60, mean_gap_ns=20_000_000), objectives=objectives, max_num_seqs=4)
    scenario = {"name": "simulated", "arrivals": {"process": "concurrency", "in_flight": 3, "duration_s": 1}}
    run.update_meta(scenario=scenario | {"measure": {}}, arrivals={"loop": "closed"})
    return RunDirectory.open(run.path)


@pytest.mark.slow
def test_number_of_sessions_keeps_the_objectives_and_one_more_does_not(tmp_path):
    run = closed_run(tmp_path / "run")
    found = simulate_sessions(run, 0.9, 32)
    assert found.at_least <= found.sessions <= found.at_most and 1 <= found.sessions < 32
    predictor = predictor_of(run)
    kept, missed = (predictor.predict([Change(sessions=found.sessions + more)])[0].attainment for more in (0, 1))
    assert kept.median >= 0.9 > missed.median
    assert simulate_sessions(run, 0.9, 1).sessions == 1  # a lower bound


def test_open_load_and_a_run_without_objectives_are_refused(tmp_path):
    with pytest.raises(ScenarioError, match=r"is an open load, which has no sessions; replay a run of a closed loop"):
        simulate_sessions(write_run(tmp_path / "open", random_asks(3, 40), objectives=SLO), 0.9, 10)
    with pytest.raises(ScenarioError, match="has no objectives to judge sessions by"):
        simulate_sessions(closed_run(tmp_path / "none", objectives=[]), 0.9, 10)
