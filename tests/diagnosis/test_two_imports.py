"""Two result files of one benchmark, before and after: what a diagnosis of one against the other may name."""

import json
import random
import statistics

import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.state import LEAST_SURE
from sojourn.interop.imported.read import read_result, write_run
from sojourn.metrics.compare.runs import compare_runs
from sojourn.metrics.errors import InputError
from tests.repository import ROOT

EXAMPLE = ROOT / "tests" / "interop" / "imported" / "results" / "vllm.json"
REQUESTS, OUTPUT = 70, 40


def result_file(path, ttft_s: float, gap_s: float, seed: int):
    """Of `vllm bench serve` at 1.2 requests/s: the schedule is the same for every seed."""
    schedule, chance, moment = random.Random(7), random.Random(seed), 100.0
    starts, first, gaps = [], [], []
    for _ in range(REQUESTS):
        moment += schedule.expovariate(1.2)
        starts.append(moment)
        first.append(ttft_s * chance.lognormvariate(0, 0.3))
        gaps.append([gap_s * chance.lognormvariate(0, 0.3) for _ in range(OUTPUT - 1)])
    found = json.loads(EXAMPLE.read_text()) | {
        "num_prompts": REQUESTS, "completed": REQUESTS, "request_rate": 1.2, "input_lens": [576] * REQUESTS,
        "output_lens": [OUTPUT] * REQUESTS, "total_input_tokens": 576 * REQUESTS,
        "total_output_tokens": OUTPUT * REQUESTS, "ttfts": first, "itls": gaps, "start_times": starts,
        "latencies": [one + sum(rest) for one, rest in zip(first, gaps, strict=True)],
        "queue_times": [0.0] * REQUESTS, "generated_texts": [""] * REQUESTS, "errors": [""] * REQUESTS,
    }  # fmt: skip
    ends = [start + latency for start, latency in zip(starts, found["latencies"], strict=True)]
    found |= {"duration": max(ends) - starts[0], "request_goodput": None}
    for name, total in (
        ("request", REQUESTS),
        ("output", OUTPUT * REQUESTS),
        ("total_token", (576 + OUTPUT) * REQUESTS),
    ):
        found[f"{name}_throughput"] = total / found["duration"]
    tpots = [statistics.mean(rest) for rest in gaps]
    for name, values in (("ttft", first), ("tpot", tpots), ("itl", [gap for rest in gaps for gap in rest])):
        found |= {
            f"mean_{name}_ms": 1e3 * statistics.mean(values),
            f"median_{name}_ms": 1e3 * statistics.median(values),
        }
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def pair(tmp_path):
    """The server became slower between the two: prompts 5.6 times, tokens 1.7 times."""
    files = [result_file(tmp_path / f"{name}.json", *times, seed) for name, times, seed in
             (("a", (0.076, 0.018), 1), ("b", (0.424, 0.030), 2))]  # fmt: skip
    runs = [write_run(read_result(file)[0], tmp_path / file.stem, file.name) for file in files]
    for run in runs:
        run.update_meta(objectives=[{"klass": "all", "ttft_ms": 200.0, "tpot_ms": 25.0}])
    return runs


def test_imported_runs_compare_as_they_are_and_an_invalid_one_says_why_not(pair):
    found = compare_runs([pair[0]], [pair[1]])
    assert found.verdict == "worse" and not any("forced" in note for note in found.notes)
    assert {each.metric: each.verdict for each in found.metrics}["ttft_mean"] == "worse"
    pair[1].update_meta(imported=None)
    with pytest.raises(InputError, match="does not say that the load generator kept its schedule"):
        compare_runs([pair[0]], [pair[1]])


def test_a_slower_server_is_no_fault_of_the_client(pair):
    """Neither file tells where the time went, so the account that grew is none."""
    good, bad = pair
    for run, against in ((good, bad), (bad, good)):
        said = diagnose(run, against)
        assert "client." not in said.headline and "Good benchmark" not in said.headline
        assert not any(finding.symptom == "product_latency_poor" for finding in said.findings)
        (check,) = [each for each in said.checks if each.symptom == "product_latency_poor"]
        assert check.status == "unknown" and "server or the way to it became slower" in check.reason
    assert diagnose(good, bad).headline == diagnose(good).headline
    said = diagnose(bad, good)
    assert said.findings[0].confidence < LEAST_SURE and said.state == "inconclusive" and "why is open" in said.headline


def test_a_server_that_became_faster_is_no_complaint(pair):
    """The same pair with its dates swapped."""
    for run, second in zip(pair, (2, 1), strict=True):
        run.update_meta(wall_anchor={"monotonic_ns": 0, "unix_ns": second * 10**9})
    for run, against in (pair, pair[::-1]):
        (check,) = [each for each in diagnose(run, against).checks if each.symptom == "product_latency_poor"]
        assert check.status == "absent" and "attainment rose from" in check.reason and "slower" not in check.reason
