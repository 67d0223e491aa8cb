"""The kernels that draw give the ids that the sampler's torch operations give, for the same logits and seeds."""

import random
from dataclasses import replace

import pytest
import torch

from sojourn.engine.compute.logits import NOTHING, OVERFLOWED
from sojourn.engine.sampling import Grammar, SamplingParams
from sojourn.engine.token.sampling.sampler import Sampler, uniform
from sojourn.engine.token.sampling.state import RowTable, TokenHistory
from tests.engine.compute.triton_harness import DEVICE, Compilation, assert_no_spills
from tests.engine.exact_sampling import Row, assert_sampled_from, distribution, penalised
from tests.further import further

pytest.importorskip("triton")

from sojourn.engine.compute.triton import sampling
from sojourn.engine.compute.triton.edits import edit_rows
from sojourn.engine.token.sampling.fused_sampler import FusedSampler

CPU = torch.device("cpu")


def random_params(chance: random.Random, **fixed) -> SamplingParams:
    controls = dict(
        temperature=chance.choice([0.0, 0.5, 1.0, 2.0]),
        top_k=chance.choice([0, 0, 1, 3, 7, 500]),
        top_p=chance.choice([1.0, 1.0, 0.31, 0.9]),
        min_p=chance.choice([0.0, 0.0, 0.1, 1.0]),
        top_n_sigma=chance.choice([0.0, 0.0, 0.3, 2.0]),
        seed=chance.randrange(-(2**63), 2**63),
    )
    return SamplingParams(max_tokens=9, **(controls | fixed))


def random_rows(count: int, vocab_size: int, seed: int, **fixed) -> tuple[list[Row], torch.Tensor]:
    """Every third row has whole logits, of which many are equal, and every fifth none that a softmax tells apart."""
    chance = random.Random(seed)
    rows = [
        Row(str(index), random_params(chance, **fixed), [chance.randrange(vocab_size) for _ in range(9)], 4)
        for index in range(count)
    ]
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    logits[::3] = logits[::3].round()
    logits[::5] = logits[::5] * 1e-6
    return rows, logits


def torch_ids(rows: list[Row], logits: torch.Tensor, masks: torch.Tensor | None = None) -> list[int]:
    sampler = Sampler(logits.shape[1], CPU)
    return sampler.sample(logits, sampler.prepare(rows), masks).tolist()


def fused_ids(rows: list[Row], logits: torch.Tensor, masks: torch.Tensor | None = None) -> list[int]:
    sampler = Sampler(logits.shape[1], DEVICE, fused=True)
    logits, masks = logits.to(DEVICE), masks.to(DEVICE) if masks is not None else None
    return sampler.sample(logits, sampler.prepare(rows), masks).tolist()


@pytest.fixture
def small(monkeypatch):
    """Chunks of 32 logits, and room for 8 of them, so that small vocabularies have several and many rows overflow."""
    monkeypatch.setattr(sampling.draw_rows, "__kwdefaults__", {"chunk": 32, "capacity": 8})


ALONE = {
    "temperature": [{"temperature": t} for t in (0.4, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 5.0)],
    "min-p": [{"min_p": p, "temperature": t} for p in (0.05, 0.2) for t in (0.3, 1.0, 2.5, 4.0)],
    "top-n-sigma": [{"top_n_sigma": n, "temperature": t} for n in (0.5, 1.0, 1.5, 2.0) for t in (1.0, 4.0)],
    "top-p": [{"top_p": p, "temperature": t} for p in (0.3, 0.9) for t in (1.0, 3.0)],
    "top-k": [{"top_k": k, "temperature": 3.0} for k in (2, 3, 30)],
}


@pytest.mark.parametrize("name", ["top-p", *further("temperature", "min-p", "top-n-sigma", "top-k")])
def test_a_control_alone_keeps_what_the_reference_keeps(small, name):
    rows, logits = random_rows(len(ALONE[name]), 70, seed=7)
    for row, controls in zip(rows, ALONE[name], strict=True):
        row.sampling = SamplingParams(max_tokens=9, seed=row.sampling.seed, **controls)
    assert fused_ids(rows, logits) == torch_ids(rows, logits)


@pytest.mark.parametrize(("count", "vocab_size"), [(2, 1), (10, 10)])
def test_ids_are_those_of_the_reference(small, count, vocab_size):
    rows, logits = random_rows(count, vocab_size, seed=vocab_size)
    assert fused_ids(rows, logits) == torch_ids(rows, logits)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [4, 1024])
