"""FLOPs and bytes by their definitions."""

import itertools
import json
import random

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sojourn.metrics.compute.cost_model import (
    ExpertShape,
    ModelShape,
    decode_flops,
    request_flops,
    shape_from,
    step_cost,
    step_work,
)  # fmt: skip

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 4, 2, 8, 32, 48
SHAPE = ModelShape(  # three layers of grouped attention, one of them with a window
    vocab_size=100,
    hidden_size=HIDDEN,
    attention_parameters=3 * 2 * HIDDEN * (HEADS + KV_HEADS) * HEAD_DIM,
    mlp_parameters=3 * 3 * HIDDEN * INTERMEDIATE,
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


def moved(shape: ModelShape, new: list[int], past: list[int]) -> int:
    return step_cost(shape, step_work(shape, new, past, len(new))).moved_bytes


@pytest.mark.parametrize(("new", "past"), [(1, 0), (5, 1), (6, 0), (7, 0), (4, 4), (1, 50), (16, 33)])
def test_flops_equal_their_definition(new, past):
    assert request_flops(SHAPE, new, past, 1) == by_definition(new, past, 1)


def test_a_prompt_in_chunks_costs_the_same_flops_as_at_once():
    chunks = itertools.pairwise([0, 5, 6, 20, 40])
    assert sum(request_flops(SHAPE, end - begin, begin) for begin, end in chunks) == request_flops(SHAPE, 40, 0)


@pytest.mark.parametrize("pasts", [[0], [3, 3], [1, 7, 8, 9, 200]])
def test_flops_of_decodes_are_those_of_each(pasts):
    assert decode_flops(SHAPE, pasts) == sum(by_definition(1, past, 1) for past in pasts)


def test_the_parts_of_a_step_are_those_of_its_requests():
    sequences = [(1, 9), (1, 0), (7, 3), (4, 50)]
    cost = step_cost(SHAPE, step_work(SHAPE, *zip(*sequences, strict=True), 3))
    tokens = sum(new for new, _ in sequences)
    assert cost.mlp == 2 * 3 * 3 * HIDDEN * INTERMEDIATE * tokens
    assert cost.head == 2 * HIDDEN * SHAPE.vocab_size * 3
    drawn = [1, 1, 0, 1]
    expected = sum(by_definition(new, past, rows) for (new, past), rows in zip(sequences, drawn, strict=True))
    assert cost.flops == cost.attention + cost.mlp + cost.head == expected


@example([(1, 0), (5, 3)])
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=6))
def test_pairs_and_reads_of_a_step_are_those_that_a_list_of_all_gives(sequences):
    pairs = {True: 0, False: 0}
    reads = 0
    for window, layers in SHAPE.windows:
        for new, past in sequences:
            far = window or past + new  # so many positions back a query sees, itself included
            seen = [set(range(max(0, at + 1 - far), at + 1)) for at in range(past, past + new)]
            pairs[new == 1] += layers * sum(map(len, seen))
            reads += layers * len(set().union(*seen))
    work = step_work(SHAPE, *zip(*sequences, strict=True), 0)
    assert (work.decode_pairs, work.chunk_pairs, work.kv_reads) == (pairs[True], pairs[False], reads)
    assert work.decodes + work.chunks == len(sequences)


def test_bytes_hold_the_weights_once_and_each_visible_context_once():
    layer = SHAPE.kv_bytes_per_token // 3
    full, sliding, written = 1 + 10 + 4, min(11, 6) + 4, 3 * 5  # a decode after 10 tokens, and a prompt of 4
    assert moved(SHAPE, [1, 4], [10, 0]) == 1000 + layer * (2 * full + sliding + written)


def test_bytes_of_experts_are_those_that_even_tokens_would_reach():
    experts = ExpertShape(num_layers=2, num_experts=8, num_chosen=2, expert_bytes=10)
    shape = msgspec.structs.replace(SHAPE, experts=experts)

    def expert_bytes(tokens: int) -> int:
        return moved(shape, [tokens], [0]) - moved(SHAPE, [tokens], [0])

    assert expert_bytes(1) == 2 * 2 * 10  # one token reads what it chose
    assert expert_bytes(10_000) == 2 * 8 * 10  # many read all
    dice = random.Random(0)
    drawn = [len(set().union(*(dice.sample(range(8), 2) for _ in range(3)))) for _ in range(4000)]
    assert expert_bytes(3) == pytest.approx(2 * 10 * np.mean(drawn), rel=0.02)


def test_shape_travels_as_msgpack_and_is_read_back_from_a_run():
    shape = msgspec.structs.replace(SHAPE, experts=ExpertShape(2, 8, 2, 10))
    told = json.loads(json.dumps({"model_shape": msgspec.to_builtins(shape)}))
    assert shape_from(told) == shape and shape_from({}) is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shape), type=ModelShape) == shape
