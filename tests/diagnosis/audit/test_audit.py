"""The audits of a run: fixed, complete, worth what their fixes regain; and a budget that CI can hold."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.diagnosis.audit.audits import AUDITS, OF_CAUSES, audited
from sojourn.diagnosis.audit.budget import Budget, judge, read_budget
from sojourn.diagnosis.audit.markdown import render
from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.evidence_level import view_at_level
from sojourn.diagnosis.expectation import with_expectation
from sojourn.metrics.errors import InputError
from sojourn.scripting.predictor import predictor
from tests.metrics.synthetic import synthetic_run


def found(run, level="all", **bounds):
    expected = with_expectation(run)
    diagnosis = diagnose(view_at_level(expected, level), predictor=predictor(expected))
    return diagnosis, audited(diagnosis, read_evidence(expected, level), **bounds)


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    return synthetic_run(tmp_path_factory.mktemp("runs") / "capped", plant="small_batch_cap", requests=60)


def test_each_cause_has_one_audit():
    listed = [key for audit in OF_CAUSES for key in audit.causes]
    assert sorted(listed) == sorted(CAUSES) and len({audit.key for audit in AUDITS}) == len(AUDITS)


def test_a_cause_fails_its_audit_and_is_worth_what_its_fix_regains(capped):
    diagnosis, audits = found(capped)
    [batch] = [each for each in audits if each.key == "batch"]
    finding = next(each for each in diagnosis.findings if each.key == "batch_cap")
    assert batch.status == "fail" and finding.cause in batch.says and finding.fix.change in batch.fix
    assert batch.worth == pytest.approx(finding.goodput_gain) and batch.worth > 0.1
    assert len(audits) == len(AUDITS) and audits[0] is batch, "what is worth most comes first"


@pytest.mark.parametrize("plant", ["healthy", "small_batch_cap", "tiny_kv"])
def test_less_evidence_never_makes_more_audits_pass(tmp_path, plant):
    run = synthetic_run(tmp_path / "run", plant=plant, requests=40)
    measurable = [
        {each.key for each in found(run, level)[1] if each.status != "not measurable"}
        for level in ("client", "requests", "all")
    ]
    assert measurable[0] <= measurable[1] <= measurable[2]
    _, audits = found(run)
    if plant == "healthy":
        assert not [each.key for each in audits if each.status == "fail"]
    absent = {each.key for each in audits if each.status == "not measurable"}
    assert {"fleet", "parallel"} <= absent


def test_a_budget_is_kept_broken_or_not_measured(capped):
    diagnosis, audits = found(capped, attainment=0.0)
    mean = next(each for each in diagnosis.results.latencies if each.name == "ttft_ms").mean.value
    rate = diagnosis.goodput[0].goodput_rps
    for factor, kept in ((0.99, False), (1.0, True), (1.01, True)):
        lines = judge(
            Budget(attainment=0.0, ttft_ms={"mean": mean * factor}, goodput_rps=rate * (2 - factor)), diagnosis, audits
        )
        by_name = {line.name: line.kept for line in lines}
        assert by_name["TTFT mean"] is kept and by_name["goodput"] is (factor >= 1.0)
        assert by_name["objectives"] is True
    [unmeasured] = judge(Budget(audits=["fleet"]), diagnosis, audits)[2:]
    assert unmeasured.kept is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"ttft_ms": {"p42": 3}}, "p50, p90"), ({"ttft_ms": {"p90": 0}}, "above 0"), ({"tftt_ms": {}}, "a budget has"),
        ({"attainment": 90}, "between 0 and 1"), ({"audits": ["bach"]}, "known are"), ([1], "a budget has"),
        ({"goodput_rps": "fast"}, "goodput_rps"),
    ],
)  # fmt: skip
def test_what_is_no_budget_is_told(tmp_path, content, says):
    (tmp_path / "b.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match=says):
        read_budget(tmp_path / "b.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        read_budget(tmp_path / "none.yaml")


def test_the_page_has_every_audit_and_its_exit_code_is_the_budgets(capped, tmp_path):
    diagnosis, audits = found(capped)
    page = render(diagnosis, audits, [])
    assert all(each.key in page if each.status == "fail" else each.title in page for each in audits)
    budget, out = tmp_path / "budget.yaml", tmp_path / "audit.md"
    for attainment, code in ((0.0, 0), (1.0, 1)):
        budget.write_text(json.dumps({"attainment": attainment}))
        result = CliRunner().invoke(
            app,
            ["report", str(capped.path), "--budget", str(budget), "--output", str(out), "--against", str(capped.path)],
        )
        assert result.exit_code == code, result.output
        assert "attainment" in out.read_text() and "Since the run before" in out.read_text()
    assert Path(out).read_text().count("| objectives |") == 2  # of the budget, and of what fails
