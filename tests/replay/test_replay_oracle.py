"""A replay beside the engine over the simulated device, whose times are known: it must say the same."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import StepPlan
from sojourn.metrics.prediction import Change
from sojourn.replay.load import BlockHashes, LoadChange, ReplayedLoad, Sent
from sojourn.replay.predictor import predictor_of
from sojourn.replay.recorded import RecordedLoad, RecordedRequest
from sojourn.replay.replica import Replica, make_replica
from sojourn.replay.routing import RoundRobin
from sojourn.replay.simulated_runner import TurnTimes
from tests.replay.simulated_run import DEFAULTS, TICK, Ask, drive, random_asks, write_run

NOWHERE = dict.fromkeys(("client.lag", "client.network"), 0.0)  # a way that takes no time


class SimulatedTurns:
    """The times of tests.engine.simulated: a reading of the clock ends each stage."""

    idle_receive_ns = 2.0 * TICK

    def times(self, plan: StepPlan, begin_ns: float) -> TurnTimes:
        device_ns = 1_000_000 + 50_000 * sum(item.new_tokens for item in plan.scheduled)
        return TurnTimes(before=3 * TICK, device=device_ns, after=2 * TICK, publish=TICK, receive=TICK)


def recorded(asks: list[Ask]) -> RecordedLoad:
    requests = [
        RecordedRequest(
            id=ask.id, klass="all", tenant="", priority=ask.priority, due_ns=ask.due_ns,
            prompt_tokens=len(ask.prompt), output_tokens=ask.max_tokens * ask.choices,
            choices=ask.choices, way_in=dict(NOWHERE), first_out=dict(NOWHERE),
            last_out=dict(NOWHERE), last_text_ns=0.0, first_read_tokens=1.0, patience_ns=ask.leaves_ns,
            patience_for="answer", is_measured=True, is_prelude=False,
            token_ids=[*ask.prompt, *(-1000 * place - n - 1 for n in range(ask.max_tokens))],
        )
        for place, ask in enumerate(asks)
    ]  # fmt: skip
    return RecordedLoad(
        requests=requests, origin_ns=0, slots=None, until_ns=None, may_repeat=False, timeout_ns=None,
        declared_window_s=None, doubts=[],
    )  # fmt: skip


def replayed(asks: list[Ask], *, overlap: bool = False, policy: str = "fcfs", **limits) -> tuple[list[Sent], Replica]:
    limits = DEFAULTS | limits
    config = EngineConfig(
        model="", telemetry="off", policy=policy, max_num_seqs=limits["max_num_seqs"], block_size=limits["block_size"],
        max_num_batched_tokens=limits["max_num_batched_tokens"], num_kv_blocks=limits["num_blocks"],
    )  # fmt: skip
    load = ReplayedLoad(
        recorded(asks), LoadChange(), BlockHashes(config.block_size), max_waiting=10**6, pool_tokens=10**6
    )
    replica = make_replica(config, SimulatedTurns(), load, overlap=overlap)
    return load.run([replica], RoundRobin(1)), replica


def check_same(asks: list[Ask], within_ns: float = 0.0, **settings) -> int:
    """Every first and last token at the moment at which the engine said it; returns the preemptions."""
    simulation, seen = drive(asks, **settings)
    sent, replica = replayed(asks, **settings)
    for ask, each in zip(asks, sent, strict=True):
        stamps = seen[ask.id].token_ns
        assert each.status == ("ok" if len(stamps) == ask.max_tokens * ask.choices else "cancelled"), ask
        if stamps:
            assert each.first_ns == pytest.approx(stamps[0], abs=within_ns), ask
        if each.status == "ok":
            assert each.last_ns == pytest.approx(stamps[-1], abs=within_ns), ask
    preemptions = sum(len(record.preempted_ids) for record in simulation.published.records)
    assert replica.observer.preemptions == preemptions
    assert replica.num_steps == len(simulation.published.records)
    return preemptions


@pytest.mark.parametrize("policy", ["fcfs", "shortest-prefill-first", "static", "prefill-first"])
def test_replay_says_every_token_at_the_moment_at_which_the_engine_does(policy):
    check_same(random_asks(1, 60, leaving=0.1), policy=policy)


def test_choices_of_one_prompt_share_its_blocks_as_in_the_engine():
    asks = random_asks(8, 30, mean_gap_ns=3_000_000)
    for ask in asks[::3]:
        ask.choices = 3
    check_same(asks)  # with blocks enough: the choices of the simulated model all say the same, and share more


def test_replay_overlaps_steps_as_the_engine_does():
    # where the last tokens are under way the engine still plans, which is one reading of the clock
    check_same(random_asks(2, 40, mean_gap_ns=20_000_000), within_ns=100 * TICK, overlap=True)


@settings(max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), num_blocks=st.integers(17, 40), max_num_seqs=st.integers(1, 12))
def test_replay_has_the_preemptions_of_an_engine_that_runs_out_of_blocks(seed, num_blocks, max_num_seqs):
    asks = random_asks(seed, 25, mean_gap_ns=random.Random(seed).choice([100_000, 3_000_000]), leaving=0.1)
    preemptions = check_same(asks, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    assert preemptions <= 25 * 24 * max_num_seqs  # each follows a token of another request


def test_requests_that_come_during_the_last_turn_are_received_together_behind_it():
    """The first request ends in its only step, and five come meanwhile: the next step begins when that has ended."""
    asks = random_asks(20, 25, mean_gap_ns=100_000, leaving=0.1)
    assert asks[0].max_tokens == 1 and asks[5].due_ns < 400_000
    check_same(asks, num_blocks=24, max_num_seqs=6)


def test_the_property_meets_preemption_storms():
    assert check_same(random_asks(3, 40, mean_gap_ns=100_000, longest=80), num_blocks=40) > 20


def test_predictor_says_of_a_changed_setting_what_the_engine_does_with_it(tmp_path):
    asks = random_asks(4, 60, mean_gap_ns=6_000_000)
    bounds = [{"klass": "all", "ttft_ms": 20.0}]
    predictor = predictor_of(write_run(tmp_path / "base", asks, objectives=bounds))
    changes = [{"max_num_seqs": 2}, {"max_num_batched_tokens": 12}, {"num_kv_blocks": 24}]
    found = predictor.predict([Change(settings=each) for each in changes])
    for place, (changed, prediction) in enumerate(zip(changes, found, strict=True)):
        limits = {"num_blocks" if name == "num_kv_blocks" else name: value for name, value in changed.items()}
        real = predictor_of(write_run(tmp_path / f"real{place}", asks, objectives=bounds, **limits))
        for quantile in ("p50", "p90"):
            for latency in ("ttft_ms", "tpot_ms", "e2e_ms"):
                measured_ms = real.recorded[f"{latency}:{quantile}"]
                assert getattr(prediction, latency)[quantile].median == pytest.approx(measured_ms, rel=0.02), changed
        assert prediction.attainment.median == pytest.approx(real.recorded["attainment"], abs=0.02)
        assert abs(prediction.preemptions - real.recorded_preemptions) <= 2
        assert prediction.doubts == []
