"""FLOPs and bytes by their definitions, and a step-time model that learns and never runs away."""

import itertools
import random

import msgspec
import numpy as np
import pytest

from metrics.costmodel import ExpertShape, ModelShape, StepTimeModel, decode_flops, request_flops, step_bytes

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 4, 2, 8, 32, 48
SHAPE = ModelShape(  # three layers of grouped attention, one of them with a window
    vocab_size=100,
    hidden_size=HIDDEN,
    layer_parameters=3 * (2 * HIDDEN * (HEADS + KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INTERMEDIATE),
    pair_flops=4 * HEADS * HEAD_DIM,
    windows=((None, 2), (6, 1)),
    kv_bytes_per_token=3 * 2 * KV_HEADS * HEAD_DIM * 2,
    weight_bytes=1000,
)


def by_definition(new: int, past: int, sampled: int) -> int:
    """Two FLOPs for each multiply and add of every matrix product, position by position."""
    d, q, kv = HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    flops = 0
    for position in range(past, past + new):
        projections = d * q + 2 * d * kv + q * d
        mlp = 3 * d * INTERMEDIATE
        seen = 2 * (position + 1) + min(position + 1, 6)  # of all layers: positions up to itself, or within the window
        flops += 2 * (3 * (projections + mlp) + 2 * q * seen)  # scores and mixing
    return flops + 2 * d * SHAPE.vocab_size * sampled


@pytest.mark.parametrize(("new", "past"), [(1, 0), (5, 1), (6, 0), (7, 0), (4, 4), (1, 50), (16, 33)])
def test_flops_equal_their_definition(new, past):
    assert request_flops(SHAPE, new, past, 1) == by_definition(new, past, 1)


def test_a_prompt_in_chunks_costs_the_same_flops_as_at_once():
    chunks = itertools.pairwise([0, 5, 6, 20, 40])
    assert sum(request_flops(SHAPE, end - begin, begin) for begin, end in chunks) == request_flops(SHAPE, 40, 0)


@pytest.mark.parametrize("pasts", [[0], [3, 3], [1, 7, 8, 9, 200]])
def test_flops_of_decodes_are_those_of_each(pasts):
    assert decode_flops(SHAPE, pasts) == sum(by_definition(1, past, 1) for past in pasts)


def test_bytes_hold_the_weights_once_and_each_visible_context_once():
    layer = SHAPE.kv_bytes_per_token // 3
    full, sliding, written = 1 + 10 + 4, min(11, 6) + 4, 3 * 5  # a decode after 10 tokens, and a prompt of 4
    assert step_bytes(SHAPE, [1, 4], [10, 0]) == 1000 + layer * (2 * full + sliding + written)


def test_bytes_of_experts_are_those_that_even_tokens_would_reach():
    experts = ExpertShape(num_layers=2, num_experts=8, num_chosen=2, expert_bytes=10)
    shape = msgspec.structs.replace(SHAPE, experts=experts)

    def expert_bytes(tokens: int) -> int:
        return step_bytes(shape, [tokens], [0]) - step_bytes(SHAPE, [tokens], [0])

    assert expert_bytes(1) == 2 * 2 * 10  # one token reads what it chose
    assert expert_bytes(10_000) == 2 * 8 * 10  # many read all
    dice = random.Random(0)
    drawn = [len(set().union(*(dice.sample(range(8), 2) for _ in range(3)))) for _ in range(4000)]
    assert expert_bytes(3) == pytest.approx(2 * 10 * np.mean(drawn), rel=0.02)


def test_shape_travels_as_msgpack():
    shape = msgspec.structs.replace(SHAPE, experts=ExpertShape(2, 8, 2, 10))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shape), type=ModelShape) == shape


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
