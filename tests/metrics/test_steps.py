"""Steps by columns are the same steps as their records, whatever is made of them."""

import itertools
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics.compute.cost_model import ExpertShape, ModelShape, step_cost, step_work
from metrics.compute.step_costs import Appraiser, batch_work
from metrics.compute.step_time import StepTimeModel, features
from metrics.export.prometheus import Exporter
from metrics.records import COMPOSITIONS, StepRecord, columns, composition
from metrics.steps import Makeup, Steps
from tests.metrics.random_records import random_step
from tests.metrics.step_columns import steps_of_records, uncosted

SHAPES = [
    ModelShape(
        vocab_size=1000, hidden_size=64, attention_parameters=10_000, mlp_parameters=30_000, pair_flops=256,
        windows=windows, kv_bytes_per_token=1024, weight_bytes=100_000, experts=experts,
    )
    for windows, experts in (
        (((None, 3),), None), (((None, 3), (512, 1)), None), (((7, 2), (64, 2)), ExpertShape(3, 8, 2, 7777)),
    )
]  # fmt: skip


def some_steps(seed: int, count: int) -> list[StepRecord]:
    rng = Random(seed)
    return [random_step(rng, index) for index in range(count)]


def decodes(rows: int) -> tuple[Steps, list[StepRecord]]:
    """Steps that decode the same requests, once with one makeup and once as records of their own."""
    first = msgspec.structs.replace(
        random_step(Random(3)), request_ids=["a", "b"], kinds=["decode"] * 2, new_tokens=[1, 1], past_tokens=[5, 700]
    )
    records = [msgspec.structs.replace(first, past_tokens=[5 + row, 700 + row], step=row) for row in range(rows)]
    whole = uncosted(records)
    makeup = Makeup(0, first.request_ids, first.kinds, first.new_tokens, first.past_tokens)
    return Steps(whole.numbers, [makeup], whole.others), records


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 9))
def test_columns_give_back_the_records_and_their_table(seed, count):
    records = some_steps(seed, count)
    steps = steps_of_records(records)
    assert steps.records() == records
    assert steps.table().equals(columns("steps", records))


@pytest.mark.parametrize("rows", [1, 2, 90])
def test_a_makeup_stands_for_steps_that_decode_one_token_more_each(rows):
    shared, records = decodes(rows)
    single = uncosted(records)
    assert shared.records() == single.records() and shared.table().equals(single.table())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 9), shape=st.sampled_from(SHAPES))
def test_costs_of_a_batch_are_those_of_each_step(seed, count, shape):
    records = some_steps(seed, count)
    records += decodes(20)[1]
    steps = Appraiser(shape).complete(uncosted(records))
    work = batch_work(shape, steps)
    for row, record in enumerate(records):
        own = step_work(shape, record.new_tokens, record.past_tokens, record.logit_rows)
        assert tuple(int(field[row]) for field in work) == tuple(own)
        cost = step_cost(shape, own)
        assert (steps["flops"][row], steps["bytes"][row]) == (cost.flops, cost.moved_bytes)
    parts = steps["flops_attention"] + steps["flops_mlp"] + steps["flops_head"]
    assert (parts == steps["flops"]).all()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 399), max_size=6, unique=True))
def test_it_changes_nothing_how_steps_are_told_in_batches(seed, cuts):
    rng = Random(seed)
    records = decodes(300)[1] + some_steps(seed, 100)
    records = [msgspec.structs.replace(record, device_ns=rng.randint(10**6, 2 * 10**6)) for record in records]
    pages, predicted = [], []
    for bounds in ([0, 400], [0, *sorted(cuts), 400]):
        appraiser, exporter = Appraiser(SHAPES[1]), Exporter("m", clock_ns=lambda: 0)
        exporter.observe_ceilings({"float32": 1e11}, 1e10, "float32")
        batches = [uncosted(records[begin:end]) for begin, end in itertools.pairwise(bounds)]
        for batch in batches:
            exporter.observe_steps(appraiser.complete(batch))
        pages.append(exporter.render())
        predicted.append(np.concatenate([batch["predicted_ns"] for batch in batches]).tolist())
    assert predicted[0] == predicted[1] and any(ns > 0 for ns in predicted[0])
    numbers = [[line.rsplit(" ", 1) for line in sorted(page.decode().splitlines())] for page in pages]
    for (name, one), (other_name, other) in zip(*numbers, strict=True):
        assert name == other_name and (one == other or float(one) == pytest.approx(float(other), rel=1e-9))


def test_compositions_are_told_as_records_tell_them():
    records = some_steps(7, 60)
    told = [COMPOSITIONS[code] for code in uncosted(records).compositions]
    assert told == [composition(record.kinds) for record in records]


def test_features_of_a_batch_are_those_of_each_step():
    records = some_steps(5, 30)
    steps = uncosted(records)
    eager = np.array([record.graph == "eager" for record in records])
    found = features(batch_work(SHAPES[0], steps), steps["padding_tokens"], eager=eager)
    for row, record in enumerate(records):
        own = step_work(SHAPES[0], record.new_tokens, record.past_tokens, record.logit_rows)
        assert (found[row] == features(own, record.padding_tokens, eager=record.graph == "eager")).all()
    assert found.shape[1] == len(StepTimeModel()._coefficients)
