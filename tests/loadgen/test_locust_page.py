"""Locust's page and totals count requests, against a server that counts them; latencies of tokens stand beside them."""

import csv
import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sojourn.loadgen.locust_page import Figures, percentile
from sojourn.loadgen.record.live_events import counted
from sojourn.loadgen.target.processes import LOCUSTFILE, free_port, load_command
from tests.loadgen.run.test_experiment import scenario_file, wait_for
from tests.loadgen.scenarios import scenario
from tests.loadgen.scripted_server import Script, ScriptedServer


def test_percentiles_of_counted_samples_are_those_of_all_samples_within_their_digits():
    values = np.random.default_rng(1).lognormal(3, 2, 5000)
    counts = Counter(dict(map(tuple, counted(values))))
    assert counts.total() == 5000 and len(counts) < 5000
    for percent in (1, 50, 90, 99, 100):
        exact = np.sort(values)[int(np.ceil(percent / 100 * 5000)) - 1]
        assert percentile(counts, percent) == pytest.approx(exact, rel=0.006)
    assert percentile(Counter(), 50) is None and counted(np.array([np.nan])) == []


def test_figures_of_seconds_add_up_to_those_of_all_their_samples():
    """A second with 10,000 gaps weighs ten thousand times one with a single gap."""
    figures = Figures()
    for gaps in ([[1.0, 10_000]], [[50.0, 1]]):
        figures.add({"ended": 1, "good": 1, "failed": 0, "tokens": 5, "TTFT": [[9.0, 1]], "TPOT": [], "ITL": gaps})
    assert figures.counts["ended"] == 2 and figures.percentiles()["itl99"] == 1.0
    assert figures.percentiles()["ttft50"] == 9.0 and figures.percentiles()["tpot90"] is None


def requests_of(csv_file: Path) -> dict[str, int]:
    """Locust's count of requests by name of its row."""
    with csv_file.open() as file:
        return {row["Name"]: int(row["Request Count"]) for row in csv.DictReader(file)}


@pytest.mark.server
def test_locust_totals_are_the_requests_that_the_server_counts(tmp_path):
    server = ScriptedServer(Script(num_tokens=30, gap_s=0.002)).start()
    chosen = scenario({"process": "constant", "rate_rps": 20, "duration_s": 2})
    options = {"csv": tmp_path / "locust"}
    command = load_command(scenario_file(tmp_path, chosen), server.url, tmp_path / "run", options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert requests_of(tmp_path / "locust_stats.csv") == {"chat": len(server.seen), "Aggregated": len(server.seen)}
    assert "TTFT p50 (ms)" in done.stdout and "Goodput (req/s)" in done.stdout


def test_users_of_a_scenario_are_refused_with_the_way_out(tmp_path):
    command = load_command("demo", "http://127.0.0.1:1", tmp_path / "run", {"users": 5, "spawn-rate": 1})
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert refused.returncode == 2 and "LLMUser" in refused.stderr and not (tmp_path / "run").exists()


class Page:
    """Locust with its page, in a process of its own."""

    def __init__(self, words: list[str], folder: Path):
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "locust", *words, "--web-host", "127.0.0.1", "--web-port", str(port)]
        with (folder / "page.log").open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def post(self, path: str, **form) -> None:
        urllib.request.urlopen(self.url + path, urllib.parse.urlencode(form).encode(), timeout=90).read()

    def stats(self) -> dict:
        return json.loads(self.get("/stats/requests"))

    def answers(self) -> bool:
        try:
            return bool(self.get("/"))
        except OSError:
            return False


@pytest.mark.server
@pytest.mark.slow
def test_page_counts_requests_charts_latencies_and_shows_why_a_run_is_not_valid(tmp_path):
    server = ScriptedServer(Script(num_tokens=30, gap_s=0.002)).start()
    never = [{"ttft_ms": 0.001, "source": "no generator sends early enough"}]
    chosen = scenario({"process": "constant", "rate_rps": 20, "duration_s": 60}, objectives=never)
    words = ["-f", str(LOCUSTFILE), "--host", server.url]
    page = Page([*words, "--scenario", scenario_file(tmp_path, chosen), "--run-dir", "run"], tmp_path)
    try:
        wait_for(page.answers, 30)
        start = page.get("/")
        assert '"choices": ["' in start and "steady-chat" in start and "sojourn/charts.js" in start
        assert '"replays": true' in start and "MutationObserver" in page.get("/sojourn/charts.js")
        page.post("/swarm", user_count=1, spawn_rate=1)
        wait_for(lambda: len(json.loads(page.get("/sojourn/state"))["points"]) >= 3, 60)
        time.sleep(2.1)  # Locust gives one answer for two seconds
        first, second = page.stats(), page.stats()
        assert first == second  # the row of the tab stands once
        point = json.loads(page.get("/sojourn/state"))["points"][-1]
        assert 10 < point["ended_rps"] < 30 and point["good_rps"] == 0 and point["ttft50"] > 10 > point["itl50"]
        page.post("/stop")
        ended = page.stats() if not time.sleep(2.1) else {}
        (fault,) = ended["errors"]
        assert "the run is not valid: the load generator sent late" in fault["error"]
        state = json.loads(page.get("/sojourn/state"))
        assert state["is_fault"] and state["message"] == fault["error"]
        assert [row["num_requests"] for row in ended["stats"]] == [len(server.seen)] * 2
        assert {row["method"] for row in ended["stats"]} == {"POST", ""}
        assert ended["extended_stats"][0]["data"][0]["ended"] == len(server.seen)
    finally:
        page.process.kill()
