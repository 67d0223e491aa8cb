"""`sojourn report` of sweeps: the page, or the points of the curves, by the file's ending."""

import csv
import json

from tests.commands.program import run_program
from tests.loadgen.search.search_documents import sweep_of


def test_report_lays_sweeps_over_each_other_or_writes_their_points(tmp_path):
    one = sweep_of(tmp_path / "one", {2: 1.0, 4: 0.96, 8: 0.85})
    two = sweep_of(tmp_path / "two", {2: 1.0, 6: 0.7})
    (one / "sweep.html").write_text("of one alone")
    done = run_program("report", str(one), "--against", str(two), "--slo", "tpot:300", "--dollars-per-hour", "2")
    written = one / "sweep-against-two-slo.html"
    assert done.returncode == 0 and f"wrote {written}" in done.stdout.replace("\n", "")
    assert (one / "sweep.html").read_text() == "of one alone"
    assert "the sweeps also differ" not in done.stdout and "TPOT p90 of 300 ms, interpolated between" in done.stdout
    page = written.read_text()
    assert "Throughput against time per output token" in page and "TPOT p90 of 300 ms" in page
    assert "not reported by the server of one, two" in page and "Tokens per dollar take" not in page
    done = run_program("report", str(one), "--against", str(two), "--devices", "2", "--output", str(tmp_path / "c.csv"))
    rows = list(csv.DictReader((tmp_path / "c.csv").open()))
    assert done.returncode == 0 and [row["sweep"] for row in rows] == ["one"] * 3 + ["two"] * 2
    assert float(rows[0]["output_tokens_per_s_per_device"]) == float(rows[0]["output_tokens_per_s"]) / 2
    run_program("report", str(one), "--slo", "tpot:300", "--output", str(tmp_path / "c.json"))
    assert json.loads((tmp_path / "c.json").read_text())[0]["slo_ms"] == 300


def test_report_refuses_what_is_not_of_a_sweep_or_of_a_run(tmp_path):
    sweep, run = sweep_of(tmp_path / "sweep", {2: 1.0}), tmp_path / "run"
    run.mkdir()
    for arguments, words in (
        ((sweep, "--slo", "ttft:300"), "only the TPOT of a finished sweep"),
        ((run, "--devices", "2"), "is not a sweep"),
        ((run, "--against", "a", "--against", "b"), "give --against once"),
        ((sweep, "--against", run), "sweep.json cannot be read"),
    ):
        done = run_program("report", *map(str, arguments))
        assert done.returncode in (1, 2) and words in done.stderr.replace("\n", " ")
