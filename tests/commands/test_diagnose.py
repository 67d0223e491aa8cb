"""`sojourn diagnose RUN --symptom`: a tree that fits 100 columns and ends with the measurement to make next."""

import json

from typer.testing import CliRunner

from sojourn.commands.program import app
from tests.metrics.synthetic import synthetic_run


def test_symptom_prints_the_tree_and_ends_with_the_measurement(tmp_path):
    run = str(synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=40).path)
    printed = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["diagnose", run, "--symptom", "first token slow"])
    assert printed.exit_code == 0, printed.output
    lines = printed.output.splitlines()
    assert max(map(len, lines)) <= 100
    assert "My first token is slow" in lines[0] and any("request" in line and "leads here" in line for line in lines)
    assert "measure next" in printed.output and lines[-1].strip().startswith("$ sojourn run")
    document = CliRunner().invoke(app, ["diagnose", run, "--symptom", "high_ttft", "--json"])
    tree = json.loads(document.stdout)
    assert tree["branches"][0]["status"] == "leads_here" and tree["finding"] == 0
    wrong = CliRunner().invoke(app, ["diagnose", run, "--symptom", "weather"])
    assert wrong.exit_code and "vram_fills_quickly" in str(wrong.exception or wrong.output)


def test_a_run_without_objectives_is_judged_by_those_of_the_reader_and_keeps_its_own(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=40)
    bounds = {name: value for name, value in run.meta()["objectives"][0].items() if name.endswith("_ms") and value}
    run.update_meta(objectives=[])
    slo = " ".join(f"{name.removesuffix('_ms')}:{value:g}" for name, value in bounds.items())
    judged = json.loads(CliRunner().invoke(app, ["diagnose", str(run.path), "--slo", slo, "--json"]).stdout)
    assert judged["state"] != "inconclusive" and judged["findings"][0]["key"] == "batch_cap"
    assert run.meta()["objectives"] == [] and not (run.path / "diagnosis.json").exists()
    wrong = CliRunner().invoke(app, ["diagnose", str(run.path), "--slo", "ttft:fast"])
    assert wrong.exit_code and "--slo" in str(wrong.exception or wrong.output)