def test_ids_are_those_of_the_reference_in_many_rows(monkeypatch, seed, capacity):
    monkeypatch.setattr(sampling.draw_rows, "__kwdefaults__", {"chunk": 16, "capacity": capacity})
    rows, logits = random_rows(25, 34 + seed, seed)
    assert fused_ids(rows, logits) == torch_ids(rows, logits)


@pytest.mark.gpu
@pytest.mark.parametrize("controls", [{}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.9, "top_k": 0}])
def test_ids_of_a_large_vocabulary_on_a_device(controls):
    rows, logits = random_rows(128, 151_936, seed=5, **controls)
    expected, drawn = torch_ids(rows, logits), fused_ids(rows, logits)
    # Weights are float32 there and float64 here: a target within 1e-7 of an edge may fall on its other side.
    assert sum(a != b for a, b in zip(expected, drawn, strict=True)) <= 1


def test_equal_logits_are_cut_at_exactly_k_and_the_lower_indices_stay(small):
    logits = torch.zeros(8, 32)
    logits[:, 1] = -0.0
    controls = [{"top_k": 3}] * 5 + [{"top_p": 0.05}] * 3  # 1.6 of 32 are two
    rows = [Row(str(i), SamplingParams(max_tokens=1, seed=i, **alone), [0], 1) for i, alone in enumerate(controls)]
    drawn = fused_ids(rows, logits)
    assert drawn == torch_ids(rows, logits)
    assert set(drawn[:5]) == {0, 1, 2} and set(drawn[5:]) == {0, 1}


def test_tokens_that_top_p_is_sure_to_cut_count_in_what_it_is_a_share_of(small):
    logits = torch.tensor([0.0] * 4 + [-3.0] * 28).repeat(3, 1)  # a quarter of 5.4 is more than one, of 4 it is one
    rows = [Row(str(seed), SamplingParams(max_tokens=1, top_p=0.25, seed=seed), [0], 1) for seed in range(5, 8)]
    drawn = fused_ids(rows, logits)
    assert drawn == torch_ids(rows, logits) and set(drawn) == {0, 1}


def test_greedy_takes_the_lowest_index_of_equal_logits(small):
    logits = torch.zeros(2, 40)
    logits[0, [17, 33]] = 2.0
    rows = [Row(str(index), SamplingParams(max_tokens=1, temperature=0.0), [0], 1) for index in range(2)]
    assert fused_ids(rows, logits) == [17, 0] == logits.argmax(-1).tolist()


