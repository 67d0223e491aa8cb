"""A fleet's replay: runs of steps beside single steps, policies beside each other, and parts beside the whole."""

import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.engine.config import EngineConfig
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import ROUTINGS, Change
from sojourn.replay.fleet.answer import FleetQuestion, fleet_answers
from sojourn.replay.fleet.simulate import FleetAnswers, FleetReplay, RecordedServers
from sojourn.replay.fleet.traffic import FleetTraffic, TracedRequest
from sojourn.replay.predictor import predictor_of
from sojourn.replay.replica import Replica
from sojourn.replay.routing import ConsistentHash, LeastRequests, PrefixAware, RoundRobin, make_routing
from tests.replay.simulated_run import random_asks, write_run

BLOCK = 4


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return predictor_of(write_run(tmp_path_factory.mktemp("runs") / "base", random_asks(1, 60)))._material


def trace(seed: int, count: int, *, gap_s: float = 0.004, longest: int = 40) -> list[TracedRequest]:
    """Conversations: each turn has the blocks of the turn before it, and more."""
    rng, now, rows = random.Random(seed), 0.0, []
    talks: list[list[int]] = [[0] for _ in range(max(2, count // 6))]
    for fresh in range(count):
        talk = rng.choice(talks)
        talk += range(1000 * (fresh + 1), 1000 * (fresh + 1) + rng.randint(1, 4))
        rows.append(TracedRequest(now, len(talk) * BLOCK - rng.randint(0, 3), rng.randint(1, longest), tuple(talk)))
        now += rng.expovariate(1 / gap_s)
        if len(talk) > 12:
            talk[1:] = []
    return rows


def config(**changed) -> EngineConfig:
    settings = {"model": "", "telemetry": "off", "block_size": BLOCK, "num_kv_blocks": 200, "max_num_seqs": 6,
                "max_num_batched_tokens": 32, "overlap": "off"} | changed  # fmt: skip
    return EngineConfig(**settings)


def replayed(material, rows, limits, routing, replicas, *, kept=None) -> tuple[FleetAnswers, list[Replica]]:
    traffic = FleetTraffic(rows, len(rows), None, BLOCK)
    fleet = FleetReplay(
        RecordedServers(material), limits, Change(), traffic, routing, range(replicas) if kept is None else kept
    )
    return fleet.run(), fleet.replicas


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6), num_blocks=st.integers(30, 120), max_num_seqs=st.integers(1, 8),
    policy=st.sampled_from(["fcfs", "fair-share", "priority", "static", "prefill-first"]),
    gap_s=st.sampled_from([0.002, 0.02, 0.2]),
)  # fmt: skip
def test_steps_of_one_batch_at_once_are_the_same_as_single_steps(
    material, seed, num_blocks, max_num_seqs, policy, gap_s
):
    rows = trace(seed, 40, gap_s=gap_s)
    limits = config(num_kv_blocks=num_blocks, max_num_seqs=max_num_seqs, policy=policy)
    fast, runs = replayed(material, rows, limits, LeastRequests(2), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "_begin_run", lambda replica: None)
        slow, steps = replayed(material, rows, limits, LeastRequests(2), 2)
    assert np.allclose(fast.first_ns, slow.first_ns, rtol=0, atol=1.0, equal_nan=True)
    assert np.allclose(fast.last_ns, slow.last_ns, rtol=0, atol=1.0, equal_nan=True)
    for column in ("replica", "cached_tokens", "is_refused"):
        assert (getattr(fast, column) == getattr(slow, column)).all(), column
    assert (fast.steps, fast.preemptions) == (slow.steps, slow.preemptions)
    assert fast.device_ns == pytest.approx(slow.device_ns)
    for one, other in zip(runs, steps, strict=True):
        assert one.scheduler.pool.counts() == other.scheduler.pool.counts()
        assert one.scheduler.pool.evicted_blocks == other.scheduler.pool.evicted_blocks
        assert one.scheduler.pool._index._nodes.keys() == other.scheduler.pool._index._nodes.keys()


def test_the_property_meets_runs_evictions_and_preemptions(material, monkeypatch):
    taken: list[int] = []
    advance = Replica._advance
    monkeypatch.setattr(Replica, "_advance", lambda each, turns: (taken.append(turns), advance(each, turns)))
    found, replicas = replayed(material, trace(3, 60, gap_s=0.002), config(num_kv_blocks=40), RoundRobin(1), 1)
    assert sum(taken) > found.steps / 3 and len(taken) > 30 and found.preemptions > 3
    assert replicas[0].scheduler.pool.evicted_blocks > 50


def test_parts_of_a_fleet_are_the_whole_where_choices_follow_from_the_arrivals(material):
    rows = trace(5, 80)
    for make in (RoundRobin, ConsistentHash):
        assert not make.sees_ends
        whole, _ = replayed(material, rows, config(), make(4), 4)
        parts = [replayed(material, rows, config(), make(4), 4, kept=range(part, 4, 2))[0] for part in range(2)]
        for part in parts:
            own = part.replica >= 0
            assert 0 < own.sum() < len(rows)
            assert (part.last_ns[own] == whole.last_ns[own]).all()
        assert sum(part.steps for part in parts) == whole.steps


def test_policies_that_keep_conversations_together_hit_more(material):
    rows = trace(7, 300, gap_s=0.03, longest=4)
    question = FleetQuestion(replicas=4, num_requests=600, rate=None, change=Change(), objectives=None)
    found = {
        each.routing: each for each in fleet_answers(RecordedServers(material), config(), rows, question, ROUTINGS, 1)
    }
    assert found["round-robin"].hit_rate < 0.8 * found["consistent-hash"].hit_rate
    assert found["consistent-hash"].hit_rate <= found["consistent-hash"].pooled_hit_rate
    assert found["prefix-aware"].hit_rate > found["round-robin"].hit_rate
    assert found["least-requests"].load_max_over_mean < found["consistent-hash"].load_max_over_mean
    assert all(each.requests == 600 and each.refused == 0 for each in found.values())


def test_one_replica_with_blocks_enough_hits_what_a_pooled_cache_does(material):
    question = FleetQuestion(replicas=1, num_requests=200, rate=5.0, change=Change(), objectives=None)
    (found,) = fleet_answers(
        RecordedServers(material), config(num_kv_blocks=20_000), trace(8, 100), question, ["round-robin"], 1
    )
    assert found.hit_rate == pytest.approx(found.pooled_hit_rate, rel=1e-9)
    assert found.rate_rps == 5.0


def test_a_trace_of_one_moment_is_refused():
    with pytest.raises(ReplayError, match="same moment"):
        FleetTraffic([TracedRequest(1.0, 8, 8)] * 3, 3, None, BLOCK)


@pytest.mark.parametrize("taken", [2, 10, 20, 25, 60])
def test_a_rate_is_that_of_the_requests_that_are_taken(taken):
    moments = [0.1 * each for each in range(10)] + [10.0 * each for each in range(1, 11)]  # crowded, and then not
    rows = [TracedRequest(moment, 8, 8) for moment in moments]
    traffic = FleetTraffic(rows, taken, 5.0, BLOCK)
    assert traffic.due_ns[-1] == pytest.approx((taken - 1) / 5.0 * 1e9) and traffic.rate == 5.0
    own = FleetTraffic(rows, taken, None, BLOCK)
    assert own.rate == pytest.approx((taken - 1) / own.due_ns[-1] * 1e9)


def test_a_part_of_one_moment_has_no_rate():
    rows = [TracedRequest(moment, 8, 8) for moment in (0.0, 0.0, 1.0)]
    with pytest.raises(ReplayError, match="the first 2 requests have the same moment"):
        FleetTraffic(rows, 2, 5.0, BLOCK)
    assert FleetTraffic(rows, 1, 5.0, BLOCK).due_ns.tolist() == [0.0]


def test_the_hits_of_a_pooled_cache_cost_a_pass_over_the_requests():
    rows, copies = [TracedRequest(each, 16, 4, (0, 1, 2, 3)) for each in range(2)], 30_000
    traffic = FleetTraffic(rows, copies * len(rows), None, BLOCK)
    begin = time.thread_time()
    assert traffic.pooled_hit_tokens() == copies * FleetTraffic(rows, len(rows), None, BLOCK).pooled_hit_tokens()
    assert time.thread_time() - begin < 1.0, "copies times requests takes seconds"


def test_least_requests_is_the_least_of_all_counts():
    rng, routing, live = random.Random(0), LeastRequests(5), [0] * 5
    for _ in range(2000):
        if rng.random() < 0.5 or not any(live):
            chosen = routing.choose(b"", ())
            assert live[chosen] == min(live)
            live[chosen] += 1
        else:
            ended = rng.choice([place for place, count in enumerate(live) if count])
            routing.ended(ended)
            live[ended] -= 1


def test_consistent_hash_moves_few_sessions_when_a_replica_is_added():
    few, more = ConsistentHash(9), ConsistentHash(10)
    keys = [b"%d" % each for each in range(4000)]
    before, after = ([ring.choose(key, ()) for key in keys] for ring in (few, more))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {9} and 0.05 < len(moved) / len(keys) < 0.15
    assert np.bincount(before).max() < 1.5 * len(keys) / 9


def test_prefix_aware_follows_the_longest_beginning_until_that_replica_is_full():
    routing = make_routing("prefix-aware", 3, max_num_seqs=2, num_blocks=4)
    assert isinstance(routing, PrefixAware)
    first = routing.choose(b"", [b"a", b"b"])
    assert routing.choose(b"", [b"a", b"b", b"c"]) == first
    other = routing.choose(b"", [b"a", b"b"])
    assert other != first  # its batch is full
    routing.ended(first)
    assert routing.choose(b"", [b"a", b"b", b"c"]) == first
