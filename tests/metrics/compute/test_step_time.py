"""The step-time model learns what a device takes, is not led astray by stalls, and never runs away."""

import random
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from sojourn.metrics.compute.cost_model import Expansion, ModelShape, StepWork, chunk_pairs, step_work
from sojourn.metrics.compute.step_time import KNOTS, NUM_FEATURES, StepTimeModel, features

SHAPE = ModelShape(
    vocab_size=1000, hidden_size=64, attention_parameters=10_000, mlp_parameters=30_000, pair_flops=256,
    windows=((None, 3), (512, 1)), kv_bytes_per_token=1024, weight_bytes=100_000,
)  # fmt: skip


def true_device_ns(work: StepWork, padding: int = 0, eager: bool = True) -> float:
    """A device with a knee at 24 rows: what it reads bounds it below, what it computes above."""
    rows = work.tokens + padding
    linear = max(0.4e6, 1.5e4 * rows) + (2e5 if eager else 0.0)
    return linear + 60 * work.decode_pairs + 3e3 * work.decodes + 12 * work.chunk_pairs + 2e3 * work.logit_rows


def mix(dice: random.Random, batches=(1, 12), contexts=(0, 900), chunks=(2, 300)) -> StepWork:
    new = [1] * dice.randrange(*batches) if dice.random() < 0.9 else []
    if not new or dice.random() < 0.3:
        new += [dice.randrange(*chunks) for _ in range(dice.randrange(1, 3))]
    return step_work(SHAPE, new, [dice.randrange(*contexts) for _ in new], len(new))


def taught() -> tuple[StepTimeModel, random.Random]:
    return deepcopy(teach())


@cache
def teach() -> tuple[StepTimeModel, random.Random]:
    model, dice = StepTimeModel(), random.Random(0)
    for _ in range(3000):
        work = mix(dice)
        learn(model, features(work), round(true_device_ns(work) * dice.lognormvariate(0, 0.03)))
    return model, dice


def learn(model: StepTimeModel, found: np.ndarray, device_ns: int) -> float | None:
    """Of a single step: what was expected of it."""
    (predicted,) = model.observe_all(found[None], np.array([device_ns]))
    return None if np.isnan(predicted) else predicted


def error(model: StepTimeModel, work: StepWork, slower: float = 1.0) -> float:
    """Relative."""
    return model.predict(features(work)) / (slower * true_device_ns(work)) - 1


def test_features_rebuild_the_rows_and_separate_what_costs_apart():
    work = step_work(SHAPE, [1, 1, 5], [10, 600, 30], 2)
    found = features(work, 9, eager=False)
    assert len(found) == NUM_FEATURES
    assert found[:7].tolist() == [1, False, 2, 3 * 612 + 11 + 512, 1, 4 * (5 * 30 + 15), 2]
    for rows in (1, 2, 4, 5, 17, 64, 300, 5000):
        segments = features(step_work(SHAPE, [rows], [0], 1))[7 : 7 + len(KNOTS)].tolist()
        assert sum(segments) == rows - 1 and sorted(map(bool, segments), reverse=True) == list(map(bool, segments))


def test_it_predicts_what_it_has_not_seen_of_a_device_that_it_has_watched():
    model, dice = taught()
    held_out = [mix(dice, batches=(8, 20), contexts=(500, 1500), chunks=(40, 400)) for _ in range(300)]
    assert np.mean([abs(error(model, work)) for work in held_out]) < 0.05


def test_padded_rows_count_and_a_replayed_graph_saves_its_launches():
    model, dice = StepTimeModel(), random.Random(1)
    for _ in range(2000):
        work, eager = mix(dice), dice.random() < 0.3
        padding = 0 if eager else -work.tokens % 8
        learn(model, features(work, padding, eager=eager), round(true_device_ns(work, padding, eager)))
    work = step_work(SHAPE, [1] * 5, [100] * 5, 5)
    for padding, eager in ((0, True), (3, False), (40, False)):
        predicted = model.predict(features(work, padding, eager=eager))
        assert predicted == pytest.approx(true_device_ns(work, padding, eager), rel=0.05)


