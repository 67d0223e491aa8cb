"""The main job, end to end and as a user runs it: serve, replay, account, diagnose, show."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from sojourn.interop.sources.view import observe
from sojourn.loadgen.scenario.scenario import SCENARIO_FOLDER
from sojourn.metrics.exit_codes import Ended
from sojourn.metrics.ledger import ACCOUNTS, SERVER_ACCOUNTS, closes
from sojourn.metrics.records import STAGES
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server_process import serving

pytestmark = pytest.mark.server

ROOT = Path(__file__).parent.parent


def short_demo(folder: Path, duration_s: float, speedup: float = 1.0, **engine) -> Path:
    """The demo's scenario, cut to its first seconds."""
    scenario = yaml.safe_load((SCENARIO_FOLDER / "demo.yaml").read_text())
    arrivals = scenario["arrivals"]
    arrivals["speedup"] *= speedup
    arrivals["duration_s"] = duration_s * arrivals["speedup"]
    scenario["engine"] |= engine
    path = folder / "short-demo.yaml"
    path.write_text(yaml.safe_dump(scenario))
    return path


def sojourn(*arguments: str | Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "sojourn", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def nothing_but_lateness(run: RunDirectory) -> bool:
    """The run is valid, or invalid for one thing only: a busy machine made the generator send late, and it says so."""
    meta = run.meta()
    late = [reason for reason in meta["invalid_reasons"] if reason.startswith("the load generator sent late")]
    return meta["invalid_reasons"] == late and meta["valid"] == (not late)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(run directory, terminal output) of a short demo."""
    folder = tmp_path_factory.mktemp("demo")
    process = sojourn("run", short_demo(folder, 6), "--output", folder / "run")
    output, _ = process.communicate(timeout=110)
    assert process.returncode in (0, Ended.NOT_VALID), output
    return RunDirectory.open(folder / "run"), output


def test_every_request_of_the_demo_closes_within_one_per_cent(demo):
    run, _ = demo
    requests = run.requests()
    assert len(requests) >= 40 and (requests.status == "ok").all()
    for row in requests.itertuples():
        accounts = {info.name: getattr(row, f"ledger_{info.column}") for info in ACCOUNTS}
        assert closes(row.unaccounted_ns, row.last_byte_ns - row.due_ns), accounts
        assert closes(row.ttft_unaccounted_ns, row.first_token_ns - row.due_ns)
        assert all(booked >= 0 for booked in accounts.values()), accounts


def test_client_and_server_agree_on_what_happened(demo):
    """Two measurements that share no code: bytes stamped at the client's socket, and the engine's own records."""
    requests = demo[0].requests()
    assert (requests.output_tokens == requests.server_output_tokens).all()
    assert (requests.prompt_tokens == requests.server_prompt_tokens).all()
    # Last tokens that complete no character have no text, and so no chunk with text: up to three bytes of one.
    silent = requests.output_tokens - requests.chunk_tokens.map(sum)
    assert silent.between(0, 3).all() and (silent == 0).mean() > 0.9
    emitted = requests.token_ns.map(lambda stamps: stamps[0])
    assert (requests.sent_ns < requests.arrived_ns).all() and (requests.arrived_ns < emitted).all()
    assert (requests.first_token_ns > emitted).all()
    # The client may read a byte before the server, back from its write, looks at the clock: microseconds, but for a
    # server that the machine takes off its core just then.
    assert (requests.first_token_ns - requests.first_written_ns).median() > -2_000_000
    positions = requests.cached_tokens + requests.computed_tokens
    assert (positions == requests.prompt_tokens + requests.output_tokens - 1).all()  # the last token is never computed


def test_steps_close_and_hold_exactly_the_tokens_of_the_requests(demo):
    run, _ = demo
    steps, requests = run.table("steps"), run.requests()
    stages = steps[[f"stage_{stage}_ns" for stage in STAGES]].sum(axis=1)
    assert (stages == steps.end_ns - steps.begin_ns).all()
    assert (steps.step.sort_values().diff().dropna() == 1).all()
    blocks = steps[["blocks_free", "blocks_active", "blocks_reusable"]].sum(axis=1)
    assert blocks.nunique() == 1
    computed = (requests.computed_tokens + requests.recomputed_tokens).sum()
    assert steps.new_tokens.map(sum).sum() == computed


def test_demo_ends_with_the_report_the_html_file_and_the_line_that_opens_the_app(demo):
    run, output = demo
    assert "goodput" in output and "everything" in output and "diagnose" in output
    assert "HTML report" in output and "in the app" in output
    assert (run.path / "report.html").stat().st_size > 100_000
    state = json.loads((run.path / "diagnosis.json").read_text())["state"]
    states = ("healthy", "degraded", "overloaded", "inconclusive")
    # A run that is not valid keeps its verdict where the lateness could not change it.
    assert state in (states if run.meta()["valid"] else (*states, "invalid"))
    assert nothing_but_lateness(run), run.meta()["invalid_reasons"]
    assert not list(run.path.glob("*.parts"))


def test_diagnosis_and_report_can_be_made_again_from_the_run_alone(demo, tmp_path):
    run, _ = demo
    process = sojourn("diagnose", run.path, "--json")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and json.loads(output)["run"] == run.name
    process = sojourn("report", run.path, "--output", tmp_path / "again.html")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and (tmp_path / "again.html").exists(), output


@pytest.mark.slow
def test_load_beside_our_own_server_joins_what_both_recorded(tmp_path):
    with serving(tmp_path, "tiny-model", "--max-num-seqs", "8", "--run-dir", str(tmp_path / "server")) as server:
        arguments = ["--base-url", server.url, "--server-run", tmp_path / "server", "--output", tmp_path / "run"]
        httpx.post(f"{server.url}/v1/completions", json={"model": "tiny-model", "prompt": "not of this load"})
        process = sojourn("load", short_demo(tmp_path, 6), *arguments)
        output, _ = process.communicate(timeout=90)
    assert process.returncode in (0, Ended.NOT_VALID), output
    run = RunDirectory.open(tmp_path / "run")
    requests, steps = run.requests(), run.table("steps")
    assert (requests.status == "ok").all() and len(steps) > 50 and nothing_but_lateness(run)
    assert all(closes(row.unaccounted_ns, row.last_byte_ns - row.due_ns) for row in requests.itertuples())
    assert len(run.table("requests")) == len(requests), "a request of another client came along"
    # The same server once more, as one sees it who has only its metrics
    view = observe(run, requests, requests)
    assert view.source == "sojourn" and {pair.server - pair.client for pair in view.agreement} == {0}
    for info, span in zip(SERVER_ACCOUNTS, view.spans, strict=True):
        booked = requests[f"ledger_{info.column}"].mean() / 1e6
        if info.name != "request.stream":  # cut where the client had read all
            assert span.mean_ms == pytest.approx(booked, rel=1e-6, abs=1e-6), info.name


@pytest.mark.slow
def test_core_killed_during_a_run_leaves_a_run_that_reads_and_says_so(tmp_path):
    process = sojourn("run", short_demo(tmp_path, 8, speedup=3, max_num_seqs=16), "--output", tmp_path / "run")
    try:
        core = wait_for(lambda: find_child(process.pid, "sojourn.engine.core"))
        during = RunDirectory(tmp_path / "run")
        wait_for(lambda: has_rows(during, "requests"), 60)  # readable while the run goes on
        os.kill(core, signal.SIGKILL)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    run = RunDirectory.open(tmp_path / "run")
    requests = run.requests()
    assert (requests.status == "ok").any() and (requests.status == "error").any(), output
    for error in requests[requests.status == "error"].error:  # under way when it died, or sent before it was back
        assert "engine core died" in error or "the engine is restarting" in error
    assert run.table("steps").step.is_unique


@pytest.mark.slow
def test_run_that_is_interrupted_stops_its_processes_and_keeps_what_it_recorded(tmp_path):
    process = sojourn("run", short_demo(tmp_path, 30), "--output", tmp_path / "run")
    try:
        wait_for(lambda: has_rows(RunDirectory(tmp_path / "run"), "requests"), 60)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3  # front, core, load generator
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=40)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    run = RunDirectory.open(tmp_path / "run")
    assert not run.meta()["valid"] and len(run.requests()) > 0 and len(run.table("steps")) > 0


def has_rows(run: RunDirectory, table: str) -> bool:
    return bool(run.sources(table)) and len(run.table(table)) > 0


def find_child(pid: int, word: str) -> int | None:
    for child in psutil.Process(pid).children(recursive=True):
        if word in " ".join(child.cmdline()):
            return child.pid
    return None


def wait_for(condition, timeout_s: float = 30):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)
    return found
