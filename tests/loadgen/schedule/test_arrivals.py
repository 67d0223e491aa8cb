"""Arrivals come as their process says: moments, counts and gaps against the mathematics of each process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.open_arrivals import MAX_REQUESTS
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.facts import workload_facts
from sojourn.loadgen.traces.reader import read_trace
from sojourn.loadgen.traces.rounding import Rounding
from tests.further import further
from tests.loadgen.scenarios import scenario

# Largest distance between an empirical distribution and the true one, times √n: exceeded by chance in 0.1 % of samples
# (Kolmogorov's distribution, exact in the limit).
KOLMOGOROV_999 = 1.95
LINEAR = {"process": "ramp", "start_rps": 20, "end_rps": 180, "duration_s": 100}
EXPONENTIAL = LINEAR | {"shape": "exponential"}


def offsets(arrivals: dict, seed: int = 0) -> np.ndarray:
    return scenario(arrivals).arrivals.draw(np.random.default_rng(seed))[0]


def cumulated(ramp: dict, t: np.ndarray) -> np.ndarray:
    """Expected arrivals up to t, by the textbook; the code under test has its inverse."""
    begin, end, seconds = ramp["start_rps"], ramp["end_rps"], ramp["duration_s"]
    if ramp.get("shape") == "exponential":
        rate = np.log(end / begin) / seconds
        return begin / rate * (np.exp(rate * t) - 1)
    return begin * t + (end - begin) / (2 * seconds) * t**2


def distance(samples: np.ndarray, distribution: np.ndarray) -> float:
    """Kolmogorov-Smirnov: `distribution` is the true one at the sorted samples. Times √n."""
    n = len(samples)
    above, below = np.arange(1, n + 1) / n - distribution, distribution - np.arange(n) / n
    return max(above.max(), below.max()) * n**0.5


@pytest.mark.parametrize(("arrivals", "distribution"), [
    ({"process": "poisson"}, lambda gaps: 1 - np.exp(-50 * gaps)),
    # a gamma of shape 4 (cv 0.5) is an Erlang distribution
    ({"process": "gamma", "cv": 0.5}, lambda gaps: 1 - np.exp(-200 * gaps) * sum((200 * gaps) ** k / np.prod(
        np.arange(1, k + 1)) for k in range(4))),
])  # fmt: skip
def test_gaps_have_the_distribution_of_their_process(arrivals, distribution):
    gaps = np.sort(np.diff(offsets(arrivals | {"rate_rps": 50, "count": 20_000}, 7)))
    assert distance(gaps, distribution(gaps)) < KOLMOGOROV_999


@pytest.mark.parametrize("ramp", [LINEAR, EXPONENTIAL, LINEAR | {"start_rps": 180, "end_rps": 0}, LINEAR | {
    "start_rps": 90, "end_rps": 90}, EXPONENTIAL | {"start_rps": 150, "end_rps": 10}])  # fmt: skip
def test_ramp_has_the_expected_count_in_every_quarter_and_the_shape_within(ramp):
    moments = offsets(ramp, 3)
    assert (np.diff(moments) >= 0).all() and moments[0] >= 0 and moments[-1] < 100
    edges = cumulated(ramp, np.array([0.0, 25.0, 50.0, 75.0, 100.0]))
    counts = np.histogram(moments, [0, 25, 50, 75, 100])[0]
    # a Poisson count has the variance of its mean: 4 deviations, and 1 for counts near 0
    assert (np.abs(counts - np.diff(edges)) <= 4 * np.sqrt(np.diff(edges)) + 1).all()
    assert distance(moments, cumulated(ramp, moments) / edges[-1]) < KOLMOGOROV_999


@pytest.mark.parametrize("ramp", [LINEAR, EXPONENTIAL, LINEAR | {"start_rps": 0}, LINEAR | {"end_rps": 0}])
def test_regular_ramp_has_an_arrival_each_time_its_cumulated_rate_grows_by_one(ramp):
    moments = offsets(ramp | {"gaps": "regular"})
    assert np.allclose(cumulated(ramp, moments), np.arange(1, len(moments) + 1), rtol=1e-9)
    total = cumulated(ramp, np.array(100.0))
    assert total - 1 - 1e-6 <= len(moments) < total


def test_ramp_between_equal_rates_is_the_constant_process():
    level = LINEAR | {"start_rps": 10, "end_rps": 10, "gaps": "regular"}
    expected = offsets({"process": "constant", "rate_rps": 10, "duration_s": 100})[:999]  # the next falls on the end
    assert np.allclose(offsets(level), expected) and np.allclose(offsets(level | {"shape": "exponential"}), expected)


def test_phases_are_their_processes_one_after_the_other_with_silence_between():
    poisson = {"process": "poisson", "rate_rps": 40, "duration_s": 10}
    constant, silence = (
        {"process": "constant", "rate_rps": 5, "duration_s": 4},
        {"process": "silence", "duration_s": 20},
    )
    moments = offsets({"process": "phases", "phases": [poisson, silence, constant, LINEAR]}, 5)
    assert not ((moments >= 10) & (moments < 30)).any()
    assert np.allclose(moments[(moments >= 30) & (moments < 34)], 30 + np.arange(1, 20) / 5)
    last = moments[moments >= 34] - 34
    assert distance(last, cumulated(LINEAR, last) / 10_000) < KOLMOGOROV_999 and last[-1] < 100
    # what comes before or after a phase does not move it
    changed = offsets({"process": "phases", "phases": [poisson, silence, constant | {"rate_rps": 9}, LINEAR]}, 5)
    assert np.array_equal(changed[changed < 10], moments[moments < 10])
    assert np.array_equal(changed[changed >= 34], moments[moments >= 34])
    # and its own draw is that of the process alone
    alone = scenario(poisson).arrivals.draw(np.random.default_rng(5).spawn(1)[0])[0]
    assert np.array_equal(alone, moments[moments < 10])


@pytest.mark.parametrize(
    ("arrivals", "sentence"),
    [(LINEAR | {"start_rps": 0, "end_rps": 0}, "nothing would come"),
     (EXPONENTIAL | {"start_rps": 0}, "nothing grows from or to 0 by a factor"),
     ({"process": "phases", "phases": [{"process": "poisson", "rate_rps": 1, "count": 5}]},
      r"phases\[0\] must end by its duration_s"),
     ({"process": "phases", "phases": [{"process": "poisson", "rate_rps": 1, "count": 5, "duration_s": 9}]},
      "leave count out"),
     ({"process": "phases", "phases": [{"process": "silence", "duration_s": 5}]}, "all silence")],
)  # fmt: skip
def test_process_that_makes_no_sense_is_refused(arrivals, sentence):
    with pytest.raises(ValueError, match=sentence):
        scenario(arrivals)


def test_process_that_gives_nothing_is_refused():
    with pytest.raises(ScenarioError, match="process ramp give no request"):
        offsets(LINEAR | {"start_rps": 0.001, "end_rps": 0.001, "duration_s": 1})


@pytest.mark.parametrize("arrivals", [
    *further({"process": "constant", "rate_rps": 1_000_000}),
    {"process": "ramp", "start_rps": 0, "end_rps": 2 * MAX_REQUESTS / 10, "gaps": "regular"},
])  # fmt: skip
def test_as_many_requests_as_fit_a_run_are_taken_and_more_are_refused(arrivals):
    """Both give exactly the bound; the last of the arrivals falls on the end, where rounding decides."""
    if arrivals["process"] == "ramp":  # a rate has a bound of its own: the same number over a longer time
        arrivals, seconds = arrivals | {"end_rps": 1_000_000}, 20
    else:
        seconds = 10
    assert MAX_REQUESTS - 1 <= len(offsets(arrivals | {"duration_s": seconds})) <= MAX_REQUESTS
    with pytest.raises(ScenarioError, match=f"at most {MAX_REQUESTS} fit one run"):
        offsets(arrivals | {"duration_s": seconds * 1.00001})


def bin_s(times_s) -> float | None:
    rounding = Rounding()
    for time_s in times_s:
        rounding.add(time_s)
    return rounding.bins.width_s


def mooncake_like(tmp_path, gap_ms: int) -> dict:
    file = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
    file.write_text("".join(row % (bucket * gap_ms) for bucket in range(40) for _ in range(10)))
    return {"process": "trace", "file": str(file), "duration_s": 1000, "seconds_per_unit": 0.001}


def test_quantised_trace_is_told_and_spread_within_its_bin_in_its_order(tmp_path):
    arrivals = mooncake_like(tmp_path, 3000)
    as_it_is, spread = offsets(arrivals), offsets(arrivals | {"dequantize": True})
    assert bin_s(as_it_is) == 3.0
    assert np.array_equal(np.floor(spread / 3) * 3, as_it_is) and (np.diff(spread) >= 0).all()
    inside = np.sort(spread % 3)
    assert distance(inside, inside / 3) < KOLMOGOROV_999
    twice = offsets(arrivals | {"dequantize": True, "speedup": 2})
    assert np.allclose(twice * 2, spread)


@pytest.mark.parametrize("slice_", [
    {"duration_s": 9}, {"start_s": 60, "duration_s": 12}, {"count": 20}, {"keep_one_in": 100}, {"keep_one_in": 20},
])  # fmt: skip
def test_bin_of_a_trace_is_that_of_the_whole_file_whatever_is_taken_of_it(tmp_path, slice_):
    arrivals = mooncake_like(tmp_path, 3000) | slice_
    facts = workload_facts(scenario(arrivals), 0)["traces"][arrivals["file"]]
    assert facts["quantised_into_s"] == read_trace(Path(arrivals["file"])).bins.width_s == 3.0
    as_it_is, spread = offsets(arrivals), offsets(arrivals | {"dequantize": True})
    assert np.array_equal(np.floor(spread / 3) * 3, as_it_is) and not np.array_equal(spread, as_it_is)


def test_trace_that_is_not_quantised_is_not_called_so_and_not_spread(tmp_path):
    rng = np.random.default_rng(0)
    assert bin_s(np.cumsum(rng.exponential(0.5, 200))) is None
    assert bin_s(3.0 * np.arange(2000) + np.where(np.arange(2000) == 1999, 0.1, 0)) is None  # a late one decides, too
    assert bin_s(np.cumsum(rng.integers(1, 9, 200)) / 1e3) is None  # milliseconds are a resolution, not a bin
    with pytest.raises(ScenarioError, match=r"arrivals\.dequantize is true, but the times"):
        offsets(mooncake_like(tmp_path, 1) | {"dequantize": True})


def test_file_too_short_to_tell_its_bin_is_not_called_unrounded(tmp_path):
    file = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
    file.write_text("".join(row % stamp for stamp in (0, 0, 27_000, 27_001, 54_000, 54_002)))
    with pytest.raises(ScenarioError, match="fewer than 8 bins, too few to tell"):
        offsets({"process": "trace", "file": str(file), "duration_s": 100, "dequantize": True})


def test_bin_is_found_through_jitter_and_in_any_order():
    """One that is known: of gaps of 2 to 40 bins, off by some milliseconds, from a first one that is off itself."""
    rng = np.random.default_rng(1)
    for width_s, jitter_s in ((3.0, 0.004), (10.0, 0.004), (1.0, 0.004), (0.25, 0.001), (0.05, 0.0)):
        exact = np.cumsum(rng.integers(2, 40, 3000)) * width_s
        times_s = exact + rng.choice([-jitter_s / 2, 0, 0, 0, jitter_s / 2], 3000)
        assert bin_s(times_s) == bin_s(times_s - times_s[0]) == bin_s(rng.permutation(times_s)) == width_s


def test_bundled_trace_is_spread_over_its_bins_of_three_seconds():
    """Its stamps are 0, 3000, 5999, 9000, ...: 3,539 of 12,031 are off by -1 to 3 ms."""
    trace = {"process": "trace", "file": "mooncake_conversation_trace.jsonl", "start_s": 30, "duration_s": 600}
    assert workload_facts(scenario(trace), 0)["traces"][trace["file"]]["quantised_into_s"] == 3.0
    as_it_is, spread = offsets(trace), offsets(trace | {"dequantize": True})
    assert np.array_equal(np.floor(spread / 3), np.round(as_it_is / 3))
    assert (np.diff(spread) >= 0).all() and len(np.unique(spread)) == len(spread)


def test_schedule_is_the_same_in_another_process_and_another_with_another_seed():
    chosen = scenario({"process": "phases", "phases": [LINEAR | {"duration_s": 2}, EXPONENTIAL | {"duration_s": 2}]})
    code = (
        "from tests.loadgen.scenarios import scenario\nfrom sojourn.loadgen.schedule.build import build_schedule\n"
        f"arrivals = {chosen.arrivals.model_dump()!r}\n"
        "print([r.due_offset_ns for r in build_schedule(scenario(arrivals), 11, 'x')])"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    here = [request.due_offset_ns for request in build_schedule(chosen, 11, "x")]
    assert elsewhere.stdout.strip() == str(here)
    assert here != [request.due_offset_ns for request in build_schedule(chosen, 12, "x")]
