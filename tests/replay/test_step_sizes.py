"""Sizes of steps that a run never had: interpolated where others enclose them, marked where none does, and the error
that is stated of them is one of sizes left out."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.metrics.prediction import Change
from sojourn.replay import trust
from sojourn.replay.step_fit import StepColumns, StepTimes

CONTEXT = 300  # tokens of a sequence


def straight(batch: np.ndarray) -> np.ndarray:
    return 20e6 + 0.3e6 * batch


def kneed(batch: np.ndarray) -> np.ndarray:
    return 20e6 + 0.1e6 * np.minimum(batch, 16) + 0.5e6 * np.maximum(batch - 16, 0)


def stairs(batch: np.ndarray) -> np.ndarray:
    """Matrix products in tiles of 16 rows, as kernels have them."""
    return 20e6 + 5e6 * np.ceil(batch / 16)


def columns(batch: np.ndarray, ns: np.ndarray) -> StepColumns:
    none, batch = np.zeros(len(batch)), np.asarray(batch, dtype=float)
    return StepColumns(
        begin_ns=np.arange(len(batch)) * 3e7, tokens=batch, decodes=batch, decode_pairs=batch * CONTEXT, chunks=none,
        chunk_pairs=none, rows=batch, eager_prompts=none, device_ns=ns, sampling_ns=none, receive_ns=none,
        before_ns=none, after_ns=none, publish_ns=none, has_graphs=True,
    )  # fmt: skip


def fit(device, sizes, *, count: int = 2000, seed: int = 0, noise: float = 0.01) -> StepTimes:
    dice = np.random.default_rng(seed)
    batch = dice.choice(np.array(sizes), count)
    return StepTimes(columns(batch, device(batch) * dice.normal(1, noise, count)))


def predicted(times: StepTimes, batch: np.ndarray) -> np.ndarray:
    return times.expected_ns(columns(batch, np.zeros(len(batch))))


def is_beyond(times: StepTimes, batch: np.ndarray) -> np.ndarray:
    return times.is_beyond(np.asarray(batch, float), np.asarray(batch, float))


@settings(max_examples=40)
@given(sizes=st.sets(st.integers(1, 128), min_size=2, max_size=9), device=st.sampled_from([straight, kneed, stairs]))
def test_predictions_grow_with_the_batch_and_those_between_two_sizes_lie_between_theirs(sizes, device):
    times = fit(device, sorted(sizes), count=400)
    found = predicted(times, np.arange(1, 200))
    assert (np.diff(found) >= 0).all()
    ends = predicted(times, np.array([min(sizes), max(sizes)]))
    inside = predicted(times, np.arange(min(sizes), max(sizes) + 1))
    assert inside.min() >= ends[0] * (1 - 1e-9) and inside.max() <= ends[1] * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [(8, 64), (16, 64), (4, 128), (2, 100)])
def test_two_sizes_give_a_straight_line_and_no_half_batch(sizes):
    asked = np.array([1, 2, 4, 8, 16, 32, 64])
    assert predicted(fit(straight, sizes), asked) == pytest.approx(straight(asked), rel=0.03)


@settings(max_examples=30, derandomize=True)  # a few devices in a thousand break it: docs/replay.md
@given(
    sizes=st.sets(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]), min_size=1, max_size=8),
    device=st.sampled_from([straight, kneed]),
)  # fmt: skip
def test_the_stated_error_is_half_of_the_true_one_at_least_or_the_size_is_marked(sizes, device):
    """The mean of the sizes that are not marked; less than a thirtieth is as good as no error."""
    times = fit(device, sorted(sizes), count=400)
    unseen = np.setdiff1d(np.arange(1, 200), list(sizes))
    inside = unseen[~is_beyond(times, unseen)]
    if len(inside):
        errors = np.abs(predicted(times, inside) / device(inside) - 1)
        assert times.error >= errors.mean() / 2 or errors.mean() < 1 / 30


@pytest.mark.parametrize("device", [straight, kneed, stairs])
@pytest.mark.parametrize("sizes", [(8, 12, 24), (32,), (4, 16, 64)])
def test_what_is_larger_or_smaller_than_the_run_is_marked(sizes, device):
    times = fit(device, sizes)
    asked = np.arange(1, 200)
    assert (is_beyond(times, asked) == ((asked < min(sizes)) | (asked > max(sizes)))).all()


def test_jumps_of_a_kernel_are_an_error_at_sizes_that_were_left_out_though_each_size_of_the_run_fits():
    sizes = (1, 8, 16, 17, 32, 33, 48, 64)
    assert fit(stairs, sizes).error > 10 * fit(straight, sizes).error > 0
    assert fit(straight, sizes).error < 0.01


@pytest.mark.parametrize("sizes", [(32,), (8, 64)])
def test_too_few_sizes_tell_no_error(sizes):
    times = fit(straight, sizes)
    assert math.isinf(times.error) and times.sizes == len(sizes)


def test_of_a_run_with_one_size_a_change_to_other_sizes_is_doubted():
    replayed = SimpleNamespace(guessed=0.2, repeated=0)
    load = SimpleNamespace(requests=[])
    for sizes, is_doubted in (((32,), True), ((8, 32), False)):
        material = SimpleNamespace(times=fit(straight, sizes), load=load, drafts=None)
        doubts = trust.of_change(Change(), replayed, material)
        assert any("one size" in doubt for doubt in doubts) == is_doubted


def test_a_knee_that_the_sizes_show_is_kept_and_jumps_that_they_show_do_not_bend_what_goes_on():
    every = np.arange(1, 65)
    assert predicted(fit(kneed, every), every) == pytest.approx(kneed(every), rel=0.02)
    larger = np.array([96, 112, 128])  # whole tiles, as 64 is
    sizes = [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert predicted(fit(stairs, sizes), larger) == pytest.approx(stairs(larger), rel=0.1)


@settings(max_examples=20)
@given(
    bad=st.lists(st.sampled_from([0.0, 1e3, 3e5, 1e6, 6e10, -2e6, math.nan, math.inf]), min_size=1, max_size=3),
    size=st.sampled_from([1, 8, 64]), seed=st.integers(0, 9),
)  # fmt: skip
def test_three_bad_steps_among_a_thousand_move_no_prediction_of_a_replay(bad, size, seed):
    dice = np.random.default_rng(seed)
    batch = dice.choice(np.array([1, 2, 4, 8, 16, 32, 64]), 1000)
    steps = columns(batch, kneed(batch) * dice.normal(1, 0.01, 1000))
    spoilt = steps.device_ns.copy()
    spoilt[dice.choice(np.flatnonzero(batch == size), len(bad), replace=False)] = bad
    asked = np.arange(1, 97)
    times = StepTimes(replace(steps, device_ns=spoilt))
    assert predicted(times, asked) == pytest.approx(predicted(StepTimes(steps), asked), rel=0.015)
    assert np.isfinite(times.device_ratio).all() and (times.device_ratio >= 0).all()
