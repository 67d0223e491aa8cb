"""One run a side, whose requests depend on each other: how often a verdict errs, and what it sees."""

import heapq
import math

import numpy as np
import pandas as pd
import pytest

from sojourn.metrics.compare.dependence import requests_evidence
from sojourn.metrics.compare.metrics import METRICS
from sojourn.metrics.compare.pairs import common_beginning, good_pairs
from sojourn.metrics.compare.samples import RunSamples, num_windows
from sojourn.metrics.compare.verdict import counting_error, together, weigh
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


def run_of(latency_ms: np.ndarray, gap_ms: float = 100.0, bound_ms: float = 500.0, due_ms=None) -> RunSamples:
    due = np.arange(len(latency_ms)) * gap_ms * 1e6 if due_ms is None else (due_ms - due_ms[0]) * 1e6
    rows = pd.DataFrame({
        "request_id": [f"r{place:05}" for place in range(len(due))], "klass": "chat", "due_ns": due.astype("int64"),
        "last_byte_ns": due + latency_ms * 1e6, "ttft_ms": latency_ms, "e2e_ms": latency_ms, "status": "ok",
        "served": True, "good": latency_ms <= bound_ms,
    })  # fmt: skip
    return RunSamples(RunDirectory("run"), rows, 0, float(due[-1]) / 1e9)


def queue(
    random: np.random.Generator, schedule: np.random.Generator, count: int, load: float, servers: int = 1,
    slower: float = 1.0,
) -> RunSamples:  # fmt: skip
    """Waiting and service, ms, of servers whose speed wanders; arrivals and work are the schedule's."""
    due = np.cumsum(schedule.exponential(100.0, count))
    work = schedule.exponential(100.0 * load * servers, count)
    service = slower * work * np.exp(0.1 * correlated(random, count, 0.8))
    found, free = np.zeros(count), [0.0] * servers
    for place in range(count):
        begin = max(due[place], heapq.heappop(free))
        heapq.heappush(free, begin + service[place])
        found[place] = begin - due[place] + service[place] + 50.0
    return run_of(found, bound_ms=500.0 * servers, due_ms=due)


def judged(a: RunSamples, b: RunSamples, paired: bool = True, tried=TRIED):
    found = []
    for name in tried:
        metric = METRICS[name]
        counted = counting_error(a.requests.good, b.requests.good, paired) if name == "attainment" else 0.0
        found.append(weigh(name, metric, requests_evidence(a, b, metric, paired), MARGIN, 0.95, counted))
    return together(found, MARGIN, 0.95)


def test_where_nothing_is_compared_nothing_is_found_no_worse():
    assert together([], MARGIN, 0.95).verdict == "cannot tell"


def count_verdicts(pairs, paired: bool) -> tuple[int, int]:
    """Of pairs: how many are worse as a whole or better in anything; how many are worse."""
    found = [judged(a, b, paired) for a, b in pairs]
    worse = [each.verdict == "worse" for each in found]
    either = [is_worse or any(metric.better for metric in each.metrics)
              for is_worse, each in zip(worse, found, strict=True)]  # fmt: skip
    return sum(either), sum(worse)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("count", "neighbours"),
    [(132, 0.9), *further((40, 0.0), (60, 0.6), (132, 0.0), (400, 0.9), (400, 0.95), (1500, 0.95))],
)
def test_of_runs_that_do_not_differ_at_most_one_in_twenty_gets_a_verdict(count, neighbours, paired):
    """The noise is large beside the margin, so that the margin hides no error."""
    random = np.random.default_rng(7)
    noise = ([correlated(random, count, neighbours) for _ in range(2)] for _ in range(200))
    either, _ = count_verdicts(([run_of(450 * np.exp(0.8 * each)) for each in two] for two in noise), paired)
    assert either <= 10


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("load", "count", "servers"),
    [(0.9, 132, 1), *further(*((load, count, servers) for load in (0.5, 0.7, 0.9, 1.0, 1.1, 1.4)
                               for count, servers in ((300, 1), (1500, 1), (300, 8), (1500, 8))))],
)  # fmt: skip
def test_two_runs_of_one_queue_differ_by_chance(load, count, servers, paired):
    """Of one schedule, and with arrivals of their own; also of a queue that grows to the last request."""
    random, pairs = np.random.default_rng(3), 200 if count < 1000 else 100
    schedules = ([2 * seed + (0 if paired else side) for side in range(2)] for seed in range(pairs))
    runs = ([queue(random, np.random.default_rng(seed), count, load, servers) for seed in seeds] for seeds in schedules)
    either, _ = count_verdicts(runs, paired)
    assert either <= pairs / 20


@pytest.mark.parametrize(("paired", "count", "fewest"), [(True, 1000, 12), *further((False, 3000, 14))])
def test_a_fifth_more_service_time_is_seen_at_load_seven_tenths(paired, count, fewest):
    random = np.random.default_rng(9)
    runs = (
        [queue(random, np.random.default_rng(2 * seed + (side and not paired)), count, 0.7, 8, 1.0 + 0.2 * side)
         for side in range(2)]
        for seed in range(20)
    )  # fmt: skip
    either, worse = count_verdicts(runs, paired)
    assert worse >= fewest and either == worse


def test_a_mean_that_no_longer_run_decides_says_so():
    random = np.random.default_rng(4)
    a, b = (queue(random, np.random.default_rng(seed), 400, 1.0) for seed in (5, 6))
    found = {each.metric: each for each in judged(a, b, paired=False).metrics}["ttft_mean"]
    assert "two runs of one server may differ by a factor of" in found.reason and found.needs is None


@pytest.mark.parametrize("paired", [True, False])
def test_a_server_that_no_longer_queues_is_better_and_the_way_back_is_worse(paired):
    """A's queue grows from the first request to the last, so that it has no windows."""
    random = np.random.default_rng(1)
    full, free = (queue(random, np.random.default_rng(2 if paired else each), 132, load)
                  for each, load in enumerate((2.0, 0.6)))  # fmt: skip
    assert num_windows(full)[1]
    found = {each.metric: each for each in judged(full, free, paired).metrics}
    assert found["ttft_mean"].better
    assert judged(free, full, paired).verdict == "worse"
    pairs = good_pairs(full, free)
    assert pairs.only_b > 5 * pairs.only_a and pairs.both + pairs.only_a == int(full.requests.good.sum())
    assert pairs.both + pairs.only_a + pairs.only_b + pairs.neither == 132


def test_a_request_that_ran_on_while_the_other_load_went_on_is_not_of_the_common_beginning():
    short, long = run_of(np.full(70, 350.0)), run_of(np.full(120, 350.0))
    assert common_beginning(short, long) == common_beginning(long, short) == 67  # at 7 s one load parts
    other = long._replace(
        requests=long.requests.assign(due_ns=long.requests.due_ns + (long.requests.index > 9) * 10**7)
    )
    assert common_beginning(long, other) == 7
    assert common_beginning(long, long) == 120
