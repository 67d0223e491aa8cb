"""The command for a GPU: its code runs on a CPU, and one stage that fails leaves the others their results."""

import json
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.gpu import smoke
from bench.gpu.stages import add_stage, facts, unpack
from bench.shapes import SHAPES

ROOT = Path(__file__).parents[3]
TINY = SHAPES["small"] | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 400}


@pytest.fixture
def tiny(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def test_all_ways_of_computing_agree_here(tiny, tmp_path):
    parts = smoke.Parts(tmp_path / "smoke.json")
    smoke.smoke(parts, tiny, "dummy", "cpu")
    assert not parts.failed
    found = json.loads((tmp_path / "smoke.json").read_text())
    assert set(found["overlap = eager"]) == {1.0} and min(found["eager = reference"]) > 0.5
    assert found["eager"]["start_s"] > 0 and not found["eager"]["errors"]


def test_steps_are_timed_by_batch_and_the_profiler_runs_twice(tiny, tmp_path):
    parts = smoke.Parts(tmp_path / "profile.json")
    smoke.profile(parts, tiny, "dummy", "cpu", steps=3)
    found = json.loads((tmp_path / "profile.json").read_text())
    assert not parts.failed and len(found["bursts"]) == 2
    assert set(found["step_times"]) == {"1", "8"} and found["step_times"]["8"]["device_ms"] > 0


def test_a_part_that_fails_leaves_the_others(tmp_path):
    parts = smoke.Parts(tmp_path / "parts.json")
    parts.add("bad", lambda: 1 / 0)
    parts.add("good", lambda: 7)
    found = json.loads((tmp_path / "parts.json").read_text())
    assert parts.failed == ["bad"] and "ZeroDivisionError" in found["bad"]["failed"] and found["good"] == 7


def test_stages_are_kept_with_their_figures_whatever_those_are(tmp_path):
    (tmp_path / "one.log").write_text("\nfirst\n\nlast words\n")
    (tmp_path / "one.json").write_text('{"tokens_per_second": 5}')
    (tmp_path / "half.json").write_text('{"tokens')
    for name in ("one", "two"):
        add_stage(tmp_path, tmp_path / "first", name, 0, 3)
    found = json.loads((tmp_path / "first").read_text())
    assert [stage["stage"] for stage in found["stages"]] == ["one", "two"]
    assert found["stages"][0]["tail"] == ["first", "last words"]
    assert found["figures"]["one"] == {"tokens_per_second": 5} and found["figures"]["half"].startswith("cut short")


def test_facts_name_what_is_missing(monkeypatch):
    monkeypatch.setattr("bench.gpu.stages.NEEDED", ("json", "no_such_module"))
    found = facts()
    assert found["json"][0] and "No module named" in found["no_such_module"]


def test_the_command_leaves_its_files_though_every_stage_fails(tmp_path):
    """With a Python that fails each stage but writes down what happened."""
    python = tmp_path / "python"
    kept = f'case "$*" in *--facts*) exit 3;; bench/gpu/stages.py*) exec {sys.executable} "$@";; esac'
    python.write_text(f"#!/bin/sh\n{kept}\nexit 3\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    out = tmp_path / "out"
    environment = {**os.environ, "OUT": str(out), "PYTHON": str(python), "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "bench/gpu/first.sh"], cwd=ROOT, env=environment, check=False, timeout=60)
    stages = json.loads((out / "first.json").read_text())["stages"]
    assert [stage["stage"] for stage in stages] == [
        "facts", "smoke", "tests", "calibrate", "qwen3-0.6b", "profile", "kernels", "variants", "qwen3-14b",
        "ladder", "transformers",
    ]  # fmt: skip
    assert {stage["status"] for stage in stages} == {3}
    assert sorted(path.name for path in out.iterdir()) == ["first.json", "logs.tgz"]
    with tarfile.open(out / "logs.tgz") as logs:
        assert len(logs.getnames()) == len(stages)


def test_reports_are_unpacked_for_the_tables_of_the_document(tmp_path):
    path = tmp_path / "first.json"
    path.write_text(json.dumps({"stages": [], "figures": {"kernels": {"rows": []}, "half": "cut short: line 1"}}))
    assert unpack(path, tmp_path / "reports") == ["kernels"]
    assert json.loads((tmp_path / "reports" / "kernels.json").read_text()) == {"rows": []}
