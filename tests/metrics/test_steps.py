"""Steps by columns are the same steps as their records, whatever is made of them."""

import itertools
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.interop.exported.prometheus import Exporter
from sojourn.metrics.compute.cost_model import ExpertShape, ModelShape, step_cost, step_work
from sojourn.metrics.compute.step_costs import StepCosts, batch_work
from sojourn.metrics.compute.step_time import StepTimeModel, features
from sojourn.metrics.records import COMPOSITIONS, KINDS, StepRecord, composition
from sojourn.metrics.records.tables import columns
from sojourn.metrics.steps import UNKNOWN, Steps, rows_of
from tests.metrics.random_records import random_step

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


def decodes(count: int) -> list[StepRecord]:
    """Steps that decode the same requests."""
    first = msgspec.structs.replace(
        random_step(Random(3)), request_ids=["a", "b"], kinds=["decode"] * 2, new_tokens=[1, 1], past_tokens=[5, 700]
    )
    return [msgspec.structs.replace(first, past_tokens=[5 + row, 700 + row], step=row) for row in range(count)]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 9))
def test_columns_are_those_of_the_table_of_the_records(seed, count):
    records = some_steps(seed, count)
    steps, table = Steps(records), columns("steps", records)
    for name in ("begin_ns", "device_ns", "waiting", "predicted_ns", "sampling_ns"):
        assert steps[name].tolist() == [UNKNOWN if value is None else value for value in table[name].to_pylist()]
    for name in ("new_tokens", "past_tokens"):
        assert getattr(steps, name).tolist() == table[name].combine_chunks().flatten().to_pylist()
    assert [KINDS[code] for code in steps.kinds] == table["kinds"].combine_chunks().flatten().to_pylist()
    assert steps.stages.T.tolist() == [record.stages for record in records]


def test_rows_of_a_table_are_read_as_its_records_are():
    records = some_steps(5, 30)
    table = columns("steps", records).to_pandas()
    found, own = (batch_work(SHAPES[0], Steps(each)) for each in (rows_of(table.iloc[::-1]), records))
    assert all(np.all(one == other) for one, other in zip(found, own, strict=True))
    older = Steps(rows_of(table.assign(logit_rows=np.nan, padding_tokens=np.nan, sampling_ns=np.nan)))
    assert older["logit_rows"].tolist() == older.sequences.tolist() and not older["padding_tokens"].any()
    assert set(older["sampling_ns"].tolist()) == {UNKNOWN}


def test_costs_are_set_in_the_records():
    records = some_steps(5, 3)
    Steps(records).fill_costs(predicted_ns=np.array([7, 8, UNKNOWN]))
    assert [record.predicted_ns for record in records] == [7, 8, None]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 9), shape=st.sampled_from(SHAPES))
def test_costs_of_a_batch_are_those_of_each_step(seed, count, shape):
    records = some_steps(seed, count)
    records += decodes(20)
    steps = StepCosts(shape).complete(Steps(records))
    work = batch_work(shape, steps)
    for row, record in enumerate(records):
        own = step_work(shape, record.new_tokens, record.past_tokens, record.logit_rows)
        assert tuple(int(np.broadcast_to(field, len(records))[row]) for field in work) == tuple(own)
        cost = step_cost(shape, own)
        assert (steps["flops"][row], steps["bytes"][row]) == (cost.flops, cost.moved_bytes)
    parts = steps["flops_attention"] + steps["flops_mlp"] + steps["flops_head"]
    assert (parts == steps["flops"]).all()


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 399), max_size=6, unique=True))
def test_it_changes_nothing_how_steps_are_told_in_batches(seed, cuts):
    rng = Random(seed)
    records = decodes(300) + some_steps(seed, 100)
    records = [msgspec.structs.replace(record, device_ns=rng.randint(10**6, 2 * 10**6)) for record in records]
    pages, predicted = [], []
    for bounds in ([0, 400], [0, *sorted(cuts), 400]):
        costs, exporter = StepCosts(SHAPES[1]), Exporter("m", clock_ns=lambda: 0)
        exporter.observe_ceilings({"float32": 1e11}, 1e10, "float32")
        batches = [Steps(records[begin:end]) for begin, end in itertools.pairwise(bounds)]
        for batch in batches:
            exporter.observe_steps(costs.complete(batch))
        pages.append(exporter.render())
        predicted.append(np.concatenate([batch["predicted_ns"] for batch in batches]).tolist())
    assert predicted[0] == predicted[1] and any(ns > 0 for ns in predicted[0])
    numbers = [[line.rsplit(" ", 1) for line in sorted(page.decode().splitlines())] for page in pages]
    for (name, one), (other_name, other) in zip(*numbers, strict=True):
        assert name == other_name and (one == other or float(one) == pytest.approx(float(other), rel=1e-9))


def test_compositions_are_those_of_the_records():
    records = some_steps(7, 60)
    told = [COMPOSITIONS[code] for code in Steps(records).compositions]
    assert told == [composition(record.kinds) for record in records]


def test_features_of_a_batch_are_those_of_each_step():
    records = some_steps(5, 30)
    steps = Steps(records)
    eager = np.array([record.graph == "eager" for record in records])
    found = features(batch_work(SHAPES[0], steps), steps["padding_tokens"], eager=eager)
    for row, record in enumerate(records):
        own = step_work(SHAPES[0], record.new_tokens, record.past_tokens, record.logit_rows)
        assert (found[row] == features(own, record.padding_tokens, eager=record.graph == "eager")).all()
    assert found.shape[1] == len(StepTimeModel()._coefficients)
