"""GuideLLM's own code reads the report that we write, and computes the same statistics from its requests.

It is found on the PATH (its own virtual environment's `bin` put there, last) and skipped where it is not.
"""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands.program import run_program
from tests.metrics.synthetic import PLANTS, synthetic_run

# Loads a report as GuideLLM does, compiles its statistics anew from the requests in it, and prints what differs.
RECOMPUTE = """
import json, math, sys
from types import SimpleNamespace as Given
from guidellm.benchmark.schemas.accumulator import GenerativeRequestsAccumulator as Requests
from guidellm.benchmark.schemas.metrics import GenerativeMetrics
from guidellm.benchmark.schemas.report import GenerativeBenchmarksReport

(benchmark,) = GenerativeBenchmarksReport.load_file(sys.argv[1]).benchmarks
of = benchmark.requests
timings = Given(finalized_measure_start=benchmark.start_time, finalized_measure_end=benchmark.end_time)
theirs = GenerativeMetrics.compile(Given(
    timings=timings, config=benchmark.config, completed=Requests(requests_stats=of.successful),
    incomplete=Requests(requests_stats=of.incomplete), errored=Requests(requests_stats=of.errored),
)).model_dump(mode="json")
differ, count = [], 0

def compare(ours, other, place):
    global count
    if isinstance(other, dict):
        for name in set(ours or {}) | set(other):
            compare((ours or {}).get(name), other.get(name), f"{place}.{name}")
    elif isinstance(other, list):
        for number, (one, two) in enumerate(zip(ours, other, strict=True)):
            compare(one, two, f"{place}[{number}]")
    else:
        count += 1
        same = ours == other
        if isinstance(other, float) and isinstance(ours, (int, float)):
            same = math.isclose(ours, other, rel_tol=1e-5, abs_tol=1e-6)
        if not same:
            differ.append([place, ours, other])

compare(benchmark.metrics.model_dump(mode="json"), theirs, "")
print(json.dumps({"differ": differ, "compared": count}))
"""

pytestmark = [pytest.mark.peer, pytest.mark.timeout(300)]


def guidellm_bin() -> Path:
    if (program := shutil.which("guidellm")) is None:
        pytest.skip("guidellm is not on the PATH")
    return Path(program).parent


@pytest.fixture(scope="module", params=["small_batch_cap", "long_beside_chat"])
def report(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    plant = replace(PLANTS[request.param], failing_share=0.2)
    run = synthetic_run(folder / "run", requests=80, plant=plant)
    done = run_program("export", str(run.path), "--to", "guidellm", "--output", str(folder / "benchmarks.json"))
    assert done.returncode == 0, done.stderr
    return folder / "benchmarks.json"


def test_guidellm_computes_the_same_statistics_from_the_requests(report):
    python = guidellm_bin() / "python"
    done = subprocess.run([python, "-c", RECOMPUTE, str(report)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differ"] == [] and found["compared"] > 1000, found["differ"][:20]


def test_guidellm_export_shows_the_report_and_writes_it_again(report, tmp_path):
    command = [guidellm_bin() / "guidellm", "export", str(report), "--output", "kind=console"]
    command += ["--output", f"kind=json,path={tmp_path / 'again.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loaded 1 benchmark" in done.stdout and "Request Latency Statistics" in done.stdout
    ours, again = (
        json.loads(path.read_text())["benchmarks"][0]["requests"] for path in (report, tmp_path / "again.json")
    )
    for name in ("successful", "errored"):
        for one, other in zip(ours[name], again[name], strict=True):
            stated = [key for key in one if key not in ("info", "input_metrics", "output_metrics")]
            assert {key: other[key] for key in stated} == pytest.approx({key: one[key] for key in stated}, abs=1e-6)
