"""A few steps of a wrong time move no model of step times, and sizes between those that were seen are interpolated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.diagnosis.step_facts import fit
from sojourn.metrics.compute.cost_model import StepWork
from sojourn.metrics.compute.step_time import FAR_BEYOND, StepTimeModel, features
from sojourn.metrics.statistics.relative_fit import fitted

SIZES = np.array([1, 2, 4, 8, 16, 32, 64])
CONTEXT = 400  # tokens of a sequence
STEPS = 1000
# What a clock, a page fault or an empty plan may give instead of a step's time: ns of a usual time.
BAD = {
    "no time": lambda ns: 0.0,
    "a microsecond": lambda ns: 1e3,
    "a third of a millisecond": lambda ns: 3.1e5,
    "a millisecond": lambda ns: 1e6,
    "a tenth": lambda ns: ns / 10,
    "ten times": lambda ns: 10 * ns,
    "a hundred times": lambda ns: 100 * ns,
    "a minute": lambda ns: 6e10,
    "below nought": lambda ns: -2e6,
    "no number": lambda ns: np.nan,
    "infinite": lambda ns: np.inf,
}


def device_ns(batch: np.ndarray, context: np.ndarray) -> np.ndarray:
    return 24e6 + 0.25e6 * np.minimum(batch, 32) + 0.15e6 * np.maximum(batch - 32, 0) + 200.0 * context


def recorded(seed: int, count: int = STEPS, sizes: np.ndarray = SIZES) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Batch, context and ns of decode steps."""
    dice = np.random.default_rng(seed)
    batch = dice.choice(sizes, count)
    context = batch * dice.integers(150, 700, count)
    return batch, context, device_ns(batch, context) * dice.normal(1, 0.01, count)


def found(batch: np.ndarray, context: np.ndarray) -> np.ndarray:
    none = np.zeros_like(batch)
    return features(StepWork(batch, batch, 32 * context, none, none, 32 * context, batch), eager=0.0)


def online(batch: np.ndarray, context: np.ndarray, ns: np.ndarray) -> np.ndarray:
    model = StepTimeModel()
    model.observe_all(found(batch, context), ns)
    return found(SIZES, CONTEXT * SIZES) @ np.nan_to_num(model.coefficients())


def capacity(batch: np.ndarray, context: np.ndarray, ns: np.ndarray) -> np.ndarray:
    return fit(batch, context, ns).predict(SIZES, CONTEXT * SIZES)


def robust(batch: np.ndarray, context: np.ndarray, ns: np.ndarray) -> np.ndarray:
    return found(SIZES, CONTEXT * SIZES) @ fitted(found(batch, context), ns)


@pytest.mark.parametrize("model", [online, capacity, robust])
@settings(max_examples=60)
@given(
    bad=st.lists(st.sampled_from(sorted(BAD)), min_size=1, max_size=3), size=st.sampled_from(SIZES.tolist()),
    where=st.floats(0, 1), seed=st.integers(0, 20),
)  # fmt: skip
def test_three_bad_steps_among_a_thousand_move_no_prediction(model, bad, size, where, seed):
    batch, context, ns = recorded(seed)
    usual = model(batch, context, ns)
    places = np.flatnonzero(batch == size)
    first = int(where * (len(places) - len(bad)))
    spoilt = ns.copy()
    for place, name in zip(places[first:], bad, strict=False):
        spoilt[place] = BAD[name](ns[place])
    assert model(batch, context, spoilt) == pytest.approx(usual, rel=0.015)


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_step_in_the_first_block_is_as_harmless_as_later(name):
    batch, context, ns = recorded(3)
    usual = online(batch, context, ns)
    spoilt = ns.copy()
    spoilt[10] = BAD[name](ns[10])
    assert online(batch, context, spoilt) == pytest.approx(usual, rel=0.01)


def test_what_a_step_is_expected_to_take_is_said_though_its_time_is_no_reading():
    batch, context, ns = recorded(4)
    model = StepTimeModel()
    model.observe_all(found(batch, context), ns)
    steps = model.steps
    predicted = model.observe_all(found(batch[:3], context[:3]), np.array([0.0, np.nan, -1.0]))
    assert predicted == pytest.approx(device_ns(batch[:3], context[:3]), rel=0.03)
    assert model.steps == steps


@pytest.mark.parametrize("factor", [1 / 20, 1 / 3, 2.0])
def test_a_device_that_has_changed_its_speed_for_good_is_learnt(factor):
    model = StepTimeModel()
    batch, context, ns = recorded(5, 3000)
    model.observe_all(found(batch, context), ns)
    batch, context, ns = recorded(6, 16_000)
    model.observe_all(found(batch, context), factor * ns)
    predicted = np.array([model.predict(each) for each in found(SIZES, CONTEXT * SIZES)])
    assert predicted == pytest.approx(factor * device_ns(SIZES, CONTEXT * SIZES), rel=0.06)


@pytest.mark.parametrize("sizes", [(8, 64), (16, 64), (1, 64), (4, 32, 64), (1, 8, 32, 64)])
def test_batches_between_those_that_were_seen_lie_between_them(sizes):
    model = StepTimeModel()
    batch, context, ns = recorded(7, 2000, np.array(sizes))
    model.observe_all(found(batch, context), ns)
    between = np.arange(min(sizes), max(sizes) + 1)
    predicted = np.array([model.predict(each) for each in found(between, CONTEXT * between)])
    assert (np.diff(predicted) > 0).all()
    assert predicted == pytest.approx(device_ns(between, CONTEXT * between), rel=0.1)


@pytest.mark.parametrize(("sizes", "asked"), [((32,), 1), ((32,), 20), ((8, 64), 4), ((16, 64), 1)])
def test_nothing_is_said_of_batches_far_below_those_that_were_seen(sizes, asked):
    model = StepTimeModel()
    batch, context, ns = recorded(8, 1000, np.array(sizes))
    model.observe_all(found(batch, context), ns)
    assert asked < min(sizes) / FAR_BEYOND and model.predict(found(np.int64(asked), np.int64(CONTEXT * asked))) is None
    assert model.predict(found(np.int64(min(sizes)), np.int64(CONTEXT * min(sizes)))) is not None
