"""How much slower another run may be follows from how the speed wandered in this one; and what others did to it."""

import math
import shutil
from dataclasses import replace
from random import Random

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sojourn.metrics.prediction import Change, attainment_text
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.disturbance import Disturbance, disturbance_of, wandering_of
from sojourn.replay.noise import Noise
from sojourn.replay.predictor import SPEEDS, predictor_of
from sojourn.replay.step_fit import StepRatios
from tests.diagnosis.test_speed_facts import S, system
from tests.replay.simulated_run import random_asks, write_run

STEPS, STEP_NS = 240, 5e6
TRIALS = 120


def spells(rng: Random, slow: float, mean_steps: float) -> np.ndarray:
    """[STEPS] 1, or `slow` in spells of `mean_steps`: half of the time in the mean."""
    found: list[float] = []
    is_slow = rng.random() < 0.5
    while len(found) < STEPS:
        found += [slow if is_slow else 1.0] * math.ceil(rng.expovariate(1 / mean_steps))
        is_slow = not is_slow
    return np.array(found[:STEPS])


def outcomes(ratio: np.ndarray) -> list[float]:
    """The mean ratio of each replay of a run that had these."""
    begins, ones = STEP_NS * np.arange(STEPS), np.ones(STEPS)
    ratios = StepRatios(STEP_NS * ones, ratio, ones, ones)
    noise, wandering, found = Noise(begins, ratios), wandering_of(ratios, begins), []
    for place, z in enumerate(SPEEDS):
        noise.restart(seed=place or None)
        drawn = [noise.at(begin_ns, STEP_NS)[0] for begin_ns in begins[::4]]
        found.append(float(np.mean(drawn)) * math.exp(z * wandering))
    return found


@pytest.mark.parametrize("mean_steps", [1, 8, 30])  # of a spell, of 240 steps
def test_the_interval_holds_eight_of_ten_runs_whose_speed_wanders_alike(mean_steps):
    rng, held = Random(mean_steps), 0
    for _ in range(TRIALS):
        found = outcomes(spells(rng, 1.9, mean_steps))
        held += min(found) <= spells(rng, 1.9, mean_steps).mean() <= max(found)
    assert 0.70 <= held / TRIALS <= 0.93, held / TRIALS


def test_the_interval_of_a_steady_run_is_not_wider_for_it():
    found = outcomes(1 + 0.02 * np.random.default_rng(1).standard_normal(STEPS))
    assert max(found) / min(found) < 1.01


def test_what_others_took_of_the_cpu_is_a_slowdown_with_names():
    """The core's one thread was ready all the time, and others had the CPU in half of it."""
    meta = {"hardware": {"cores": 2}, "core": {"threads": 1}}
    steps = pd.DataFrame({"step": [0], "begin_ns": [S], "end_ns": [4 * S]})
    samples = system(
        host_cpu_percent=100.0, front_cpu_seconds=[0.0] * 4, core_cpu_seconds=[0.0, 0.5, 1.0, 1.5],
        core_queued_ns=[0, S // 2, S, 3 * S // 2], host_steal_percent=10.0, neighbours=[["hog (9)"]] * 4,
        neighbour_cores=[[1.5]] * 4,
    )  # fmt: skip
    found = disturbance_of(meta, samples, steps)
    assert (found.waiting, found.stolen) == pytest.approx((0.5, 0.1))
    assert found.slowdown == pytest.approx(math.log(2 / 0.9)) and list(found.neighbours) == ["hog (9)"]
    assert "hog (9)" in found.words()[0] and "hypervisor gave 10%" in found.words()[1]
    alone = samples.assign(core_queued_ns=pd.Series([0] * 4, dtype=object), host_steal_percent=0.0)
    assert disturbance_of(meta, alone, steps).slowdown == 0 and disturbance_of(meta, alone, steps).words() == []
    assert disturbance_of(meta, samples.iloc[:0], steps) == Disturbance()


@pytest.fixture(scope="module")
def near_its_limit(tmp_path_factory):
    """A run whose queue just keeps up: a little slower and it does not."""
    asks = random_asks(5, 160, mean_gap_ns=4_400_000)
    return write_run(tmp_path_factory.mktemp("runs") / "a", asks, objectives=[{"klass": "all", "ttft_ms": 40.0}])


def test_a_run_beside_a_neighbour_that_came_and_went_says_that_it_cannot_predict(near_its_limit, tmp_path):
    """The same run twice: with steps that took alike, and with those of a neighbour that came and went."""
    changes = [Change(), Change(settings={"max_num_seqs": 6})]
    calm = predictor_of(near_its_limit).predict(changes)[1]
    path = tmp_path / "b"
    shutil.copytree(near_its_limit.path, path)
    steps = pq.read_table(path / "steps.parquet")
    count = len(steps)
    slow = [3 * ns if place < 0.35 * count else ns for place, ns in enumerate(steps["device_ns"].to_pylist())]
    steps = steps.set_column(steps.column_names.index("device_ns"), "device_ns", pa.array(slow, pa.int64()))
    pq.write_table(steps, path / "steps.parquet")
    disturbed = predictor_of(RunDirectory(path)).predict(changes)[1]
    assert disturbed.is_open and not disturbed.is_trusted and not calm.is_open
    assert "cannot be predicted" in disturbed.doubts[0] and "wandered" in disturbed.doubts[0]
    assert attainment_text(disturbed).startswith("cannot be predicted (")


def test_no_latency_is_below_zero_however_much_repeats_differ(near_its_limit):
    predictor = predictor_of(near_its_limit)
    predictor.spread = replace(predictor.spread, metrics={"e2e_ms:p50": 1.5, "attainment": 1.5})
    (found,) = predictor.predict([Change()])
    latency, share = found.e2e_ms["p50"], found.attainment
    assert 0 < latency.low < latency.median < latency.high and latency.high > 5 * latency.median
    assert (share.low, share.high) == (0, 1) and found.is_open


def test_steps_that_the_model_expects_to_take_nothing_leave_a_replay_a_time():
    """A few steps of a very disturbed run may have no coefficient of their own."""
    expected = np.where(np.arange(STEPS) < 60, 0.0, STEP_NS)
    noise = Noise(STEP_NS * np.arange(STEPS), StepRatios(expected, np.ones(STEPS), np.zeros(STEPS), np.ones(STEPS)))
    drawn = np.array([noise.at(STEP_NS * place, STEP_NS) for place in range(STEPS)])
    assert np.isfinite(drawn).all()
