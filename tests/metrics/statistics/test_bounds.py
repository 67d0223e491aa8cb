"""No interval of what cannot be negative goes below nought, and no share leaves 0 to 1, whoever makes the interval."""

import math
from dataclasses import replace

import numpy as np
import pytest

from sojourn.live.kv_lens.intervals import rate_interval
from sojourn.metrics.compare.dependence import requests_evidence
from sojourn.metrics.compare.metrics import METRICS
from sojourn.metrics.compare.verdict import counting_error, weigh
from sojourn.metrics.prediction import Change
from sojourn.metrics.statistics.intervals import (
    clustered_mean_interval,
    clustered_quantile_interval,
    mean_interval,
    quantile_interval,
    series_quantile_intervals,
    share_interval,
    wilson_bounds,
)
from sojourn.replay.predictor import predictor_of
from tests.metrics.compare.test_pairs import correlated, run_of
from tests.replay.simulated_run import random_asks, write_run

TRIALS = 40


def draws():
    """Samples that a symmetric interval leaves: nearly all nought, one far out, neighbours that hang together."""
    random = np.random.default_rng(11)
    for _ in range(TRIALS):
        count = int(random.integers(10, 120))
        yield np.where(random.random(count) < 0.1, random.exponential(1e4, count), 0.0)
        yield np.exp(3 * correlated(random, count, 0.95))


def test_means_and_quantiles_of_latencies_are_not_negative():
    for values in draws():
        clusters = np.arange(len(values)) // 3
        found = [
            mean_interval(values), clustered_mean_interval(values, clusters), quantile_interval(values, 0.9),
            clustered_quantile_interval(values, clusters, 0.5), *series_quantile_intervals(values, (0.1, 0.5, 0.99)),
        ]  # fmt: skip
        assert all(each.low >= 0 for each in found if each is not None and each.low is not None)
    signed = mean_interval(np.random.default_rng(0).normal(0, 1, 50))
    assert signed.low < 0 < signed.high


def test_shares_stay_within_nought_and_one():
    for values in draws():
        shares = values / max(values.max(), 1e-9)
        flags = shares > np.median(shares)
        bounds = [share_interval(flags), mean_interval(1 - shares, most=1.0)]
        found = [(each.low, each.high) for each in bounds if each is not None]
        found += [rate_interval(np.round(90 * shares), np.full(len(shares), 90.0)), wilson_bounds(0.01, 3.0, 4.0)]
        assert all(0 <= low <= high <= 1 for low, high in found if low is not None)


def test_a_ratio_of_shares_names_no_share_above_all():
    random, metric = np.random.default_rng(2), METRICS["attainment"]
    for _ in range(TRIALS):
        a, b = (run_of(450 * np.exp(random.uniform(0.2, 2) * correlated(random, 80, 0.9))) for _ in range(2))
        counted = counting_error(a.requests.good, b.requests.good, True)
        found = weigh("attainment", metric, requests_evidence(a, b, metric, True), 0.05, 0.95, counted)
        assert 0 <= found.low <= found.ratio <= found.high
        assert found.a == 0 or found.high * found.a <= 1 + 1e-9


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    run = write_run(
        tmp_path_factory.mktemp("bounds") / "run", random_asks(3, 60, mean_gap_ns=1_000_000), max_num_seqs=4,
        objectives=[{"klass": "all", "e2e_ms": 60.0}],
    )  # fmt: skip
    return predictor_of(run)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("spread", [0.05, 0.8, 3.0])
def test_no_prediction_is_below_nought_however_sure_its_parts_are(predictor, spread, quick):
    predictor._known.clear()
    metrics = dict.fromkeys((*predictor.recorded,), spread)
    predictor.spread = replace(predictor.spread, speed=spread, error_beyond=spread, metrics=metrics)
    for found in predictor.predict([Change(), Change(settings={"max_num_seqs": 12}), Change(arrival_rate=3.0)],
                                   quick=quick):  # fmt: skip
        shares = [found.attainment, *found.attainment_by_class.values()]
        others = [
            found.goodput_rps,
            *(one for part in (found.ttft_ms, found.tpot_ms, found.e2e_ms) for one in part.values()),
        ]
        assert all(0 <= each.low <= each.median <= each.high <= 1 for each in shares)
        assert all(0 <= each.low <= each.median <= each.high for each in others if not math.isnan(each.median))
