"""How a replay must answer when something gets better, or stays as it is."""

from dataclasses import replace

import numpy as np
import pytest

from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change
from sojourn.replay.material import material_of
from sojourn.replay.predictor import predictor_of
from sojourn.replay.settings import changed_config, recorded_config
from sojourn.replay.simulate import Replayer
from tests.replay.simulated_run import random_asks, write_run


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """Replays a change of a run that is busy, and whose blocks run short."""
    asks = random_asks(5, 120, mean_gap_ns=4_000_000)
    run = write_run(tmp_path_factory.mktemp("runs") / "busy", asks, num_blocks=40)
    meta = run.meta()
    config = recorded_config(meta)
    replayer = Replayer(material_of(run, meta, run.requests(), run.table("steps"), config))
    return lambda change: replayer.replay(change, changed_config(config, change, meta))


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    return predictor_of(write_run(tmp_path_factory.mktemp("runs") / "small", random_asks(6, 12)))


@pytest.mark.parametrize(
    "change", [Change(arrival_rate=1.0), Change(replicas=1, routing="prefix-aware"),
               Change(kv_scale=1.0, device_speed=1.0), Change(settings={"num_kv_blocks": 40}),
               Change(removed={"compute.host": 0.0})],
)  # fmt: skip
def test_a_change_of_nothing_changes_nothing(replay, change):
    same, unchanged = replay(change), replay(Change())
    assert (same.answers.ttft_ms == unchanged.answers.ttft_ms).all()
    assert (same.answers.e2e_ms == unchanged.answers.e2e_ms).all()
    assert same.preemptions == unchanged.preemptions > 5


@pytest.mark.parametrize(
    "change", [Change(device_speed=2.0), Change(arrival_rate=0.5), Change(replicas=2),
               Change(replicas=2, routing="least-requests"), Change(replicas=2, routing="prefix-aware"),
               Change(replicas=2, routing="consistent-hash"), Change(kv_scale=4.0),
               Change(removed={"compute.decode": 0.5}), Change(removed={"compute.prefill": 0.5})],
)  # fmt: skip
def test_more_capacity_makes_no_quantile_of_the_first_token_later(replay, change):
    better, unchanged = replay(change).answers.ttft_ms, replay(Change()).answers.ttft_ms
    assert better.mean() < unchanged.mean()
    for quantile in (0.5, 0.9, 0.99):
        assert np.quantile(better, quantile) <= np.quantile(unchanged, quantile) * 1.001


def test_more_blocks_make_no_more_preemptions(replay):
    counts = [replay(Change(kv_scale=scale)).preemptions for scale in (0.6, 1.0, 2.0, 8.0)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0


def test_a_full_queue_refuses(replay):
    found = replay(Change(settings={"max_waiting": 1}, arrival_rate=4.0))
    assert 0 < found.refused == int((~found.answers.served).sum())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change(settings={"threads": 4}), "give device_speed"),
        (Change(settings={"max_num_sqs": 4}), "is not a setting of the engine"),
        (Change(settings={"port": 1}), "changes nothing that a replay computes"),
        (Change(removed={"request.queue": 1.0}), "follows from the scheduler's decisions"),
        (Change(removed={"compute.host": 1.5}), "give a number from 0 to 1"),
        (Change(device_speed=0.0), "give a number above 0"),
        (Change(replicas=0), "whole number from 1"),
        (Change(settings={"max_num_seqs": 0}), "max_num_seqs=0 is not valid"),
    ],
)
def test_what_cannot_be_replayed_is_refused_and_spares_the_others(predictor, change, words):
    with pytest.raises(ReplayError, match=words):
        predictor.check(change)
    refused, other = predictor.predict([change, Change(settings={"max_num_seqs": 2})])
    assert not refused.is_trusted and words in refused.doubts[0]
    assert other.change.settings == {"max_num_seqs": 2}


def test_steps_beyond_those_of_the_run_widen_the_bounds_of_a_change_that_is_replayed_once(tmp_path):
    asks = random_asks(8, 60, mean_gap_ns=5_000_000)
    predictor = predictor_of(write_run(tmp_path / "alone", asks, max_num_seqs=1))
    unchanged, batched = predictor.predict([Change(), Change(settings={"max_num_seqs": 8})], quick=True)

    def width(prediction):
        bounds = prediction.tpot_ms["p50"]
        return bounds.high / bounds.low

    assert width(batched) > 1.1 * width(unchanged)
    assert any("far from those of the run in size" in doubt for doubt in batched.doubts)


def test_an_objective_of_a_change_holds_for_classes_with_a_bound_of_their_own(tmp_path):
    asks = [replace(ask, klass="chat") for ask in random_asks(9, 12)]
    own = [{"klass": "chat", "ttft_ms": 1e6}]
    predictor = predictor_of(write_run(tmp_path / "run", asks, objectives=own))
    (strict,) = predictor.predict([Change(settings={"objective_ttft_ms": 1e-6})])
    assert strict.attainment.median == 0.0


@pytest.mark.parametrize("bound", ["fast", 0, True, float("nan")])
def test_an_objective_that_is_no_bound_is_refused(predictor, bound):
    with pytest.raises(ReplayError, match="milliseconds above 0"):
        predictor.check(Change(settings={"objective_ttft_ms": bound}))
