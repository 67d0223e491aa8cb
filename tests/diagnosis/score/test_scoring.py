"""Recorded runs are diagnosed once at each level that they have evidence for, and the page shows what came of it."""

import json
import os
import shutil
import subprocess
import sys

import msgspec
import pytest

from sojourn.diagnosis.confidence import FEATURES, confidence
from sojourn.diagnosis.score.accuracy import accuracy_of, misses
from sojourn.diagnosis.score.document import page
from sojourn.diagnosis.score.scoring import CACHE_FILE, CODE, base_attainment, score, with_confidence
from sojourn.diagnosis.score.threshold_rules import BASELINE
from sojourn.diagnosis.score.truth import FAULT_FILE, FaultRecord, read_fault, write_fault
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.verdict.ledger import FILE_NAME, Checked, LedgerEntry, append
from tests.diagnosis.score.judgements import KV, cause, control, fault, judged, said
from tests.metrics.foreign import Life, VllmPage, foreign_run, steady

LEVELS = ("client", "metrics", "steps", BASELINE)
# 40 requests in 4 s, of which two run at a time: the queue grows to 6 s.
CROWD = [Life(due_s=0.1 * n, queue_s=0.15 * n, prefill_s=0.05, decode_s=0.45, preemptions=n % 2) for n in range(40)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with a control and a fault of the same workload."""
    folder = tmp_path_factory.mktemp("recorded")
    write_fault(foreign_run(folder / "chat", steady(20), VllmPage()), control(repeat=1))
    full = foreign_run(folder / "kv", CROWD, VllmPage(), kv_use=0.98)
    write_fault(full, fault(KV, repeat=1, base="chat"))
    return folder


@pytest.fixture
def folder(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "runs")


class Clerk:
    """A diagnosis that says the same of every run, and counts how often it was asked."""

    def __init__(self):
        self.asked: list[tuple[str, str]] = []

    def __call__(self, run, level):
        self.asked.append((run.name, level))
        if level == "metrics":
            raise ValueError("of this level nothing is known")
        key = {"key": "kv_pool", "object": "pool", "lifecycles": ["memory"], "kind": "policy", "cause": "full",
               "goodput_lost": 0.5, "confidence": 0.8, "fix": {"change": ""}, "evidence": []}  # fmt: skip
        found = [] if run.name == "chat" else [key]
        return {"state": "degraded" if found else "healthy", "headline": "h", "bottleneck": None, "findings": found}


@pytest.fixture(scope="module")
def scored(recorded, tmp_path_factory):
    folder, clerk = shutil.copytree(recorded, tmp_path_factory.mktemp("scored") / "runs"), Clerk()
    found = score(folder, clerk, levels=LEVELS, processes=1)
    assert sorted(clerk.asked) == [(run, level) for run in ("chat", "kv") for level in ("client", "metrics")]
    return folder, found


def test_each_run_is_diagnosed_once_at_the_levels_that_it_has_tables_for(scored):
    folder, found = scored
    assert {level: len(judgements) for level, judgements in found.items()} == {
        "client": 2, "metrics": 2, "steps": 0, BASELINE: 2
    }  # fmt: skip
    healthy, full = found["client"]
    assert healthy.false_alarm is False and full.first and full.counts and full.base_attainment == 1.0
    assert found["metrics"][1].said.state == "failed" and found["metrics"][1].first is False
    clerk = Clerk()
    assert score(folder, clerk, levels=LEVELS, processes=1) == found and not clerk.asked


def test_a_changed_run_is_diagnosed_anew_and_the_others_are_not(folder):
    clerk = Clerk()
    score(folder, clerk, levels=["client"], processes=1)
    os.utime(folder / "kv" / "run.json", ns=(1, 1))
    score(folder, clerk, levels=["client"], processes=1)
    assert clerk.asked == [("chat", "client"), ("kv", "client"), ("kv", "client")]


def test_every_room_that_makes_a_verdict_is_in_the_fingerprint():
    """What `diagnose` and its replays import: a changed cause keeps no old verdict."""
    code = "import sys, sojourn.diagnosis.diagnose, sojourn.replay.predictor; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("sojourn.")}
    assert {"diagnosis", "replay", "metrics"} <= rooms <= {*CODE}


def test_what_was_said_until_an_interruption_counts_and_a_verdict_that_cannot_be_read_is_made_anew(folder):
    class Stopped(Clerk):
        def __call__(self, run, level):
            if run.name == "kv":
                raise KeyboardInterrupt
            return super().__call__(run, level)

    with pytest.raises(KeyboardInterrupt):
        score(folder, Stopped(), levels=["client"], processes=1)
    clerk = Clerk()
    score(folder, clerk, levels=["client"], processes=1)
    assert clerk.asked == [("kv", "client")]
    stored = json.loads((folder / CACHE_FILE).read_text())
    stored["chat"]["said"]["client"]["seconds"] = None  # JSON has no NaN
    (folder / CACHE_FILE).write_text(json.dumps(stored))
    score(folder, clerk, levels=["client"], processes=1)
    assert clerk.asked == [("kv", "client"), ("chat", "client")]


def test_folder_without_records_and_records_without_truth_are_refused(tmp_path, folder):
    with pytest.raises(RunDataError, match="sojourn dev faults run"):
        score(tmp_path / "empty", Clerk(), processes=1)
    (folder / "kv" / FAULT_FILE).write_text('{"case": "kv"}')
    with pytest.raises(RunDataError, match="not the record"):
        read_fault(folder / "kv")
    both = msgspec.structs.replace(fault(KV), control="healthy")
    write_fault(RunDirectory(folder / "kv"), both)
    with pytest.raises(RunDataError, match="give one of the two"):
        read_fault(folder / "kv")


def test_base_is_the_run_with_the_same_arrivals():
    controls = [(FaultRecord(case="chat", workload="chat", repeat=n, control="healthy"), value)
                for n, value in ((1, 0.9), (2, 1.0))]  # fmt: skip
    assert base_attainment(fault(repeat=2, base="chat"), controls) == 1.0
    assert base_attainment(fault(repeat=3, base="chat"), controls) == pytest.approx(0.95)
    assert base_attainment(fault(repeat=1, base="documents"), controls) is None


def test_thresholds_name_a_full_cache_and_leave_a_healthy_server_alone(scored):
    healthy, full = (each.said for each in scored[1][BASELINE])
    keys = ["kv_pool", "overload", "prefix_cache_off", "own_prefill"]
    assert full.state == "degraded" and [cause.key for cause in full.causes] == keys
    assert healthy.state == "healthy" and not healthy.causes


def test_page_shows_each_level_and_the_misses(scored):
    verified = Checked(
        name="attainment", before=0.1, low=0.8, median=0.9, high=0.95, measured=0.91, hit=True, error=0.01
    )
    entry = LedgerEntry(when="2026-01-01T00:00:00", build="1", run="kv", run2="kv2", scenario="s", hit=True, error=0.01,
                        change=Change(settings={"num_kv_blocks": 256}), predicted_by="diagnosis", cause="kv_pool",
                        figures=[verified])  # fmt: skip
    append(scored[0] / FILE_NAME, entry)
    accuracy = accuracy_of(*scored, "sojourn dev faults score DIR --write")
    written = page(accuracy)
    assert "1 with a fault that hurt, 1 controls" in written and "`sojourn dev faults score DIR --write`" in written
    rows = {line.split("|")[1].strip(): line for line in written.splitlines() if line.startswith("| **")}
    assert list(rows) == ["**client**", "**metrics**", "**thresholds**"]
    assert "100% (21–100), 1 of 1" in rows["**client**"] and "0% (0–79), 0 of 1" in rows["**metrics**"]
    assert "| kv_pool | 1 | 1 |" in written.replace("`", "") and "1 of 1 ended within" in written
    assert "| kv | kv_pool | `num_kv_blocks=256` | 10% | 90% (80–95) | 91% | yes |" in written
    assert "| 75% to 85% | 80% | 100% | 1 of 1 |" in written and "## Misses, level `client`\n\nNone." in written


def test_confidence_is_that_of_todays_coefficients():
    features = dict.fromkeys(FEATURES, 0.5)
    old = said(cause("kv_pool", confidence=0.01, features=features), cause("overload", confidence=0.3))
    assert [each.confidence for each in with_confidence(old).causes] == [confidence(features), 0.3]


def test_misses_put_runs_with_one_answer_together():
    same = [judged(fault(repeat=n), said("overload", "kv_pool")) for n in range(2)]
    other = judged(fault(repeat=2), said(state="inconclusive"))
    alarm = judged(control(), said("overload", state="overloaded"), attainment=0.95)
    unhurt = judged(fault(severity=2), said("overload"), attainment=0.97)
    found = misses([*same, other, alarm, unhurt, judged(fault(repeat=3), said("kv_pool"))])
    assert [(miss.case, miss.said, len(miss.runs), miss.stood) for miss in found] == [
        ("chat", "overload", 1, "not named"), ("kv", "inconclusive", 1, "not named"), ("kv", "overload", 2, "place 2"),
    ]  # fmt: skip
    assert found[-1].wanted == "kv_pool/block_leak" and found[0].wanted == "healthy"
