"""Percentiles and goodput of a watched server lie where those of its requests do, and the history stays bounded."""

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


@pytest.mark.parametrize("seed", [1, 2])
def test_goodput_lies_between_its_bounds_and_is_unknown_without_objectives(seed):
    lives, until, bounds = drawn(seed), 50, {"ttft_ms": 300.0, "tpot_ms": 40.0}
    server = observed(lives, until, lambda _: (4, 0, 0.2), bounds).watched()
    good = sum(
        1e3 * (life.first_s + life.back_s - life.arrived_s) <= 300 and life.decode_s / (life.output_tokens - 1) <= 0.04
        for life in lives if 0 < life.last_s <= until
    )  # fmt: skip
    low, high = server.goodput_rps
    edge = sum(life.first_s <= until < life.last_s for life in lives) / until  # began and did not end
    assert low - edge <= good / until <= high + edge and low < high < len(lives) / until
    assert server.good_tokens_per_s is None  # vLLM counts no tokens by objectives
    assert observed(lives, until, lambda _: (4, 0, 0.2)).watched().goodput_rps is None


def test_history_of_percentiles_covers_minutes_and_no_more(monkeypatch):
    monkeypatch.setattr(observers, "HISTORY_S", 100.0)
    observer = observed(drawn(3, 1500), 220, lambda _: (4, 0, 0.2), {"ttft_ms": 300.0})
    points = list(observer.latencies)
    assert 95e9 <= points[-1].ns - points[0].ns <= 100e9 and 15 <= len(points) <= 21
    assert all(set(point.between_ms) == {"TTFT", "TPOT", "ITL", "queue"} for point in points)
    assert all(point.goodput_rps[0] <= point.goodput_rps[1] for point in points)
