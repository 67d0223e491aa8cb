"""KV events: whoever applies all of them knows exactly which blocks are cached, and of which tokens."""

import random
from types import SimpleNamespace

import pytest

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.memory.kv_events import KVEventLog, block_hash
from sojourn.engine.memory.prefix import chain_hash, root_hash
from sojourn.engine.memory.window import FreedWindow
from sojourn.engine.messages import Submit
from sojourn.engine.sampling import SamplingParams
from tests.engine.kv_event_index import KVEventIndex, decoded
from tests.engine.simulated import Simulation
from tests.further import further

SIZE = 4
ADAPTER = AdapterReference("poet", "/adapters/poet", "d1", 8, 1, 1)


def workload(dice: random.Random, count: int = 60) -> list[Submit]:
    """Prompts over few beginnings, so that they share blocks, with salts, an adapter and forks."""
    heads = [[dice.randrange(50) for _ in range(dice.randint(4, 40))] for _ in range(6)]
    made: list[Submit] = []
    for index in range(count):
        if made and dice.random() < 0.1:
            leader = dice.choice(made[-3:])
            tokens, salt, adapter, fork_of = (
                leader.prompt_token_ids,
                leader.cache_salt,
                leader.adapter,
                leader.request_id,
            )
            fork_of = None if leader.fork_of is not None else fork_of
        else:
            tokens = dice.choice(heads) + [dice.randrange(50) for _ in range(dice.randint(1, 20))]
            salt, adapter, fork_of = dice.choice(["", "", "a", "b"]), dice.choice([None, None, ADAPTER]), None
        params = SamplingParams(max_tokens=dice.randint(1, 12), ignore_eos=True)
        made.append(Submit(f"r{index}", tokens, params, 0, cache_salt=salt, adapter=adapter, fork_of=fork_of))
    return made


def play(seed: int, index: KVEventIndex, **settings) -> Simulation:
    """Runs a drawn workload, and compares the index of a subscriber with the engine's after each step."""
    dice = random.Random(seed)
    simulation = Simulation(kv_events=index.wire_format, max_num_seqs=5, **settings)
    applied = 0

    def compare() -> None:
        nonlocal applied
        if not simulation.engine.has_work:
            simulation.engine.flush()
        batches = simulation.published.kv_events
        for batch in batches[applied:]:
            index.apply(batch)
        applied = len(batches)
        if not simulation.scheduler.pool.events._events:  # else some are for the next batch
            assert index.media["GPU"] == cached(simulation)

    for message in workload(dice):
        simulation.receive(message)
        for _ in range(dice.randint(0, 4)):
            if simulation.engine.has_work:
                simulation.step()
                compare()
        if simulation.disk is not None:
            simulation.disk.work(dice.randint(0, 3))
    simulation.drain()
    simulation.engine.flush()
    compare()
    return simulation


def cached(simulation: Simulation) -> set[int]:
    return {block_hash(key) for key in simulation.scheduler.pool._index._nodes}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", [0, 1, *further(2, 3, 4, 5)])
def test_applying_all_events_gives_the_blocks_that_are_cached(seed, overlap):
    index = KVEventIndex()
    simulation = play(seed, index, num_blocks=40, overlap=overlap, knobs={"eviction_policy": "lru"})
    assert simulation.scheduler.pool.evicted_blocks > 100, "the workload must evict"
    hashes = {}
    for block in index.media["GPU"]:
        chain = index.prefixes[block]
        lora = next((keys[0] for keys, _ in chain if keys and keys[0] == "poet"), None)
        salt = next((keys[-1] for keys, _ in chain[:1] if keys and keys[-1] != "poet"), "")
        parent = root_hash(salt, ADAPTER.key if lora else "")
        for _, tokens in chain:
            parent = chain_hash(parent, tokens)
        hashes[block] = block_hash(parent)
    assert all(block == name for block, name in hashes.items()), "tokens or extra keys of an event are not the block's"