EDITS = [
    {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": -0.5},
    {"logit_bias": {3: 4.0, 5: -100.0}, "top_k": 3},
    {"allowed_token_ids": [1, 4, 6], "bad_words": [[4], [2, 6]], "frequency_penalty": 1.5, "top_p": 0.9},
    {"lz_penalty": 0.6, "min_tokens": 9, "stop_token_ids": [0, 2], "min_p": 0.1},
    {"allowed_token_ids": [1], "bad_words": [[1]]},  # nothing is left
    {"temperature": 1.0},
]


def test_edited_rows_draw_what_the_reference_draws(small):
    rows, logits = random_rows(12, 34, seed=3)
    for index, row in enumerate(rows):
        kept = {"temperature": row.sampling.temperature, "seed": row.sampling.seed}
        row.sampling = SamplingParams(max_tokens=9, **(kept | EDITS[index % len(EDITS)]))
    constrained = [1, 4, 8]
    for index in constrained:
        params = rows[index].sampling
        rows[index].sampling = replace_params(params, grammar=Grammar("regex", "a"))
    masks = torch.tensor([[0b1010110, 1], [0, 0], [-1, 3]], dtype=torch.int32)
    expected = torch_ids(rows, logits, masks)
    assert fused_ids(rows, logits, masks) == expected
    assert expected[4] == NOTHING


def test_penalties_are_those_of_the_definition():
    rows, logits = random_rows(2, 34, seed=1)
    for row, penalties in zip(rows, ((1.7, 0.4, -0.5), (0.6, -1.0, 0.8)), strict=True):
        repetition, frequency, presence = penalties
        row.sampling = SamplingParams(
            max_tokens=9, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
        )
        row.token_ids = [0, 1, 2, 3, 4, 2, 2, 9, 4]
    sampler = Sampler(34, DEVICE, fused=True)
    edits = sampler.prepare(rows).edits
    edited = edit_rows(logits.to(DEVICE), edits, *sampler.history.tables, sampler.biases.values, None)
    for row, before, after in zip(rows, logits, edited, strict=True):
        expected = penalised(before.tolist(), row.sampling, row.token_ids[:4], row.token_ids[4:])
        torch.testing.assert_close(after.cpu(), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def replace_params(params: SamplingParams, **changes) -> SamplingParams:
    return SamplingParams(**({name: getattr(params, name) for name in params.__struct_fields__} | changes))


def test_penalties_follow_the_draws(small):
    """Several steps of two penalised requests behind a plain one; one leaves, and its row goes to another."""
    controls = dict(max_tokens=9, temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.9, presence_penalty=0.3)
    samplers = [Sampler(12, CPU), Sampler(12, DEVICE, fused=True)]
    plain = Row("plain", SamplingParams(max_tokens=9, temperature=0.0), [0], 1)
    rows = [plain, Row("a", SamplingParams(**controls), [2, 3], 2), Row("b", SamplingParams(**controls), [1], 1)]
    for step in range(5):
        logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(step))
        drawn = [s.sample(logits.to(s.device), s.prepare(rows)).tolist() for s in samplers]
        assert drawn[0] == drawn[1]
        for row, token in zip(rows, drawn[0], strict=True):
            row.token_ids = [*row.token_ids, token]
        if step == 2:
            for sampler in samplers:
                sampler.forget("b")
            rows[2] = replace(rows[2], id="c", token_ids=[5])


def test_padding_rows_draw_nothing_and_a_row_draws_the_same_in_any_company(small):
    rows, logits = random_rows(6, 40, seed=11)
    logits = logits.to(DEVICE)
    draws = Sampler(50, DEVICE, fused=True, max_rows=2).fused
    table = [draws.enter(row.sampling) for row in rows]  # grows
    places = torch.tensor([table[0], -1, *table[1:], -1], device=DEVICE)
    positions = torch.full((8,), 9, device=DEVICE)
    spread = torch.stack([logits[0], logits[0], *logits[1:], logits[0]])
    together = draws.draw_rows(spread, places, positions).tolist()
    assert together[1] == together[7] == NOTHING
    alone = [draws.draw_rows(logits[i : i + 1], places.new_tensor([table[i]]), positions[:1]).item() for i in range(6)]
    assert [together[0], *together[2:7]] == alone


def test_a_row_of_a_request_that_left_is_the_next_ones(small):
    draws: FusedSampler = Sampler(8, DEVICE, fused=True).fused
    first = draws.enter(SamplingParams(max_tokens=1, top_k=5))
    draws.leave(first)
    assert draws.enter(SamplingParams(max_tokens=1, temperature=0.0)) == first
    logits = torch.arange(8.0, device=DEVICE)[None]
    assert draws.draw_rows(logits, torch.tensor([first], device=DEVICE), torch.tensor([3], device=DEVICE)).item() == 7


def test_logits_that_are_no_numbers_are_overflowed_and_single_ones_give_some_id(small):
    rows, logits = random_rows(6, 20, seed=2)
    logits[:2] = torch.nan
    logits[2:4, 10] = torch.inf
    logits[4:, 0] = torch.nan
    ids = fused_ids(rows, logits)
    assert ids[:2] == [OVERFLOWED] * 2
    assert all(-1 <= token < 20 for token in ids[2:])


def test_logits_of_16_bits_draw_what_their_float32_draws_and_the_ids_are_remembered(small):
    """Also rows that keep more aside than there is room for, and padding, which nobody owns."""
    rows, logits = random_rows(12, 60, seed=5)
    sampler = FusedSampler(DEVICE, TokenHistory(60, DEVICE), RowTable(60, torch.float32, DEVICE), 12)
    table = torch.tensor([sampler.enter(row.sampling) for row in rows] + [-1], dtype=torch.int32, device=DEVICE)
    narrow = torch.cat((logits, logits[:1])).bfloat16()
    narrow[3] = torch.nan
    positions = torch.arange(13, dtype=torch.int32, device=DEVICE)
    owners = torch.tensor([11 - i for i in range(12)] + [-1], dtype=torch.int32, device=DEVICE)
    last_ids = torch.full((13,), 77, dtype=torch.int32, device=DEVICE)
    ids = sampler.draw_rows(narrow, table, positions, (owners, last_ids))
    assert torch.equal(ids, sampler.draw_rows(narrow.float(), table, positions))
    assert ids[3] == OVERFLOWED and ids[12] == NOTHING
    assert last_ids[:12].flip(0).tolist() == ids[:12].clamp(min=0).tolist() and last_ids[12] == 77


@pytest.mark.slow
@pytest.mark.parametrize(
    "controls",
    [{}, {"top_k": 5, "top_p": 0.6, "temperature": 2.0}, {"min_p": 0.2}, {"top_n_sigma": 1.0, "top_p": 0.8}],
    ids=str,
)
def test_draws_follow_the_exact_distribution(small, controls):
    logits = [2.0, 1.0, 0.5, 0.0, -1.0, -0.6, -3.0, 1.5, 1.2, -0.4]
    rows = [Row(str(s), SamplingParams(max_tokens=9, seed=s, **controls), [1], 1) for s in range(200)]
    counts = torch.bincount(torch.tensor(fused_ids(rows, torch.tensor(logits).repeat(200, 1))), minlength=10).tolist()
    assert_sampled_from(counts, distribution(logits, rows[0].sampling, [1], []))


def test_the_uniform_number_is_the_samplers(small):
    """Of equal logits it alone says which is drawn: as many as there are tokens, to the last of 256."""
    chance = random.Random(4)
    rows = [
        Row(str(i), SamplingParams(max_tokens=1, seed=chance.randrange(-(2**63), 2**63)), [0] * (1 + i * i), 1)
        for i in range(8)
    ]
    drawn = fused_ids(rows, torch.zeros(8, 256))
    assert drawn == [int(uniform(row.sampling.seed, len(row.token_ids)) * 256) for row in rows]


@pytest.mark.gpu
def test_a_graph_draws_for_whoever_its_buffers_name():
    rows, logits = random_rows(16, 5000, seed=1)
    sampler = Sampler(5000, DEVICE, fused=True, max_rows=32)
    inputs = sampler.prepare(rows).fused
    rows = torch.tensor(inputs.table_rows, device=DEVICE)
    buffers = [logits.to(DEVICE), rows.clone(), torch.tensor(inputs.positions, device=DEVICE)]
    expected = sampler.fused.draw_rows(*buffers)
    buffers[1].fill_(-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = sampler.fused.draw_rows(*buffers)
    graph.replay()
    assert (ids == NOTHING).all()
    buffers[1].copy_(rows)
    graph.replay()
    assert torch.equal(ids, expected)


def compilations() -> list[Compilation]:
    numbers = {"vocab_size": "i32:16", "logits_stride": "i32:16", "num_chunks": "i32"}
    rows = {
        "logits_pointer": "*fp32:16", "edited_pointer": "*fp32:16", "edited_rows_pointer": "*i32:16",
        "rows_pointer": "*i32:16",
    }  # fmt: skip
    parts = {
        "maxima_pointer": "*fp32:16", "best_pointer": "*i32:16", "masses_pointer": "*fp64:16",
        "moments_pointer": "*fp64:16",
    }  # fmt: skip
    pointers = {"selected_pointer": "*fp32:16", "index_pointer": "*i32:16", "ids_pointer": "*i64:16"}
    found = []
    for edited in (False, True):
        constants = {"EDITED": edited, "CHUNK": sampling.CHUNK}
        found.append(
            Compilation(
                "sojourn.engine.compute.triton.sampling:chunk_kernel",
                rows | {"parameters_pointer": "*i64:16"} | parts | numbers, constants,
            )
        )  # fmt: skip
        found.append(
            Compilation(
                "sojourn.engine.compute.triton.sampling:draw_kernel",
                rows | {"positions_pointer": "*i32", "parameters_pointer": "*i64:16"} | parts | pointers | numbers,
                constants | {"CHUNKS": 128, "CAPACITY": sampling.CAPACITY}, num_warps=8,
            )
        )  # fmt: skip
        tables = {f"{name}_pointer": "*i64:16" for name in ("rows", "history_rows", "bias_rows", "mask_rows")}
        found.append(
            Compilation(
                "sojourn.engine.compute.triton.edits:edit_kernel",
                {"logits_pointer": "*fp32:16"} | tables | {
                    "penalties_pointer": "*fp32:16", "prompts_pointer": "*u8:16", "counts_pointer": "*fp32:16",
                    "biases_pointer": "*fp32:16", "masks_pointer": "*i32:16", "out_pointer": "*fp32:16",
                    "logits_stride": "i32:16", "vocab_size": "i32:16", "num_words": "i32",
                },
                {"MASKED": edited, "BLOCK": 2048},
            )
        )  # fmt: skip
    return found


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spills():
    assert_no_spills(compilations())
