"""The bookkeeping of adapters: slots, host memory, and the line of requests that wait for a slot."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.messages import Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.engine.techniques.lora.slots import AdapterSlots, HostAdapters
from tests.engine.simulated import Simulation, sequential

KEYS = "abcdef"


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), max_size=60))
def test_slots_evict_the_least_recently_used_adapter_without_requests(count, events):
    """Against a list of adapters in the order of their last use."""
    slots, users = AdapterSlots(count), dict.fromkeys(KEYS, 0)
    order: OrderedDict[str, int] = OrderedDict()  # resident adapter → slot, the least recently left first
    for key, comes in events:
        if comes and (key in order or slots.available):
            slot, is_new = slots.take(key)
            assert is_new == (key not in order)
            if is_new and len(order) == count:
                victim = next(other for other in order if not users[other])
                assert order.pop(victim) == slot
            order.setdefault(key, slot)
            assert order[key] == slot
            users[key] += 1
        elif not comes and users[key]:
            slots.give_back(key)
            users[key] -= 1
            if not users[key]:
                order.move_to_end(key)
        assert sorted(slots.resident) == sorted(order)
        assert len(set(order.values())) == len(order) <= count
        assert slots.in_use == sum(number > 0 for number in users.values())


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 50), st.booleans()), max_size=60))
def test_host_memory_stays_within_its_bound_and_keeps_what_live_requests_use(events):
    host, live = HostAdapters(100), []
    for number, (key, size, comes) in enumerate(events):
        if comes:
            used = {other for other, _ in live}
            before = {other for other in KEYS if host.holds(other)}
            host.use(key, str(number))
            live.append((key, str(number)))
            if not host.holds(key):
                evicted = host.admit(key, size)
                after = {other for other in KEYS if host.holds(other)}
                assert evicted is None or not used & set(evicted)
                assert after == (before if evicted is None else before - set(evicted) | {key})
        elif live:
            host.forget(*live.pop(0))
        assert host.used_bytes <= host.capacity_bytes


def ask(name: str, adapter: str | None, prompt: list[int], max_tokens: int) -> Submit:
    reference = AdapterReference(adapter, "", "0", 1, 1, 1) if adapter else None
    return Submit(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), 0, adapter=reference)


TRAFFIC = st.lists(
    st.tuples(st.sampled_from([None, *KEYS[:4]]), st.lists(st.integers(0, 49), min_size=1, max_size=12),
              st.integers(1, 6), st.integers(0, 2)),
    min_size=1, max_size=14,
)  # fmt: skip


@settings(max_examples=60)
@given(TRAFFIC, st.integers(1, 3), st.sampled_from([14, 64]), st.booleans())
def test_every_request_is_served_whatever_the_number_of_slots(traffic, max_loras, num_blocks, overlap):
    simulation = Simulation(num_blocks=num_blocks, max_loras=max_loras, overlap=overlap, max_num_seqs=3)
    slots = simulation.scheduler.technique("lora").slots
    for index, (adapter, prompt, max_tokens, steps) in enumerate(traffic):
        simulation.receive(ask(f"r{index}", adapter, prompt, max_tokens))
        for _ in range(steps):
            if simulation.engine.has_work:
                simulation.step()
                running = simulation.scheduler.running
                assert {r.adapter.key for r in running if r.adapter} <= set(slots.resident)
                assert slots.in_use <= max_loras
    simulation.drain()
    for index, (_, prompt, max_tokens, _) in enumerate(traffic):
        assert simulation.published.tokens[f"r{index}"] == sequential(prompt, max_tokens)
    assert slots.in_use == simulation.scheduler.technique("lora").line.count == 0


def test_a_request_without_a_slot_blocks_nobody_and_is_overtaken_a_bounded_number_of_times():
    simulation = Simulation(max_loras=1, max_num_seqs=2, num_blocks=256)
    simulation.receive(ask("first", "a", [1, 2], 6), ask("other", "b", [3, 4], 2))
    simulation.receive(*(ask(f"a{index}", "a", [5, index], 6) for index in range(8)), ask("base", None, [7], 2))
    simulation.step()
    assert [request.id for request in simulation.scheduler.running] == ["first", "a0"]
    simulation.drain()
    order = list(simulation.published.ended)
    assert order.index("other") < order.index("a7"), "two may overtake it, then the slot empties"
    assert simulation.published.ended["other"].waits["adapter"] > 0
    assert simulation.published.ended["other"].adapter_loads == 1
    assert (
        simulation.scheduler.technique("lora").slots.loads == 3
        and simulation.scheduler.technique("lora").slots.evictions == 2
    )


def test_adapters_do_not_share_prefixes():
    simulation = Simulation(max_loras=2)
    prompt = list(range(9))
    for name, adapter in (("base", None), ("a", "a"), ("b", "b"), ("again", "a")):
        simulation.receive(ask(name, adapter, prompt, 2))
        simulation.drain()
    cached = {name: ended.cached_tokens for name, ended in simulation.published.ended.items()}
    assert cached == {"base": 0, "a": 0, "b": 0, "again": 8}
