"""Figures of the page of estimates: planted errors are found again."""

import numpy as np
import pytest

from bench.silicon import figures
from bench.silicon.judged import Estimated
from bench.silicon.rows import Measured
from sojourn.replay.device.estimate import Deployment
from sojourn.replay.device.known_errors import keys_of

SIZES = (4, 8, 16, 32, 64, 128)
TABLES = Deployment(model="Llama-3.1-8B", device="h100_sxm", weight_format="fp8")


def curve(deployment, factor=1.0, host_ms=0.0, noise=None):
    """Measured 8 ms and 0.1 ms for each request; the estimate lacks `host_ms` and is `factor` times the rest."""
    found = []
    for place, size in enumerate(SIZES):
        tpot = 8 + 0.1 * size + host_ms
        row = Measured(place, deployment, 1024, 256, size, 100.0, tpot if noise is None else tpot * noise[place])
        found.append(Estimated(row, factor * (tpot - host_ms), 100.0, 100 + 255 * tpot, 1.0))
    return found


def deployments(count):
    return [Deployment(model=f"m{n}", device="h100_sxm", tensor_parallel=2 ** (n % 3)) for n in range(count)]


def test_the_host_time_that_is_missing_is_found():
    rows = [each for one in deployments(6) for each in curve(one, host_ms=1.25)]
    assert figures.host_times(rows) == {"vllm": 1.25e6}


def test_a_factor_of_the_deployment_is_gone_with_one_measured_point():
    rows = curve(TABLES, factor=1.3)
    assert figures.tpot(rows).median == pytest.approx(0.3)
    assert figures.one_point(rows).median == pytest.approx(0.0, abs=1e-9)


def test_an_optimist_promises_too_many_at_a_time():
    answers = [figures.concurrency_answers(curve(TABLES, factor=factor)) for factor in (0.7, 1.0, 1.5)]
    assert [each.promises > 0.5 for each in answers] == [True, False, False]
    assert [each.useful for each in answers][1] == 1.0 and answers[2].useful < 0.5


def test_pairs_differ_in_one_thing_and_their_ratios_in_what_was_planted():
    faster = Deployment(model="Llama-3.1-8B", device="h200_sxm", weight_format="fp8")
    two = Deployment(model="Llama-3.1-8B", device="h200_sxm", weight_format="fp8", tensor_parallel=2)
    rows = [*curve(TABLES), *curve(faster, factor=1.1), *curve(two, factor=1.1)]
    found = {(each.kind, each.first, each.second): [] for each in figures.pairs(rows)}
    for each in figures.pairs(rows):
        found[each.kind, each.first, each.second].append(each.ratio)
    assert set(found) == {
        ("device", "h100_sxm", "h200_sxm"), ("device", "h200_sxm", "h100_sxm"), ("tensor_parallel", "1", "2")
    }  # fmt: skip
    np.testing.assert_allclose(found["device", "h100_sxm", "h200_sxm"], 1.1)
    np.testing.assert_allclose(found["tensor_parallel", "1", "2"], 1.0)


def test_intervals_hold_what_they_say_of_deployments_that_are_alike():
    rng = np.random.default_rng(1)
    rows = [
        each
        for one in deployments(40)
        for each in curve(one, noise=np.exp(rng.normal(0, 0.2, len(SIZES))))
    ]  # fmt: skip
    inside, count = figures.coverage(rows, keys_of)
    assert count == len(rows) and inside > 0.85, "of one kind the bounds of 3 and 97 % hold more than 80 %"
