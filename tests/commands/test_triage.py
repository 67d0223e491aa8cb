"""`sojourn triage` as its user types it: files, the standard input, JSON, exit codes."""

import io
import json
import sys

import pytest

from tests.commands.program import run_program
from tests.interop.held.shapes import TABLE, inference_perf, vllm

LATE = inference_perf(schedule_delay={"mean": 12.3, "p99": 26.0}, requested_rate=153.0, achieved_rate=105.0)


@pytest.mark.parametrize(("text", "code", "says"), [
    (json.dumps(LATE), 6, "The client sent requests 12.3 s late"), (json.dumps(vllm()), 3, "unknowable from this"),
    (TABLE, 3, "next: sojourn"), ("nothing of the kind", 2, ""), ("", 2, ""),
])  # fmt: skip
def test_the_exit_code_says_what_was_found(tmp_path, text, code, says):
    (tmp_path / "given").write_text(text)
    done = run_program("triage", "given", cwd=tmp_path)
    assert done.returncode == code and says in done.stdout and (done.stderr.startswith("sojourn: given") == (code == 2))


def test_the_standard_input_is_read_beside_a_file(tmp_path, monkeypatch):
    (tmp_path / "late.json").write_text(json.dumps(LATE))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TABLE.encode())))
    found = json.loads(run_program("triage", "-", "late.json", "--json", cwd=tmp_path).stdout)
    assert found["schema"] == "sojourn.triage/1" and {each["name"] for each in found["seen"]} == {"-", "late.json"}
    assert run_program("triage", "-", "-", cwd=tmp_path).returncode == 2


def test_a_summary_that_is_no_run_is_handed_to_triage(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(LATE))
    done = run_program("import", "summary.json", cwd=tmp_path)
    assert done.returncode == 2 and "`sojourn triage summary.json`" in done.stderr
