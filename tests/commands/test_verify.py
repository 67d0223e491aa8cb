"""`sojourn verify` and the end of `sojourn run`: the verdict, its exit code, and the ledger that keeps it."""

import json
import os
import shlex
from dataclasses import replace

import msgspec
import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.commands.prove_run import claim_of, print_claim
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.verdict.ledger import read
from tests.metrics.synthetic import PLANTS, synthetic_run
from tests.replay.verdict.test_verify import prediction

CAP = {"max_num_seqs": 18}


@pytest.fixture
def pair(tmp_path):
    """A run whose diagnosis predicts what a larger batch gives, and the run with that batch."""
    few = replace(PLANTS["healthy"], settings=replace(PLANTS["healthy"].settings, max_num_seqs=2))
    many = replace(few, settings=replace(few.settings, **CAP))
    runs = [synthetic_run(tmp_path / name, plant=plant, requests=40) for name, plant in (("a", few), ("b", many))]
    return [run.path for run in runs]


def state(folder, *predictions) -> None:
    findings = [{"key": "batch_cap", "prediction": msgspec.to_builtins(each)} for each in predictions]
    (folder / "diagnosis.json").write_text(json.dumps({"findings": findings}))


def test_verify_tells_hit_from_miss_and_keeps_both(pair):
    a, b = map(str, pair)
    verify = ["verify", a, b]
    state(pair[0], prediction(CAP, (0.9, 0.95, 1.0)))
    hit = CliRunner(env={"COLUMNS": "120"}).invoke(app, verify)
    assert hit.exit_code == 0 and "hit: attainment" in hit.output, hit.output
    assert "max_num_seqs=2 → max_num_seqs=18" in hit.output and "the diagnosis of a (batch_cap)" in hit.output
    state(pair[0], prediction(CAP, (0.1, 0.2, 0.3)))
    miss = CliRunner().invoke(app, [*verify, "--json"])
    assert miss.exit_code == 1 and json.loads(miss.stdout)["entry"]["hit"] is False
    assert [entry.hit for entry in read(pair[0].parent / "predictions.jsonl")] == [True, False]
    listed = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["verify", a, "--list"])
    assert listed.exit_code == 0 and "0 of 1 predictions hit" in listed.output, "the pair counts once"


def test_verify_says_what_it_needs(pair, tmp_path):
    alone = CliRunner().invoke(app, ["verify", str(pair[0])])
    assert "or --list" in str(alone.exception)
    empty = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["verify", "--list", "--ledger", str(tmp_path / "none.jsonl")]
    )
    assert empty.exit_code == 0 and "holds no prediction yet" in empty.output


def test_a_run_ends_with_the_first_fix_that_settings_can_prove(pair, capsys):
    assert claim_of(pair[0]) is None, "nobody diagnosed it"
    state(pair[0], prediction({}), prediction(CAP, (0.9, 0.95, 1.0)))
    claim = claim_of(pair[0])
    assert claim.prediction.change.settings == CAP
    print_claim(claim)
    printed = " ".join(capsys.readouterr().out.split())
    assert "with max_num_seqs=18, 95% of the requests would keep their objectives" in printed


def test_a_prediction_that_nearly_every_outcome_fits_is_no_verdict(pair, capsys):
    a, b = map(str, pair)
    for bounds in ((0.01, 0.5, 0.92), (0.01, 0.5, 0.99)):  # the first ones do not hold what was measured
        state(pair[0], prediction(CAP, bounds))
        assert CliRunner().invoke(app, ["verify", a, b]).exit_code == 0
    said = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["verify", a, b])
    assert said.exit_code == 0 and "not predicted: attainment could not be predicted (1.0% – 99.0%)" in said.output
    listed = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["verify", a, "--list"])
    assert listed.exit_code == 0 and "no score" in listed.output
    print_claim(claim_of(pair[0]))
    assert "what max_num_seqs=18 gives cannot be predicted (" in capsys.readouterr().out


def test_verify_takes_the_speed_of_the_device_and_no_other_change(pair):
    wrong = CliRunner().invoke(app, ["verify", *map(str, pair), "--set", "max_num_seqs=3"])
    assert "only device_speed" in str(wrong.exception)
    state(pair[0], prediction(CAP, (0.9, 0.95, 1.0)))
    other = CliRunner().invoke(app, ["verify", *map(str, pair), "--set", "device_speed=1.5"])
    assert "no request records" in str(other.exception) or "device_speed=1.5" in other.output, other.output


@pytest.mark.parametrize(("proved", "ended", "code"), [(True, 0, 0), (False, 0, 1), (False, 4, 1), (True, 4, 4)])
def test_a_run_prints_the_command_that_proves_its_fix_and_carries_it_out(pair, monkeypatch, proved, ended, code):
    """In today's words, with what was given but the folder, which the run has taken."""
    state(pair[0], prediction(CAP, (0.9, 0.95, 1.0)))
    asked = []
    monkeypatch.setattr("sojourn.loadgen.run.experiment.run_scenario", lambda *_, **__: RunDirectory.open(pair[0]))
    monkeypatch.setattr("sojourn.commands.run.summarise", lambda *_, **__: ended)
    monkeypatch.setattr("sojourn.commands.run.is_proved", lambda run, claim: asked.append((run.path, claim)) or proved)
    words = ["--set", "max_num_seqs=2", "--run-dir", str(pair[0].parent / "new"), "--seed", "3"]
    first = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["demo", *words])
    assert first.exit_code == ended and not asked, first.output
    assert "run demo --set max_num_seqs=2 --seed 3 --prove   (this run" in first.output
    second = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["run", "demo", *words, "--prove"])
    assert (second.exit_code, [path for path, _ in asked]) == (code, [pair[0]]), second.output
    assert dict(asked[0][1].prediction.change.settings) == CAP and "prove it" not in second.output


@pytest.mark.parametrize(
    "words",
    [
        ["--header", "X-Key: s3cret", "-oFOLDER"], ["--header=X-Key: s3cret", "-o", "FOLDER"],
        ["-HX-Key: s3cret", "--output=FOLDER"], ["-H", "X-Key:s3cret", "--run-dir=FOLDER"],
        ["--headers=X-Key: s3cret", "--output", "FOLDER"], ["-vHX-Key: s3cret", "-voFOLDER"],
        ["-H", "X-Key: ${MINE}", "-oFOLDER"],
    ],
)  # fmt: skip
def test_a_printed_command_names_no_secret_and_no_folder_that_is_taken(pair, monkeypatch, words):
    state(pair[0], prediction(CAP, (0.9, 0.95, 1.0)))
    monkeypatch.setattr("sojourn.loadgen.run.experiment.run_scenario", lambda *_, **__: RunDirectory.open(pair[0]))
    monkeypatch.setattr("sojourn.commands.run.summarise", lambda *_, **__: 0)
    monkeypatch.setattr("os.environ", os.environ.copy())
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["run", "demo", "--seed", "3", *words])
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("prove it")]
    again = shlex.split(line.removeprefix("prove it").partition("   (")[0])
    assert "s3cret" not in done.output and "FOLDER" not in done.output, done.output
    variable = "MINE" if "MINE" in words[1] else "SOJOURN_HEADER_X_KEY"
    given = ["--seed", "3", *["--verbose"] * words[0].startswith("-v")]
    assert again[again.index("run") :] == ["run", "demo", *given, "--header", f"X-Key: ${{{variable}}}", "--prove"]
    assert (f"set {variable} first" in done.output) == (variable != "MINE")
