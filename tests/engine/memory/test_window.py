"""Blocks behind a window that every layer has: who may still read them, and that giving them back changes no token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sojourn.engine.core as core
from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.window import HOLE, FreedWindow, freed_window
from sojourn.engine.messages import Abort, Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.compute.cost_model import ModelShape
from tests.engine.harness import generate
from tests.engine.request.test_metamorphic import tokens_of, traffic
from tests.engine.simulated import Simulation, sequential
from tests.engine.token.sampling.test_logprobs import random_prompts

SIZE = 4
WINDOWS = st.builds(FreedWindow, st.integers(1, 20), st.integers(0, 10), st.integers(1, 8))


def seen(window: FreedWindow, position: int) -> set[int]:
    """Positions that one reads, by the definition."""
    return {key for key in range(position + 1) if key < window.sink_tokens or key > position - window.tokens}


@given(window=WINDOWS, num_tokens=st.integers(1, 80), size=st.integers(1, 9))
def test_a_hole_is_what_no_later_position_reads(window, num_tokens, size):
    begin, end = window.hole(num_tokens, size)
    read = set().union(*(seen(window, position) for position in range(num_tokens, num_tokens + 2 * window.tokens + 1)))
    blocks = {key // size for key in read if key < num_tokens}
    dead = {block for block in range(num_tokens // size) if block not in blocks}
    hole = set(range(begin, end))
    assert hole <= dead
    assert dead - hole <= {num_tokens // size - 1, *range(begin)}, "more could be given back"


@given(window=WINDOWS, is_cached=st.lists(st.booleans() | st.just(True), max_size=12))
def test_the_longest_prefix_is_that_whose_later_reads_are_all_cached(window, is_cached):
    def is_usable(count: int) -> bool:
        begin, end = window.hole(count * SIZE, SIZE)
        return all(is_cached[index] for index in range(count) if not begin <= index < end)

    expected = max((count for count in range(len(is_cached) + 1) if is_usable(count)), default=0)
    assert window.longest_prefix(is_cached, SIZE) == expected


def test_a_cached_block_behind_the_window_is_not_needed_and_one_before_it_is():
    pool = BlockPool(8, SIZE, window=FreedWindow(SIZE + 2, 1, 1))
    keys = [bytes([index]) for index in range(6)]
    blocks = pool.allocate(6)
    for key, block, parent in zip(keys, blocks, [None, *keys], strict=False):
        pool.publish(block, key, parent)
    pool.wrote(6 * SIZE)
    pool.release(blocks, 6 * SIZE)
    assert pool.match(keys) == [blocks[0], HOLE, HOLE, HOLE, blocks[4], blocks[5]]
    pool.release(pool.allocate(3), 0)  # the two free ones, and the one that is idle longest: the last
    assert pool.match(keys) == [blocks[0], HOLE, HOLE, blocks[3], blocks[4]]


requests = st.tuples(
    st.integers(0, 40),  # tokens of a shared beginning
    st.integers(1, 30),  # ... of its own
    st.integers(1, 30),  # output
    st.sampled_from(["", "fork", "abort"]),
    st.integers(0, 6),  # steps until the next one comes
)


@settings(max_examples=60, derandomize=True)
@given(
    window=st.tuples(st.integers(1, 20), st.integers(0, 10)),
    traffic=st.lists(requests, min_size=1, max_size=8),
    chunk=st.integers(1, 8),
    spare=st.integers(0, 30),
    prefix_caching=st.booleans(),
    overlap=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_books_close_and_no_position_is_read_after_it_was_given_back(
    window, traffic, chunk, spare, prefix_caching, overlap, policy
):
    """The simulated device holds each slot to the history of its position, and each step audits pool and index."""
    freed = FreedWindow(*window, chunk)
    simulation = Simulation(
        freed.most_blocks(SIZE) + spare, SIZE, prefix_caching, policy, overlap=overlap, max_num_seqs=4,
        max_num_batched_tokens=max(8, chunk), max_prefill_chunk_tokens=chunk, window=freed,
    )  # fmt: skip
    expected, aborted = {}, set()
    for index, (shared, own, output, kind, steps) in enumerate(traffic):
        name, prompt = f"r{index}", [5, *range(7, 7 + shared), *range(100 + 50 * index, 100 + 50 * index + own)]
        before = f"r{index - 1}" if kind == "fork" and index and f"r{index - 1}" not in aborted else None
        if before is not None:
            prompt = expected[before][0]
        expected[name] = prompt, output
        params = SamplingParams(max_tokens=output, temperature=0)
        simulation.receive(Submit(name, prompt, params, 0, priority=index % 3, fork_of=before))
        for _ in range(steps):
            if simulation.engine.has_work:
                simulation.step()
        if kind == "abort":
            aborted.add(name)
            simulation.receive(Abort(name))
    simulation.drain()
    simulation.check_idle()
    for name, (prompt, output) in expected.items():
        if name not in aborted:
            assert simulation.published.tokens[name] == sequential(prompt, output)


def test_a_long_request_holds_no_more_than_its_window_and_sinks():
    window = FreedWindow(8, 2, 8)
    simulation = Simulation(window.most_blocks(SIZE), SIZE, max_prefill_chunk_tokens=8, window=window)
    simulation.receive(Submit("long", list(range(300)), SamplingParams(max_tokens=100, temperature=0), 0))
    simulation.drain()
    simulation.check_idle()
    assert simulation.published.tokens["long"] == sequential(list(range(300)), 100)
    assert not any(record.preempted_ids for record in simulation.published.records)


@pytest.fixture
def keeping(monkeypatch):
    """Switches the giving back off: the attention stays the same."""

    def switch() -> None:
        make = core.make_scheduler
        monkeypatch.setattr(core, "make_scheduler", lambda *arguments: make(*arguments[:4], None))

    return switch


@pytest.mark.parametrize(
    "more",
    [
        {"num_kv_blocks": 20, "max_model_len": 150, "max_num_batched_tokens": 24},
        {"overlap": "on", "attention_backend": "torch", "fused_operations": "off"},
        {"prefix_caching": False, "policy": "priority", "max_num_seqs": 3, "kv_cache_dtype": "int8"},
    ],
)
def test_tokens_are_the_same_where_all_blocks_are_kept(more, checkpoints, keeping):
    messages = traffic()
    window = {"attention_window": 20, "attention_sinks": 3, "block_size": 4} | more
    if "num_kv_blocks" in more:
        window["num_kv_blocks"] = 4 * more["num_kv_blocks"]
    freed, _ = tokens_of(checkpoints["llama"], messages, 3, **window)
    keeping()
    kept, _ = tokens_of(checkpoints["llama"], messages, 3, **window | {"num_kv_blocks": 400})
    assert freed == kept


def test_a_model_with_windows_in_all_layers_gives_blocks_back(checkpoints, keeping):
    prompts = random_prompts((200, 90))
    settings = {"block_size": 4, "max_num_batched_tokens": 32, "num_kv_blocks": 60}
    freed, published = generate(checkpoints["mistral"], prompts, 40, **settings)
    assert max(record.blocks_active for record in published.records) < 60 < (200 + 90) // 4
    keeping()
    assert generate(checkpoints["mistral"], prompts, 40, **settings | {"num_kv_blocks": 256})[0] == freed


def shape(*windows: int | None, sink_tokens: int = 0) -> ModelShape:
    return ModelShape(10, 8, 100, 100, 16, tuple((window, 1) for window in windows), 64, 1000, sink_tokens=sink_tokens)


def test_models_with_a_layer_that_sees_all_and_settings_that_need_all_keep_all_blocks():
    assert freed_window(shape(8, None), 16, keeps_all=False) is None
    assert freed_window(shape(8, 12), 16, keeps_all=True) is None
    assert freed_window(shape(8, 12, sink_tokens=4), 16, keeps_all=False) == FreedWindow(8, 4, 16)
