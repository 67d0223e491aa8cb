"""The search for settings finds the known best of a simulated server, and walls are what a hand computes."""

import msgspec
import numpy as np
import pandas as pd
import pytest

from sojourn.commands.plan import keep, tell_progress
from sojourn.commands.plan_report import Report
from sojourn.loadgen.search.curve import PLAN_FILE, read_plan
from sojourn.metrics.compute.cost_model import ModelShape, step_work
from sojourn.metrics.compute.roofline import Ceilings, Gemm
from sojourn.metrics.compute.step_time import StepTimeModel, features
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change, Interval, Prediction
from sojourn.metrics.request.goodput import measured
from sojourn.replay.verdict.plan import Load, Search, around, usd_per_million_tokens
from sojourn.replay.verdict.run_walls import RunWalls, recorded_load
from sojourn.replay.verdict.walls import (
    MeanRequest,
    Wall,
    bandwidth_wall,
    binding,
    compute_wall,
    measured_walls,
    memory_wall,
    objective_wall,
)  # fmt: skip
from tests.metrics.synthetic import synthetic_run

RECORDED_RPS, SENT, OUTPUT_TOKENS = 10.0, 100, 20
LOAD = Load(
    begins_s=[number / RECORDED_RPS for number in range(SENT)], lasts_s=[0.5] * SENT, output_tokens=SENT * OUTPUT_TOKENS
)
SHAPE = ModelShape(
    vocab_size=1000, hidden_size=64, attention_parameters=400_000, mlp_parameters=600_000, pair_flops=256,
    windows=((None, 4),), kv_bytes_per_token=4 * 2 * 128, weight_bytes=4_000_000,
)  # fmt: skip
MEAN = MeanRequest(prompt_tokens=100, computed_tokens=60, output_tokens=20)


class Server:
    """Serves at most so many requests a second: most with a batch of 24 and a budget of 256."""

    def __init__(self) -> None:
        self.asked = 0

    def capacity(self, change: Change) -> float:
        batch, budget = change.settings.get("max_num_seqs", 4), change.settings.get("max_num_batched_tokens", 512)
        best = 40.0 / (1 + abs(batch - 24) / 24) / (1 + abs(budget - 256) / 512)
        return best * change.device_speed * change.replicas

    def check(self, change: Change) -> None:
        if change.settings.get("max_num_seqs") == 128 and change.settings.get("max_num_batched_tokens") == 64:
            raise ReplayError("a batch above its budget")

    def predict(self, changes, *, quick=False):
        self.asked += len(changes)
        return [self._predicted(change) for change in changes]

    def _predicted(self, change: Change) -> Prediction:
        rate, capacity = RECORDED_RPS * change.arrival_rate, self.capacity(change)
        kept = min(1.0, (capacity / rate) ** 2)
        tokens_per_s = OUTPUT_TOKENS * min(rate, capacity)
        nothing = {"p50": Interval(1, 1, 1), "p90": Interval(1, 1, 1)}
        return Prediction(
            change=change, attainment=Interval(kept, kept, kept), goodput_rps=Interval(0, kept * rate, 0),
            ttft_ms=nothing, tpot_ms=nothing, e2e_ms=nothing, attainment_by_class={},
            output_tokens_per_s=tokens_per_s, preemptions=0, is_trusted=True, doubts=[],
        )  # fmt: skip


def test_the_search_finds_the_known_best_settings_with_few_replays():
    server = Server()
    search = Search(server, [{"klass": "all", "ttft_ms": 500}], 0.9, LOAD)
    candidates = {"max_num_seqs": [8, 16, 32, 64, 128], "max_num_batched_tokens": [64, 128, 256, 1024]}
    found = search.run(candidates, {"a device twice as fast": Change(device_speed=2.0)})
    assert found.settings["max_num_batched_tokens"] == 256 and found.settings["max_num_seqs"] in (23, 22, 24, 25)
    limit = RECORDED_RPS * found.best_limit.rate
    assert limit == pytest.approx(server.capacity(Change(settings=found.settings)) / 0.9**0.5, rel=0.06)
    assert found.recorded_limit.rate < found.best_limit.rate
    assert found.purchases["a device twice as fast"].rate == pytest.approx(2 * found.best_limit.rate, rel=0.08)
    assert found.replays == server.asked < 90
    assert len(found.best) == len(found.recorded) and all(point.prediction.change.objectives for point in found.best)