@pytest.mark.parametrize("settings", [
    {"policy": "priority"},
    {"knobs": {"eviction_policy": "lfu"}},
    {"window": FreedWindow(12, 0, 32)},
], ids=["priority", "lfu", "window"])  # fmt: skip
def test_events_hold_with_other_policies_and_with_windows(settings):
    index = KVEventIndex(strict="window" not in settings)
    simulation = play(7, index, num_blocks=48, **settings)
    assert simulation.scheduler.pool.evicted_blocks > 50


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
@pytest.mark.parametrize("stores", ["fill", "evict"])
def test_events_name_what_host_memory_and_disk_hold(seed, stores):
    index = KVEventIndex()
    simulation = play(seed, index, num_blocks=32, host_blocks=24, disk_blocks=40, stores=stores, overlap=True)
    tiers = simulation.tiers
    assert index.media["CPU"] == {block_hash(key) for key in tiers.host.readable()}
    assert index.media["STORAGE"] == {block_hash(key) for key in tiers.slow[0].index.readable()}
    assert index.media["CPU"] and index.media["STORAGE"]
    in_tiers = index.media["CPU"] | index.media["STORAGE"]
    assert not index.nameless, "a tier's block without its tokens"
    remembered = {block_hash(key) for key in simulation.scheduler.pool.events._known}
    assert remembered == in_tiers | index.media["GPU"], "the log remembers blocks that nothing holds"


def test_a_disk_of_an_earlier_process_is_told_by_hashes():
    files: dict[bytes, list] = {}
    first = Simulation(num_blocks=32, host_blocks=16, disk_blocks=64, files=files)
    first.receive(Submit("r", list(range(20)), SamplingParams(max_tokens=1), 0))
    first.drain()
    index = KVEventIndex()
    second = Simulation(num_blocks=32, host_blocks=16, disk_blocks=64, files=files, kv_events="map")
    second.engine.flush()
    for batch in second.published.kv_events:
        index.apply(batch)
    assert index.media["STORAGE"] == {block_hash(key) for key in files} and files


def test_both_wire_formats_say_the_same():
    by_format = {}
    for wire_format in ("map", "array"):
        index = KVEventIndex(wire_format)
        simulation = play(3, index, num_blocks=40)
        events = [event for batch in simulation.published.kv_events for event in decoded(batch, wire_format)]
        by_format[wire_format] = [{k: v for k, v in event.items() if v is not None} for event in events]
    assert by_format["map"] == by_format["array"]


def test_nothing_is_said_of_a_block_before_it_is_computed():
    simulation = Simulation(kv_events="map", max_num_batched_tokens=6)
    simulation.receive(Submit("r", list(range(22)), SamplingParams(max_tokens=1), 0))
    seen = []
    while simulation.engine.has_work:
        simulation.step()
        stored = [e for b in simulation.published.kv_events for e in decoded(b, "map")]
        seen.append(sum(len(event["block_hashes"]) for event in stored))
        assert seen[-1] == min(6 * len(seen), 22) // SIZE, "a block is announced before its step is read, or after"
    assert seen[0] == 1 and seen[-1] == 5


def test_a_chain_of_one_step_is_one_event():
    log = KVEventLog(2)

    writer = SimpleNamespace(token_ids=list(range(6)), cache_salt="pepper", adapter=None)

    for index, key in enumerate((b"a" * 16, b"b" * 16, b"c" * 16)):
        log.stored(writer, index, key, (None, b"a" * 16, b"b" * 16)[index])
    log.removed(b"c" * 16)
    log.removed(b"b" * 16)
    stored, removed = decoded(log.take(), "map")
    assert stored["token_ids"] == [0, 1, 2, 3, 4, 5] and stored["parent_block_hash"] is None
    assert stored["extra_keys"] == [["pepper"], None, None] and len(removed["block_hashes"]) == 2
    assert log.take() is None
