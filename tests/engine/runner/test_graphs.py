"""Decode steps in memory that stays: what a graph is given, what it leaves out, and that it changes nothing.

A CPU has no graphs: it runs the captured work again, which leaves all but the capture as it is on a GPU.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.request.plan import ScheduledTokens
from sojourn.engine.request.request import Request
from sojourn.engine.runner.forward import GraphForward
from sojourn.engine.runner.graphs import DecodeGraphs, graph_sizes
from sojourn.engine.runner.rows import PADDING_ROW, UNKNOWN, PackedStep, StableRows, pack
from sojourn.engine.runner.tables import HostTables, padded
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.errors import ModelError
from tests.engine.compute import triton_harness  # noqa: F401  (settles how Triton's kernels run before they are imported)
from tests.engine.harness import drain, hand_over, make_engine, submit

needs_kernels = pytest.mark.compiler  # the reference for attention needs lengths that a graph's host does not know


def run_again(work):
    """The capture of a device without graphs."""
    work()
    return work


def replaying(runner, sizes) -> None:
    forward = runner.forward = GraphForward(runner.eager, runner.config, draws=True)
    with torch.inference_mode():
        forward.graphs = DecodeGraphs(sizes, runner.eager.tables.static, forward.decode, run_again)


def replaying_engine(folder, sizes, **settings):
    engine, published = make_engine(folder, **settings)
    runner = engine.runner
    replaying(runner, sizes)
    return engine, published


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (21, [1, 2, 4, 8, 16, 21])])
def test_sizes_are_few_and_hold_every_batch(most, sizes):
    assert graph_sizes(most) == sizes


def test_the_largest_batches_have_graphs_far_apart():
    sizes = graph_sizes(4096)
    assert len(sizes) < 100 and sizes[-1] == 4096
    assert max(b - a for a, b in pairwise(sizes)) == 64


@needs_kernels
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_replayed_step_gives_what_an_eager_one_gives_and_padding_writes_nothing(overlap, checkpoints):
    """Greedy, seeded, penalised and scored draws, by 1 to 5 requests in graphs of 1, 4 and 8."""
    wishes = [{}, {"temperature": 0.9, "seed": 3}, {"frequency_penalty": 1.0}, {"logprobs": 2}, {}]
    messages = [submit(f"r{i}", [9 + i] * (5 + 11 * i), 6 + 3 * i, **wish) for i, wish in enumerate(wishes)]
    told = []
    for make in (make_engine, lambda *given, **more: replaying_engine(*given, [1, 4, 8], **more)):
        engine, published = make(checkpoints["qwen3"], overlap=overlap, max_num_seqs=8)
        hand_over(engine, messages)
        drain(engine, check=True)
        told.append((published, engine.runner.eager.kv_cache.values))
    (eager, eager_cache), (replayed, replayed_cache) = told
    assert replayed.tokens == eager.tokens and replayed.logprobs == eager.logprobs
    assert torch.equal(replayed_cache, eager_cache)
    assert {record.graph for record in eager.records} == {"eager"}
    for record in replayed.records:
        decodes = set(record.kinds) == {"decode"}
        sequences = len(record.kinds)
        size = next(size for size in (1, 4, 8) if size >= sequences)
        assert record.graph == (f"decode-{size}" if decodes else "eager")
        assert record.padding_tokens == (size - sequences if decodes else 0)
    assert any(record.padding_tokens for record in replayed.records)


@needs_kernels
def test_a_batch_that_no_graph_holds_is_computed_eagerly(checkpoints):
    engine, published = replaying_engine(checkpoints["qwen3"], [1, 2], max_num_seqs=3)
    hand_over(engine, [submit(f"r{i}", [9 + i] * 5, 4 + i) for i in range(3)])
    drain(engine)
    decodes = [(len(r.kinds), r.graph) for r in published.records if set(r.kinds) == {"decode"}]
    assert set(decodes) == {(3, "eager"), (2, "decode-2"), (1, "decode-1")}


def test_graphs_that_a_device_cannot_have_are_refused_with_a_sentence(checkpoints):
    with pytest.raises(ModelError, match="graphs=on needs a CUDA device"):
        build(EngineConfig(model=str(checkpoints["llama"]), graphs="on", device="cpu"), 0, lambda outputs: None)


def random_step(dice: np.random.Generator, max_rows: int, max_blocks: int, size: int, decodes: bool) -> PackedStep:
    count = dice.integers(1, max_rows + 1)
    new = np.ones(count, dtype=np.int32) if decodes else dice.integers(1, 9, count).astype(np.int32)
    past = dice.integers(0, max_blocks * size - 9, count).astype(np.int32)
    rows = dice.permutation(max_rows)[:count].astype(np.int32)
    starts = np.concatenate(([0], new.cumsum())).astype(np.int32)
    known = dice.integers(0, 99, starts[-1]).astype(np.int32)
    known[starts[1:] - 1] = np.where(dice.random(count) < 0.5, UNKNOWN, known[starts[1:] - 1])
    changed = dice.integers(0, max_blocks, (3, 20)).astype(np.int32)
    changed[0] %= max_rows
    _, first = np.unique(changed[:2], axis=1, return_index=True)  # a block is changed once in a step
    row_fills = np.unique(changed[0])
    none = np.empty(0, dtype=np.int32)
    return PackedStep(
        none, rows, starts, past, known, starts[1:] - 1, rows, np.stack((row_fills, row_fills)), changed[:, first],
        none, none.reshape(2, 0),
    )  # fmt: skip


@pytest.mark.parametrize("decodes", [False, True])
def test_the_inputs_made_on_the_host_are_those_that_a_gpus_kernel_makes(decodes):
    step_inputs = pytest.importorskip("sojourn.engine.compute.triton.step_inputs", reason="needs the package triton")
    from tests.engine.compute.reference_step_inputs import reference_step_inputs

    dice, size, max_blocks = np.random.default_rng(1), 4, 12
    tables = HostTables(6, max_blocks, size)
    for _ in range(30):
        step = random_step(dice, 6, max_blocks, size, decodes)
        made = tables.inputs(step, max_blocks)
        parts = map(torch.from_numpy, (step.rows, step.query_start, step.past, step.known_ids, tables._blocks))
        rows = step_inputs.StepRows(*parts, torch.from_numpy(tables._last_ids.astype(np.int32)))
        expected = reference_step_inputs(rows, size)
        for name in ("ids", "positions", "slots", "contexts"):
            assert torch.equal(getattr(made, name), getattr(expected, name)), name
        assert torch.equal(made.block_tables, torch.from_numpy(tables._blocks[step.rows]))
        tables.remember(made.sample_rows, torch.from_numpy(dice.integers(-2, 99, len(step.rows))))
        assert tables._last_ids.min() >= 0


def test_a_row_that_changes_hands_keeps_no_block_of_its_last_owner():
    """What stands behind a sequence's blocks is read, and masked: it must be numbers of its own."""
    stable, tables = StableRows(2), HostTables(2, 8, 4)
    for name, blocks in (("long", [3, 4, 5, 6, 7]), ("short", [9, 1])):
        tokens = [5] * 4 * len(blocks)
        request = Request(1, name, len(tokens), tokens, SamplingParams(max_tokens=1), blocks=blocks)
        item = ScheduledTokens(request, 2, len(tokens) - 2, "prefill", True)
        step = pack([item], stable, 4)
        assert tables.inputs(step, 8).block_tables.tolist() == [blocks + blocks[:1] * (8 - len(blocks))]
        assert not pack([item], stable, 4).block_table_updates.size, "what was sent is not sent again"
        request.blocks[1], request.first_changed_block = 2, 1
        assert tables.inputs(pack([item], stable, 4), 8).block_tables[0, :2].tolist() == [blocks[0], 2]
        stable.release(name)