class Stopped(Server):
    """Each replay takes two seconds of its own clock; the user presses Ctrl-C before the one with this number."""

    def __init__(self, stop_at: int) -> None:
        super().__init__()
        self.now, self.stop_at = 0.0, stop_at

    def predict(self, changes, *, quick=False):
        if self.asked + len(changes) > self.stop_at:
            raise KeyboardInterrupt
        self.now += 2.0 * len(changes)
        return super().predict(changes, quick=quick)


def test_a_search_says_how_far_it_is_and_ctrl_c_ends_it_with_the_best_so_far():
    candidates, told = {"max_num_seqs": [8, 16, 32], "max_num_batched_tokens": [128, 256]}, []
    server = Stopped(30)
    search = Search(server, [{"klass": "all", "ttft_ms": 500}], 0.9, LOAD, told.append, lambda: server.now)
    found = search.run(candidates, {"twice": Change(device_speed=2.0)})
    assert found.is_partial and found.settings and found.best_limit.settings == found.settings
    assert found.best_limit.rate > found.recorded_limit.rate and search.is_kept(found.best_limit)
    assert told[0].left_s is None and told[1].left_s > 0 and told[-1].best == found.best_limit
    assert [each.replays for each in told] == sorted(each.replays for each in told)
    whole = Search(Server(), [{"klass": "all", "ttft_ms": 500}], 0.9, LOAD).run(candidates, {"twice": Change()})
    assert 0.5 < told[0].of_about / whole.replays < 2 and found.best_limit.rate <= whole.best_limit.rate
    words = tell_progress(told[-1], RECORDED_RPS)
    assert "best so far" in words and "max_num_seqs=" in words and f"of about {told[-1].of_about}" in words
    with pytest.raises(KeyboardInterrupt):  # before there is anything to say
        Search(Stopped(0), None, 0.9, LOAD).run(candidates, {})


def test_a_plan_stays_in_its_run_and_the_curve_of_a_sweep_reads_it(tmp_path):
    run, objectives = synthetic_run(tmp_path / "run", requests=20), [{"klass": "all", "tpot_ms": 30.0}]
    run.update_meta(model_shape=msgspec.to_builtins(SHAPE), engine={"max_num_seqs": 4}, objectives=objectives)
    found = Search(Server(), objectives, 0.9, LOAD).run({"max_num_seqs": [8, 16, 32]}, {})
    for other, share in ((objectives, 0.5), ([{"klass": "all", "tpot_ms": 200.0}], 0.9)):
        keep(run, Report(run, found, RunWalls(run), lambda change: 1000, other, share, None))
        assert not (run.path / PLAN_FILE).exists(), "the curve recommends by the run's own objectives"
    report = Report(run, found, RunWalls(run), lambda change: 1000, objectives, 0.9, None)
    keep(run, report)
    read = read_plan(run.path / PLAN_FILE)
    assert (read.run, read.settings, read.slo_tpot_ms) == ("run", found.settings, 30)
    assert read.rate_rps == report.recorded_rps * found.best_limit.rate
    assert read.tokens_per_s == found.best_limit.prediction.output_tokens_per_s and read.tpot_ms.median == 1


def test_a_rate_counts_only_if_the_server_keeps_up():
    class Patient(Server):
        def _predicted(self, change):
            said = super()._predicted(change)
            return msgspec.structs.replace(said, attainment=Interval(1, 1, 1))  # over before a backlog hurts

    limit = Search(Patient(), None, 0.9, LOAD).limit({})
    assert RECORDED_RPS * limit.rate == pytest.approx(Server().capacity(Change()), rel=0.2)


def test_pauses_of_conversations_are_no_backlog():
    talks = Load(begins_s=[0.0, 1.0, 2.0], lasts_s=[30.0, 10.0, 1.0], output_tokens=600.0)
    assert talks.ends_s(1.0) == 30.0 and talks.ends_s(100.0) == 30.0

    class Quick(Server):
        def _predicted(self, change):
            return msgspec.structs.replace(super()._predicted(change), output_tokens_per_s=600.0 / 31)

    search = Search(Quick(), None, 0.1, talks)
    assert search.is_kept(*search.points([{}], [4.0]))


