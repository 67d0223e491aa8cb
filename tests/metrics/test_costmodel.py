"""FLOPs and bytes by their definitions, and a step-time model that learns and never runs away."""

import itertools
import random

import numpy as np
import pytest

from metrics.costmodel import ModelShape, StepTimeModel, request_flops, step_bytes

SHAPE = ModelShape(
    num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48, vocab_size=100,
    weight_bytes=1000, kv_element_bytes=2,
)  # fmt: skip


def by_definition(new: int, past: int, sampled: int) -> int:
    """Two FLOPs for each multiply and add of every matrix product, position by position."""
    d, q, kv, i = SHAPE.hidden_size, 4 * 8, 2 * 8, SHAPE.intermediate_size
    flops = 0
    for position in range(past, past + new):
        projections = d * q + 2 * d * kv + q * d
        mlp = 3 * d * i
        attention = 2 * (position + 1) * q  # scores and mixing, over all positions up to itself
        flops += 2 * SHAPE.num_layers * (projections + mlp + attention)
    return flops + 2 * d * SHAPE.vocab_size * sampled


@pytest.mark.parametrize(("new", "past"), [(1, 0), (7, 0), (1, 50), (16, 33)])
def test_flops_equal_their_definition(new, past):
    assert request_flops(SHAPE, new, past, 1) == by_definition(new, past, 1)


def test_a_prompt_in_chunks_costs_the_same_flops_as_at_once():
    chunks = itertools.pairwise([0, 5, 6, 20, 40])
    assert sum(request_flops(SHAPE, end - begin, begin) for begin, end in chunks) == request_flops(SHAPE, 40, 0)


def test_bytes_hold_the_weights_once_and_each_context_once():
    kv = SHAPE.kv_bytes_per_token
    assert kv == 2 * 3 * 2 * 8 * 2
    assert step_bytes(SHAPE, [1, 4], [10, 0]) == 1000 + kv * (15 + 5)


def test_step_model_predicts_a_linear_device_it_has_watched():
    model, dice = StepTimeModel(), random.Random(0)
    errors = []
    for step in range(400):
        new = [1] * dice.randrange(1, 8) + ([dice.randrange(2, 300)] if step % 3 == 0 else [])
        past = [dice.randrange(0, 900) for _ in new]
        context = sum(p for n, p in zip(new, past, strict=True) if n == 1)
        truth = 2e6 + 4e4 * sum(new) + 900 * context + 60 * sum(
            n * p + n * (n + 1) // 2 for n, p in zip(new, past, strict=True) if n > 1
        )  # fmt: skip
        predicted = model.observe(new, past, round(truth))
        assert (predicted is None) == (step < StepTimeModel.MIN_STEPS)
        if step > 300:
            errors.append(abs(predicted - truth) / truth)
    assert np.mean(errors) < 0.02


@pytest.mark.parametrize("traffic", ["decode of one", "one prompt length"])
def test_step_model_stays_finite_when_the_traffic_never_varies(traffic):
    """Forgetting without new information makes the plain recursion grow until it overflows."""
    model = StepTimeModel()
    for step in range(120_000):
        new, past = ([1], [step % 2000]) if traffic == "decode of one" or step % 40 else ([128], [0])
        predicted = model.observe(new, past, 2_000_000)
    assert predicted is not None and 1_000_000 < predicted < 4_000_000
    assert np.isfinite(model._covariance).all()
