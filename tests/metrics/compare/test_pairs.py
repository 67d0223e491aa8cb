"""Two runs of one schedule, too short for windows: how often a verdict on pairs errs, and what it sees."""

import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest

from sojourn.metrics.compare.metrics import METRICS
from sojourn.metrics.compare.pairs import blocks_evidence, common_beginning, good_pairs
from sojourn.metrics.compare.samples import RunSamples, num_windows, samples_of
from sojourn.metrics.compare.verdict import counting_error, together, weigh, windows_evidence
from sojourn.metrics.run.directory import RunDirectory
from tests.further import further

MARGIN = 0.05
TRIED = ("ttft_mean", "e2e_p50", "attainment")


def correlated(random: np.random.Generator, count: int, neighbours: float) -> np.ndarray:
    """A first-order autoregression of variance 1."""
    found = random.normal(size=count)
    for place in range(1, count):
        found[place] = neighbours * found[place - 1] + math.sqrt(1 - neighbours**2) * found[place]
    return found


def run_of(latency_ms: np.ndarray, gap_ms: float = 100.0, bound_ms: float = 500.0) -> RunSamples:
    due = np.arange(len(latency_ms)) * gap_ms * 1e6
    rows = pd.DataFrame({
        "request_id": [f"r{place:05}" for place in range(len(due))], "klass": "chat", "due_ns": due.astype("int64"),
        "last_byte_ns": due + latency_ms * 1e6, "ttft_ms": latency_ms, "e2e_ms": latency_ms, "status": "ok",
        "served": True, "good": latency_ms <= bound_ms,
    })  # fmt: skip
    return RunSamples(RunDirectory("run"), rows, 0, float(due[-1]) / 1e9)


def queue(random: np.random.Generator, schedule: np.random.Generator, count: int, load: float) -> np.ndarray:
    """Waiting and service, ms, of one server whose speed wanders; arrivals and work are the schedule's."""
    gaps, work = schedule.exponential(100.0, count), schedule.exponential(100.0 * load, count)
    service = work * np.exp(0.1 * correlated(random, count, 0.8))
    found, wait = np.zeros(count), 0.0
    for place in range(count):
        wait = max(0.0, wait - gaps[place])
        wait += service[place]
        found[place] = wait + 50.0
    return found


def judged(a: RunSamples, b: RunSamples, random: np.random.Generator):
    found = []
    for name in TRIED:
        metric = METRICS[name]
        counted = counting_error(a.requests.good, b.requests.good, True) if name == "attainment" else 0.0
        found.append(weigh(name, metric, blocks_evidence(a, b, metric, random), MARGIN, 0.95, counted))
    return together(found, MARGIN, 0.95)


def test_where_nothing_is_compared_nothing_is_found_no_worse():
    assert together([], MARGIN, 0.95).verdict == "cannot tell"


def count_verdicts(pairs, random: np.random.Generator) -> tuple[int, int]:
    """Of pairs: how many are worse as a whole; how many are better, in the metric that errs most."""
    worse, better = 0, Counter()
    for a, b in pairs:
        found = judged(a, b, random)
        worse += found.verdict == "worse"
        better.update(each.metric for each in found.metrics if each.better)
    return worse, max(better.values(), default=0)


@pytest.mark.parametrize(
    ("count", "neighbours"), [(132, 0.9), *further((60, 0.0), (60, 0.6), (132, 0.0), (400, 0.9), (400, 0.95))]
)
def test_of_pairs_that_do_not_differ_at_most_one_in_twenty_gets_a_verdict(count, neighbours):
    """The noise is large beside the margin, so that the margin hides no error."""
    random = np.random.default_rng(7)
    noise = ([correlated(random, count, neighbours) for _ in range(2)] for _ in range(200))
    worse, better = count_verdicts(([run_of(450 * np.exp(0.8 * each)) for each in two] for two in noise), random)
    assert worse <= 10 and better <= 10


@pytest.mark.parametrize("load", [0.9, 1.4, *further(0.5, 0.7, 1.0, 1.1)])
def test_two_runs_of_one_queue_differ_by_chance(load):
    """Also of a queue that grows from the first request to the last. The server's speed wanders by 10%."""
    random = np.random.default_rng(3)
    pairs = ([run_of(queue(random, np.random.default_rng(seed), 132, load)) for _ in "ab"] for seed in range(200))
    worse, better = count_verdicts(pairs, random)
    assert worse <= 10 and better <= 10


def test_a_server_that_no_longer_queues_is_better_and_the_way_back_is_worse():
    """A's queue grows from the first request to the last, so that it has no windows."""
    random = np.random.default_rng(1)
    full, free = (run_of(queue(random, np.random.default_rng(2), 132, load)) for load in (2.0, 0.6))
    assert num_windows(full)[1]
    found = {each.metric: each for each in judged(full, free, random).metrics}
    assert found["ttft_mean"].better and found["attainment"].verdict == "no worse"
    assert judged(free, full, random).verdict == "worse"
    pairs = good_pairs(full, free)
    assert pairs.only_b > 5 * pairs.only_a and pairs.both + pairs.only_a == int(full.requests.good.sum())
    assert pairs.both + pairs.only_a + pairs.only_b + pairs.neither == 132


def test_pairs_and_windows_do_not_contradict_each_other():
    random, said = np.random.default_rng(5), Counter()
    for seed in range(60):
        factor = random.choice([0.6, 1.0, 1.6])
        schedule = np.random.default_rng(seed)
        a = run_of(300 * np.exp(0.3 * correlated(schedule, 200, 0.5)))
        b = run_of(factor * a.requests.e2e_ms.to_numpy() * np.exp(0.1 * correlated(random, 200, 0.5)))
        windows, _ = num_windows(a)
        metric = METRICS["e2e_mean"]
        of_pairs = weigh("e2e_mean", metric, blocks_evidence(a, b, metric, random), MARGIN, 0.95).verdict
        samples = [samples_of(side, metric, windows) for side in (a, b)]
        of_windows = weigh("e2e_mean", metric, windows_evidence(*samples, metric, True, random), MARGIN, 0.95).verdict
        said[of_windows] += 1
        assert of_pairs in (of_windows, "cannot tell") or of_windows == "cannot tell"
        assert of_pairs == of_windows or factor == 1.0
    assert said["worse"] >= 10 and said["no worse"] >= 10


def test_a_request_that_ran_on_while_the_other_load_went_on_is_not_of_the_common_beginning():
    short, long = run_of(np.full(70, 350.0)), run_of(np.full(120, 350.0))
    assert common_beginning(short, long) == common_beginning(long, short) == 67  # at 7 s one load parts
    other = long._replace(
        requests=long.requests.assign(due_ns=long.requests.due_ns + (long.requests.index > 9) * 10**7)
    )
    assert common_beginning(long, other) == 7
    assert common_beginning(long, long) == 120
