"""Decode steps of a GPU that waits for the launches of its kernels."""

import pandas as pd
import pytest

from sojourn.diagnosis.launch_facts import launches_of

GPU = {"core": {"device": "cuda:0"}}


def decode_steps(*, graph: str = "eager", launch_ns: float = 4e6, per_sequence_ns: float = 0.0) -> pd.DataFrame:
    sizes = [1 + place % 8 for place in range(64)]
    return pd.DataFrame({
        "kinds": [["decode"] * size for size in sizes], "graph": graph, "stage_launch_ns": launch_ns,
        "device_ns": [4e6 + per_sequence_ns * size for size in sizes],
        "request_ids": [[f"r{number}" for number in range(size)] for size in sizes],
    })  # fmt: skip


def test_steps_that_take_as_long_as_their_launches_wait_for_the_host():
    found = launches_of(GPU, decode_steps())
    assert found.launch_share == pytest.approx(1.0) and found.eager_share == 1.0
    assert found.fixed_share == pytest.approx(1.0) and found.step_ms == pytest.approx(4.0)


def test_a_device_that_is_the_slower_one_does_not_wait():
    found = launches_of(GPU, decode_steps(launch_ns=1e6, per_sequence_ns=2e6))
    assert found.launch_share < 0.2 and found.fixed_share < 0.5


def test_graphs_and_processors_without_launches_have_none():
    assert launches_of(GPU, decode_steps(graph="8")) is None
    assert launches_of({"core": {"device": "cpu"}}, decode_steps()) is None
