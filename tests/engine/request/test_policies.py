"""Random traffic under every policy on the simulated device: invariants, ledgers, and each request its own tokens."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.engine.messages import Abort, Submit
from sojourn.engine.request.policies import POLICIES
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.records import STAGES
from tests.engine.simulated import Simulation, sequential

arrival = st.fixed_dictionaries(
    {
        "delay": st.integers(0, 8),  # steps before it arrives
        "length": st.integers(1, 40),  # prompt tokens
        "max_tokens": st.integers(1, 12),
        "shared": st.sampled_from([0, 0, 1, 2]),  # which beginning its prompt has
        "forks": st.sampled_from([0, 0, 0, 1, 3]),
        "fork_delay": st.sampled_from([0, 0, 0, 1, 5]),
        "abort": st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 15), st.sampled_from(["one", "all"]))),
        "priority": st.integers(-2, 2),
        "tenant": st.sampled_from(["", "a", "b", "c"]),
        "salt": st.sampled_from(["", "", "s"]),
        "scored": st.sampled_from([False, False, False, True]),
    }
)
limits = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "num_blocks": st.integers(6, 40),
        "block_size": st.sampled_from([1, 4, 16]),
        "prefix_caching": st.booleans(),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 48),
        "max_prefill_chunk_tokens": st.one_of(st.none(), st.integers(1, 16)),
        "long": st.one_of(st.none(), st.tuples(st.integers(1, 2), st.integers(1, 30))),
        "overlap": st.booleans(),
    }
)


def simulate(bounds: dict) -> Simulation:
    bounds = dict(bounds)
    if bounds["block_size"] == 1:
        bounds["num_blocks"] *= 4
    if (long := bounds.pop("long")) is not None:
        bounds |= {"max_long_prefills": long[0], "long_prefill_tokens": long[1]}
    return Simulation(**bounds)


def check_random_traffic(arrivals: list[dict], bounds: dict) -> None:
    simulation = simulate(bounds)
    capacity = simulation.scheduler.pool.num_blocks * bounds["block_size"]
    prefixes = [[], [7] * 13, list(range(20))]
    events: dict[int, list] = {}
    asked: dict[str, tuple[list[int], int]] = {}
    for index, it in enumerate(arrivals):
        prompt = (prefixes[it["shared"]] + random.Random(index).choices(range(50), k=it["length"]))[: min(40, capacity)]
        # As the front bounds it. The token that is drawn last is never computed: a prompt may fill the whole pool.
        max_tokens = min(it["max_tokens"], capacity + 1 - len(prompt))
        names = [f"r{index}", *(f"r{index}.{fork}" for fork in range(it["forks"]))]
        for position, name in enumerate(names):
            asked[name] = (prompt, max(1, max_tokens - position))
            at = it["delay"] + (it["fork_delay"] if position else 0)
            sampling = SamplingParams(
                max_tokens=asked[name][1], temperature=0, prompt_logprobs=0 if it["scored"] else None
            )
            message = (name, sampling, it, names[0] if position else None)
            events.setdefault(at, []).append(message)
        if it["abort"] is not None:
            after, who = it["abort"]
            gone = names[:1] if who == "one" else names
            events.setdefault(it["delay"] + after, []).extend(Abort(name) for name in gone)
    encoded = {}
    for tick in range(26):
        messages = []
        for event in events.get(tick, []):
            if not isinstance(event, Abort):
                name, sampling, it, leader = event
                encoded[name] = simulation.clock()
                event = Submit(
                    name, asked[name][0], sampling, encoded[name], it["salt"], it["tenant"], it["priority"], leader
                )
            messages.append(event)
        simulation.receive(*messages)
        if simulation.engine.has_work:
            simulation.step()
    simulation.drain()
    published = simulation.published
    assert set(published.ended) == set(asked)
    for name, (prompt, max_tokens) in asked.items():
        tokens, expected = published.tokens.get(name, []), sequential(prompt, max_tokens)
        ended = published.ended[name]
        assert tokens == expected[: len(tokens)]
        assert ended.reason == "abort" or tokens == expected
        for committed_ns, ledger in published.ledgers.get(name, []):
            assert sum(ledger) == committed_ns - encoded[name], "a nanosecond is missing or booked twice"
        if ended.reason != "abort":
            assert ended.cached_tokens + ended.computed_tokens == len(prompt) + max_tokens - 1 or ended.preemptions
    simulation.check_idle()
    for step in published.records:
        assert sum(step.new_tokens) <= step.budget
        assert sum(step.refusals.values()) == step.waiting
        assert sum(step.stages) == step.end_ns - step.begin_ns and len(step.stages) == len(STAGES)


@given(st.lists(arrival, min_size=1, max_size=10), limits)
@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
def test_random_traffic_gets_its_own_tokens_under_every_policy(arrivals, bounds):
    check_random_traffic(arrivals, bounds)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(st.lists(arrival, min_size=1, max_size=16), limits)
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
def test_long_random_traffic_gets_its_own_tokens_under_every_policy(arrivals, bounds):
    check_random_traffic(arrivals, bounds)


@given(limits)
@settings(max_examples=30)
def test_the_same_traffic_gives_the_same_steps(bounds):
    def records():
        simulation = simulate(bounds | {"num_blocks": 100})
        for i in range(6):
            sampling = SamplingParams(max_tokens=5, temperature=0)
            leader = f"r{i - 1}" if i % 2 else None
            prompt = list(range(i // 2, i // 2 + 20))
            simulation.receive(Submit(f"r{i}", prompt, sampling, 0, "", f"t{i % 3}", i % 2, leader))
        simulation.drain()
        return simulation.published.records

    assert records() == records()
