"""Percentiles and goodput of a watched server lie where those of its requests do, and the history stays bounded."""

from dataclasses import replace

import numpy as np
import pytest

from sojourn.live.watch import observer as observers
from sojourn.live.watch.percentiles import quantile_bounds
from tests.metrics.foreign import Life
from tests.metrics.live_pages import observed

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def drawn(seed: int, count: int = 400) -> list[Life]:
    rng = np.random.default_rng(seed)
    queues, decodes = rng.lognormal(-2, 1.5, count), rng.lognormal(-0.5, 0.7, count)
    return [Life(due_s=number * 0.15, queue_s=queue, decode_s=decode)
            for number, (queue, decode) in enumerate(zip(queues, decodes, strict=True))]  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_percentiles_lie_between_the_bounds_that_are_shown(seed):
    lives, until = drawn(seed), 50
    server = observed(lives, until, lambda _: (4, 0, 0.2)).watched()
    first = [life for life in lives if 0 < life.first_s <= until]
    ended = [life for life in lives if 0 < life.last_s <= until]
    truth = {
        "TTFT": [life.first_s + life.back_s - life.arrived_s for life in first],
        "TPOT": [life.decode_s / (life.output_tokens - 1) for life in ended],
        "ITL": [life.decode_s / (life.output_tokens - 1) for life in ended for _ in range(life.output_tokens - 1)],
        "queue": [life.queue_s for life in ended],
    }
    shown = {each.latency: each for each in server.percentiles}
    assert [*shown] == [*truth]
    for name, values in truth.items():
        assert shown[name].samples == len(values) and shown[name].mean_ms == pytest.approx(1e3 * np.mean(values))
        for place, share in QUANTILES.items():
            low, high = shown[name].between_ms[place]
            exact = 1e3 * np.sort(values)[int(np.ceil(share * len(values))) - 1]
            assert low < exact <= (np.inf if high is None else high) * (1 + 1e-9), (name, place)


def test_percentile_above_the_last_bound_has_no_upper_one():
    assert quantile_bounds({0.1: 5, 1.0: 6, float("inf"): 20}, 20) == {
        "p50": (1.0, None), "p90": (1.0, None), "p99": (1.0, None)
    }  # fmt: skip


OBJECTIVES = {
    "ttft_ms": lambda life: life.first_s + life.back_s - life.arrived_s,
    "tpot_ms": lambda life: life.decode_s / (life.output_tokens - 1),
    "e2e_ms": lambda life: life.last_s + life.back_s - life.arrived_s,
}


@pytest.mark.parametrize("until", [50, 100])  # the window of 60 s has the first request, and begins among requests
@pytest.mark.parametrize("stretch", [1, 30])  # of the decodes: most of the requests that began do not end
@pytest.mark.parametrize(
    "bounds",
    [{"ttft_ms": 300.0}, {"tpot_ms": 40.0}, {"e2e_ms": 1000.0}, {"ttft_ms": 300.0, "tpot_ms": 40.0},
     {"ttft_ms": 1000.0, "tpot_ms": 10.0}, {"ttft_ms": 250.0, "e2e_ms": 5000.0}],
    ids=str,
)  # fmt: skip
def test_goodput_is_between_its_bounds(bounds, stretch, until):
    lives = [replace(life, decode_s=life.decode_s * stretch) for life in drawn(3, 700)]
    server = observed(lives, until, lambda now: (running(lives, now), 0, 0.2), bounds).watched()
    window = [life for life in lives if max(0, until - 60) < life.last_s <= until]
    good = sum(all(1e3 * OBJECTIVES[name](life) <= bound for name, bound in bounds.items()) for life in window)
    low, high = (each * min(until, 60) for each in server.goodput_rps)
    assert low - 1e-6 <= good <= high + 1e-6 and high <= len(window) + 1e-6


@pytest.mark.parametrize(("queue_s", "least", "most"), [(0.0, 6.5, 6.7), (2.0, 0.0, 0.0)])
def test_goodput_tells_all_good_from_none(queue_s, least, most):
    lives = [Life(due_s=number * 0.15, queue_s=queue_s) for number in range(400)]
    objectives = {"ttft_ms": 100.0, "tpot_ms": 25.0}
    low, high = observed(lives, 50, lambda now: (running(lives, now), 0, 0.2), objectives).watched().goodput_rps
    assert least <= low <= high <= most


def test_requests_that_began_and_did_not_end_are_no_goodput():
    lives = [Life(due_s=number * 0.15, decode_s=1000.0) for number in range(50)]
    server = observed(lives, 14, lambda now: (running(lives, now), 0, 0.2), {"e2e_ms": 60_000.0}).watched()
    assert server.goodput_rps == (0.0, 0.0)


def test_goodput_is_unknown_without_objectives():
    server = observed(drawn(1), 50, lambda _: (4, 0, 0.2)).watched()
    assert server.goodput_rps is None and server.good_tokens_per_s is None  # vLLM counts none by itself


def running(lives: list[Life], now_s: float) -> int:
    return sum(life.scheduled_s <= now_s < life.last_s for life in lives)


def test_history_of_percentiles_covers_minutes_and_no_more(monkeypatch):
    monkeypatch.setattr(observers, "HISTORY_S", 100.0)
    observer = observed(drawn(3, 1500), 220, lambda _: (4, 0, 0.2), {"ttft_ms": 300.0})
    points = list(observer.latencies)
    assert 95e9 <= points[-1].ns - points[0].ns <= 100e9 and 15 <= len(points) <= 21
    assert all(set(point.between_ms) == {"TTFT", "TPOT", "ITL", "queue"} for point in points)
    assert all(point.goodput_rps[0] <= point.goodput_rps[1] for point in points)
