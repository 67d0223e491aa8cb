"""What lies with a run, `diagnosis.json` and `report.html`, is replaced by nothing that rests on less."""

import json
import shutil
from pathlib import Path

import pytest

from sojourn.commands import summary
from sojourn.commands.verbs import VERBS
from sojourn.diagnosis.stored import FILE
from sojourn.metrics.prediction import attainment_text
from sojourn.metrics.run.directory import OLD_REPORT, REPORT, RunDirectory
from sojourn.ui.run_data import read_diagnosis
from tests.commands.program import run_program
from tests.metrics.synthetic import synthetic_run

NO_RUN = {  # verbs that are given no recorded run
    "watch", "record", "triage", "load", "run", "capacity", "locust", "bench-serve", "mcp", "import", "serve", "ui",
    "server keys", "server quantize", "server dashboards", "calibrate client", "calibrate device", "dev bench", "size",
    "dev faults", "dev ladder",
}  # fmt: skip
LINES = {
    "diagnose": ("diagnose runs/a", "diagnose runs/a --symptom high_ttft", "diagnose runs/a --slo ttft:1",
                 "diagnose runs/a --against runs/b"),
    "report": ("report runs/a", "report runs/a --slo ttft:1", "report runs/a --against runs/b"),
    "explain": ("explain runs/a --slowest ttft",),
    "kv-lens": ("kv-lens runs/a",),
    "lint": ("lint runs/a",),
    "runs": ("runs runs",),
    "replay": ("replay runs/a --set max_num_seqs=8",),
    "plan": ("plan runs/a",),
    "verify": ("verify runs/a runs/b",),
    "compare": ("compare runs/a runs/b", "compare runs/b runs/a"),
    "export": ("export runs/a --to vllm",),
    "join": ("join runs/a runs/b",),
    "server usage": ("server usage runs/a",),
    "server fleet": ("server fleet replay runs/a --trace AzureLLMInferenceTrace_code.csv --requests 20",),
}  # fmt: skip


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosed")
    for name in "ab":
        run = synthetic_run(folder / "runs" / name, plant="small_batch_cap", requests=40, name=name)
        summary.summarise(run)
    return folder


@pytest.fixture
def folder(diagnosed, tmp_path) -> Path:
    shutil.copytree(diagnosed, tmp_path, dirs_exist_ok=True)
    return tmp_path


def lying(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for name in (FILE, REPORT) for file in [run / name]}


def test_no_verb_replaces_what_rests_on_more(folder):
    """Of a colleague's copy without the steps, nothing can be replayed."""
    assert {verb.name for verb in VERBS} - NO_RUN == set(LINES)
    run = folder / "runs" / "a"
    (run / "steps.parquet").unlink()
    before = lying(run)
    told = json.loads(before[FILE])
    assert told["predicted"] is not None and told["made_by"]
    for line in (line for lines in LINES.values() for line in lines):
        done = run_program(*line.split(), cwd=folder)
        assert lying(run) == before and "Traceback" not in done.stderr, line
        if line in ("diagnose runs/a", "report runs/a"):
            (note,) = done.stderr.splitlines()
            assert "stays, for it has replays" in note and "remove that file to replace it" in note
        if line == "diagnose runs/a":
            assert told["headline"].split(":")[0] in done.stdout and "max_num_seqs=" in done.stdout
    assert {file.name for file in run.glob("report*.html")} == {REPORT, "report-slo.html", "report-against-b.html"}


def test_a_better_diagnosis_comes_with_its_report(folder, monkeypatch):
    run, steps = RunDirectory.open(folder / "runs" / "a"), folder / "steps.parquet"
    (run.path / "steps.parquet").rename(steps)
    (run.path / FILE).unlink()
    assert run_program("report", "runs/a", cwd=folder).returncode == 0
    less = lying(run.path)
    assert json.loads(less[FILE])["predicted"] is None
    steps.rename(run.path / "steps.parquet")
    assert run_program("diagnose", "runs/a", cwd=folder).stderr == ""
    more = lying(run.path)
    assert json.loads(more[FILE])["predicted"] is not None and more[REPORT] != less[REPORT]
    assert not (run.path / OLD_REPORT).exists()
    (shown,) = {attainment_text(each.prediction) for each in read_diagnosis(run)[0].findings[:1]}
    assert shown in (run.path / REPORT).read_text(), "both say the same interval, which no two diagnoses share"
    (run.path / FILE).write_bytes(less[FILE])
    monkeypatch.setattr(summary, "is_installed", lambda module: False)
    run_program("diagnose", "runs/a", cwd=folder)
    assert (run.path / FILE).read_bytes() != less[FILE] and (run.path / OLD_REPORT).read_bytes() == more[REPORT]
    assert not (run.path / REPORT).exists(), "it cannot be made again here, and would say something else"


@pytest.mark.parametrize("readable", [True, False])
def test_an_older_program_keeps_the_diagnosis_of_a_newer_one(folder, readable):
    file = folder / "runs" / "a" / FILE
    told = json.loads(file.read_text()) | {"made_by": "99.1.0", "headline": "from the future"}
    file.write_text(json.dumps(told if readable else told | {"state": "sleepy"}))
    before = lying(file.parent)
    done = run_program("diagnose", "runs/a", cwd=folder)
    assert lying(file.parent) == before and "a newer Sojourn made it (99.1.0)" in done.stderr
    assert ("from the future" in done.stdout) == readable
    file.write_text("{ damaged")
    assert run_program("diagnose", "runs/a", cwd=folder).stderr == ""
    assert json.loads(file.read_text())["made_by"] != "99.1.0"