def test_it_says_nothing_before_it_has_seen_enough_nor_of_what_it_never_saw():
    model, dice = StepTimeModel(), random.Random(2)
    decodes = [step_work(SHAPE, [1] * count, [dice.randrange(900)] * count, count) for count in (1, 3, 4) * 200]
    for step, work in enumerate(decodes):
        predicted = learn(model, features(work), round(true_device_ns(work)))
        assert (predicted is None) == (step < StepTimeModel.MIN_STEPS)
    prompt = features(step_work(SHAPE, [200], [0], 1))
    assert model.predict(prompt) is None
    for _ in range(2 * StepTimeModel.BLOCK):
        learn(model, prompt, 4_000_000)
    assert model.predict(prompt) == pytest.approx(4_000_000, rel=0.1)


def test_a_step_is_predicted_before_it_is_learnt_from():
    model, _ = taught()
    work = mix(random.Random(3))
    before = model.predict(features(work))
    assert learn(model, features(work), round(50 * before)) == round(before)


@pytest.mark.parametrize("stalls", [1, 3])
def test_a_stall_does_not_spoil_the_next_predictions(stalls):
    model, dice = taught()
    calm, _ = taught()
    for _ in range(stalls):
        work = mix(dice)
        learn(model, features(work), round(10 * true_device_ns(work)))
    for _ in range(100):
        work = mix(dice)
        assert abs(model.predict(features(work)) / calm.predict(features(work)) - 1) < 0.02
        learn(model, features(work), round(true_device_ns(work)))


def test_a_lasting_slowdown_shows_first_and_is_learnt_in_the_end():
    model, dice = taught()
    first = [mix(dice) for _ in range(500)]
    errors = []
    for work in first:
        errors.append(error(model, work, slower=1.5))
        learn(model, features(work), round(1.5 * true_device_ns(work)))
    assert np.mean(errors) == pytest.approx(1 / 1.5 - 1, abs=0.05)  # it still expects the healthy device
    some = [mix(dice) for _ in range(3_000)]
    found, took_ns = np.array([features(work) for work in some]), [round(1.5 * true_device_ns(work)) for work in some]
    for _ in range(10):
        model.observe_all(found, np.array(took_ns))
    assert abs(np.mean([error(model, mix(dice), slower=1.5) for _ in range(500)])) < 0.05


@pytest.mark.parametrize("traffic", ["decode of one", "one prompt length", "all alike"])
def test_it_stays_finite_where_the_traffic_never_varies(traffic):
    model, found = StepTimeModel(), []
    for step in range(2000):
        new, past = 1, step
        if traffic == "one prompt length" and step % 40 == 0:
            new, past = 128, 0
        if traffic == "all alike":
            past = 7
        found.append(features(step_work(SHAPE, [new], [past], 1)))
    predicted = model.observe_all(np.tile(found, (6, 1)), np.full(6 * len(found), 2_000_000))[-1]
    assert 1_900_000 < predicted < 2_100_000
    assert np.isfinite(model._coefficients).all() and min(model._coefficients) >= 0


def test_a_device_without_a_clock_breaks_nothing():
    model = StepTimeModel()
    for _ in range(200):
        assert learn(model, features(step_work(SHAPE, [1], [3], 1)), 0) in (None, 0, 1)


def test_adapters_have_a_cost_of_their_own():
    """Of like steps those with adapters take longer, and the others are not expected to."""
    model, dice = StepTimeModel(), random.Random(4)
    for _ in range(1500):
        work = mix(dice)
        flops = dice.choice((0, 40_000 * work.tokens))
        device_ns = true_device_ns(work) + 0.1 * flops
        learn(model, features(work, adapter_flops=flops), round(device_ns * dice.lognormvariate(0, 0.02)))
    work = step_work(SHAPE, [1] * 8, [400] * 8, 8)
    for flops in (0, 40_000 * 8):
        assert model.predict(features(work, adapter_flops=flops)) == pytest.approx(
            true_device_ns(work) + 0.1 * flops, rel=0.06
        )


def test_expanded_latents_count_as_the_pairs_that_they_spare():
    expansion = Expansion(saved_pair_flops=128, position_flops=1000, most_context=2048)
    shape = replace(SHAPE, windows=((None, 4),), expansion=expansion)
    absorbed, expanded = (step_work(each, [1, 300], [50, 100], 2) for each in (replace(shape, expansion=None), shape))
    assert expanded.saved_flops > 0
    pairs = 5  # place of the pairs of chunks in the features
    saved = features(absorbed)[pairs] - features(expanded)[pairs]
    assert saved == expanded.saved_flops // shape.pair_flops
    assert chunk_pairs(shape, 300, 100) == features(expanded)[pairs]
    assert (features(absorbed)[:pairs] == features(expanded)[:pairs]).all()