def test_padding_has_no_slot_and_no_context_and_no_owner():
    tables, dice = HostTables(6, 12, 4), np.random.default_rng(2)
    step = random_step(dice, 3, 12, 4, True)
    tables.update(step)
    count = len(step.rows)
    made = tables.inputs(padded(step, 8), 12)
    plain = tables.inputs(step, 12)
    for name in ("ids", "positions", "slots", "contexts"):
        assert torch.equal(getattr(made, name)[:count], getattr(plain, name))
    assert (made.slots[count:] == -1).all() and (made.contexts[count:] == 0).all()
    assert (made.sample_rows[count:] == PADDING_ROW).all() and (made.ids >= 0).all()
    before = tables._last_ids[:6].copy()
    tables.remember(made.sample_rows[count:], torch.full((8 - count,), 77))
    assert (tables._last_ids[:6] == before).all()


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_graphs_and_overlap_change_no_token_on_a_device(overlap, checkpoints):
    wishes = [{}, {"temperature": 0.9, "seed": 3}, {"frequency_penalty": 1.0}, {"logprobs": 2}, {"top_k": 5, "seed": 7}]
    messages = [submit(f"r{i}", [9 + i] * (5 + 11 * i), 20 + 3 * i, **wish) for i, wish in enumerate(wishes)]
    told = {}
    for graphs in ("off", "on"):
        engine, published = make_engine(
            checkpoints["qwen3"],
            device="cuda",
            graphs=graphs,
            max_num_seqs=8,
            overlap=overlap if graphs == "on" else "off",
        )
        hand_over(engine, messages)
        drain(engine, check=True)
        told[graphs] = published
    assert told["on"].tokens == told["off"].tokens
    decodes = [record.graph for record in told["on"].records if set(record.kinds) == {"decode"}]
    assert decodes and all(graph.startswith("decode-") for graph in decodes)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_launching_a_decode_never_waits_for_the_device(graphs, checkpoints):
    engine, _ = make_engine(checkpoints["qwen3"], device="cuda", graphs=graphs, max_num_seqs=8)
    wishes = [{}, {"temperature": 0.9, "seed": 3}, {"frequency_penalty": 1.0}, {"logprobs": 2}]
    hand_over(engine, [submit(f"r{i}", [9 + i] * 20, 40, **wish) for i, wish in enumerate(wishes)])
    for _ in range(5):
        engine.receive([], engine.step())
    launch = engine.runner.launch

    def watched(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.launch = watched
    drain(engine, check=True)


@pytest.mark.gpu
def test_kv_blocks_leave_room_for_graphs_and_the_largest_steps(checkpoints):
    engine, published = make_engine(
        checkpoints["qwen3"], device="cuda", num_kv_blocks=None, memory_fraction=0.98, max_num_seqs=16
    )
    hand_over(engine, [submit(f"r{i}", [9 + i] * 400, 60, temperature=0.9, frequency_penalty=0.5) for i in range(16)])
    drain(engine, check=True)
    assert {ended.reason for ended in published.ended.values()} == {"length"}
