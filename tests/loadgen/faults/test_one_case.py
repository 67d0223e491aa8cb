"""A case from its file to its record, with a real server and a fault of each place."""

import pyarrow.parquet as pq
import pytest
import yaml

from sojourn.diagnosis.score.truth import read_fault
from sojourn.loadgen.faults.case import load_case
from sojourn.loadgen.faults.run_cases import Campaign, plan_runs
from sojourn.metrics.run.directory import RunDirectory


@pytest.mark.slow
@pytest.mark.server
def test_a_case_runs_with_its_faults_inside_and_around_the_server(tmp_path):
    change = {
        "arrivals": {"process": "constant", "rate_rps": 10, "duration_s": 2},
        "engine": {"faults": "slow_sampler:ms=30"},
        "around": [{"fault": "network", "delay_ms": 100}, {"fault": "noisy_neighbour", "duty": 0.05}],
    }
    truth = {"keys": ["slow_sampler"], "lifecycles": ["token"], "kinds": ["fault"]}
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"base": "chat", "description": "x", "truths": [truth], "severities": [change]}))
    (done,) = Campaign(tmp_path / "runs").run(plan_runs([load_case(file)], 1))
    run = RunDirectory.open(tmp_path / "runs" / "case--1--1")
    assert done.attainment < 0.2 and done.base is None and done.hurts is None
    assert run.meta()["engine"]["faults"] == "slow_sampler:ms=30"
    assert read_fault(run.path).truths[0].keys == ["slow_sampler"]
    requests = run.requests()
    assert (requests.first_token_ns - requests.sent_ns).min() >= 200e6
    assert pq.read_table(run.path / "steps.parquet")["sampling_ns"].to_pandas().median() >= 30e6
    assert (run.path / "scrapes.parquet").is_file()
    assert "on purpose; faults=slow_sampler:ms=30" in (run.path / "server.log").read_text()