def test_a_recorded_load_has_conversations_and_no_waits(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=40)
    table = pd.read_parquet(run.path / "client.parquet").sort_values("due_ns", ignore_index=True)
    table["session_id"] = ["talk"] * 3 + [""] * (len(table) - 3)
    table.to_parquet(run.path / "client.parquet")
    load, requests = recorded_load(run), run.requests()
    assert len(load.begins_s) == len(measured(requests, run.meta())) - 2
    assert min(load.begins_s) == 0.0 <= min(load.lasts_s)
    assert np.median(load.lasts_s) < 0.6 * requests.e2e_ms.median() / 1e3  # much of it was the queue


def test_a_closed_loop_is_planned_at_its_concurrency():
    found = Search(Server(), None, 0.9, None).run({"max_num_seqs": [24]}, {"twice": Change(device_speed=2.0)})
    assert found.is_closed and [point.rate for point in found.best] == [1.0] and not found.purchases


def test_refinement_is_of_numbers_only():
    assert around(32, [16, 32, 64]) == [23, 45]
    assert around("fcfs", ["fcfs"]) == around(True, [True]) == around(None, [1]) == []


def test_a_million_tokens_cost_what_the_machine_costs_meanwhile():
    assert usd_per_million_tokens(3.6, 1000) == pytest.approx(1.0)
    assert usd_per_million_tokens(3.6, 0) is None


def test_walls_are_what_a_hand_computes():
    memory = memory_wall(SHAPE, MEAN, pool_tokens=12_000, e2e_s=2.0)
    assert (memory.concurrent, memory.requests_per_s) == (100, 50)  # 12,000 tokens / 120, each for 2 s
    assert "100 × 120 × 4 × 128 × 2 = 0.01 GiB" in memory.formula
    flops = 80 * 2 * 1_000_000 + 256 * 4 * (80 * 40 + 80 * 81 / 2) + 20 * 2 * 64 * 1000
    assert compute_wall(SHAPE, MEAN, 1e9).requests_per_s == pytest.approx(1e9 / flops)
    moved = 4_000_000 + 1024 * (10 * 110 + 10)  # the weights, ten contexts of 110, ten new tokens
    wall = bandwidth_wall(SHAPE, MEAN, 10, 1e9)
    assert wall.requests_per_s == pytest.approx(10 / (moved / 1e9) / 20)


def test_the_objective_wall_is_the_largest_batch_within_the_objective():
    model, dice = StepTimeModel(), [(n, c) for n in (1, 4, 8, 16, 32, 48) for c in (0, 40, 100)]
    works = [step_work(SHAPE, [1] * n + [c] * (c > 0), [110] * n + [0] * (c > 0), n) for n, c in dice] * 15
    found = np.array([features(work) for work in works])
    model.observe_all(found, np.array([1e6 * (2 + 0.1 * work.tokens) for work in works]))
    wall = objective_wall(SHAPE, MEAN, model, tpot_ms=10.0, most=64)
    assert wall.concurrent == pytest.approx(20, abs=2)  # 2 ms + 0.1 ms × 20 × (1 + 60 / 20 prompt tokens)
    assert wall.requests_per_s == pytest.approx(20 / 0.010 / 20, rel=0.15)
    assert objective_wall(SHAPE, MEAN, model, tpot_ms=0.5, most=64).requests_per_s == 0.0


def test_the_nearest_wall_binds_and_unmeasured_ones_say_so():
    walls = [Wall(name="memory", requests_per_s=5, concurrent=None, formula=""),
             Wall(name="compute", requests_per_s=None, concurrent=None, formula=""),
             Wall(name="objective", requests_per_s=3, concurrent=None, formula="")]  # fmt: skip
    assert binding(walls).name == "objective" and binding([]) is None
    ceilings = Ceilings(device="d", threads=1, measured_at="", versions={}, read_bytes_per_s=1e9,
                        copy_bytes_per_s=1e9, inner=1, gemm=[Gemm("float32", 1, 1e9)])  # fmt: skip
    assert [wall.name for wall in measured_walls(SHAPE, MEAN, 4, ceilings, "float32")] == ["compute", "bandwidth"]
    assert "calibrate device" in measured_walls(SHAPE, MEAN, 4, ceilings, "int8")[0].formula
