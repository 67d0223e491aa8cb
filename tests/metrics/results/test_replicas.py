"""The servers of a fleet beside each other: parts that sum to the whole, and states over time that keep their area."""

import numpy as np
import pandas as pd
import pytest

from sojourn.metrics.request.goodput import measured
from sojourn.metrics.results.replicas import STATES, fleet_view, timeline
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.synthetic import synthetic_run
from tests.metrics.synthetic_fleet import synthetic_fleet


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    return synthetic_fleet(tmp_path_factory.mktemp("fleet") / "two", ["healthy", "tiny_kv"], requests=[60, 20])


def test_servers_sum_to_the_fleet(run):
    requests = measured(run.requests(), run.meta())
    view = fleet_view(run, requests)
    assert [replica.name for replica in view.replicas] == ["server-0", "server-1"]
    for name in ("requests", "not_served", "prompt_tokens", "output_tokens"):
        assert sum(getattr(replica, name) for replica in view.replicas) == getattr(view.whole, name)
    assert sum(replica.goodput_rps for replica in view.replicas) == pytest.approx(view.whole.goodput_rps)
    assert sum(map(view.share_of_mean, view.replicas)) == pytest.approx(2)
    assert view.imbalance == max(map(view.share_of_mean, view.replicas)) > 1
    assert view.whole.requests == len(requests)


def test_a_server_has_the_latencies_of_its_requests(run):
    requests = run.requests()
    view = fleet_view(run, requests)
    mine = np.sort(requests.ttft_ms[requests.server == "server-0"].dropna())
    assert view.replicas[0].quantiles_ms["ttft_ms"]["p50"] == mine[int(np.ceil(0.5 * len(mine))) - 1]


def test_a_run_of_one_server_is_no_fleet(tmp_path):
    alone = synthetic_run(tmp_path / "one", requests=10)
    assert fleet_view(alone, alone.requests()) is None


def steps_of(spans: list[tuple[int, int]], running: list[int]) -> pd.DataFrame:
    count = len(spans)
    return pd.DataFrame({
        "begin_ns": [begin for begin, _ in spans], "end_ns": [end for _, end in spans],
        "request_ids": [["r"] * each for each in running], "waiting": [3] * count, "new_tokens": [[2, 3]] * count,
        "device_ns": [(end - begin) / 2 for begin, end in spans], "blocks_free": [60] * count,
        "blocks_active": [40] * count, "blocks_reusable": [0] * count,
    })  # fmt: skip


def test_a_timeline_keeps_the_area_of_every_state_and_is_zero_between_steps():
    second = 1_000_000_000
    spans = [(0, second), (second, 3 * second), (8 * second, 9 * second)]
    found = timeline(steps_of(spans, [4, 2, 1]), 0, 10 * second)
    width = 10 / len(found)
    assert found.running.sum() * width == pytest.approx(4 * 1 + 2 * 2 + 1)
    assert found.waiting.sum() * width == pytest.approx(3 * 4)
    assert found.kv_use.sum() * width == pytest.approx(0.4 * 4)
    assert found.busy.sum() * width == pytest.approx(0.5 * 4)
    idle = found[found.at_s.between(3.1, 7.9)]
    assert len(idle) and (idle[list(STATES)] == 0).all().all()
    assert found.batch_tokens.max() == 5


def test_steps_under_way_together_count_once():
    found = timeline(steps_of([(0, 10), (5, 15), (8, 20)], [1, 1, 1]), 0, 20)
    assert found.running.max() <= 1 + 1e-9 and found.busy.max() <= 1
