"""The Triton attention kernels give what the torch reference gives, whatever the batch is made of."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from tests.engine.compute.triton_harness import DEVICE

pytest.importorskip("triton")

from sojourn.engine.compute.attention.backend import AttentionInputs, AttentionSpec
from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.attention.triton_backend import TritonAttention
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.kv_formats import KV_FP8, KV_INT4, KV_INT8, QUANTISED, dequantise, quantise
from sojourn.engine.compute.operations.triton_backend import TritonOperations
from sojourn.engine.compute.triton.attention_tiles import Tiles
from sojourn.engine.token.models.mpt import alibi_slopes
from sojourn.engine.token.models.registry import load_model
from tests.engine.compute.attention_inputs import attention_inputs, by_head
from tests.engine.compute.test_attention import hide_unseen_blocks
from tests.engine.harness import drain, generate, hand_over, make_engine, submit
from tests.engine.token.sampling.test_logprobs import random_prompts
from tests.further import further

SMALL = Tiles(16, 16, 4, 2, resident=1, waves=1, least_tiles=1, slack=1)
UNCUT = replace(SMALL, least_tiles=1 << 20)
# Past and new tokens, decodes first: a first token, the edge of a tile, a prompt, a chunk, a verification of four.
MIXED = ((0, 1), (15, 1), (37, 1), (0, 9), (18, 11), (20, 4))


@dataclass(frozen=True)
class Case:
    """A batch over shuffled blocks, and how a layer attends to it."""

    items: tuple[tuple[int, int], ...] = MIXED
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int | None = None  # latent: fewer than head_dim
    window: int | None = None
    sloped: bool = False
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    kept_as: torch.dtype | None = None  # quantised keys and values
    soft_cap: float | None = None
    sinks: bool = False
    sink_tokens: int = 0

    @property
    def spec(self) -> AttentionSpec:
        slopes = tuple(alibi_slopes(self.heads)) if self.sloped else None
        sinks = torch.linspace(-3, 6, self.heads, device=DEVICE) if self.sinks else None
        value_dim = self.value_dim or self.head_dim
        return AttentionSpec(
            self.head_dim**-0.5, value_dim, self.window, slopes, self.soft_cap, sinks, self.sink_tokens
        )

    def build(self) -> tuple[AttentionInputs, torch.Tensor, LayerCache]:
        """Where the tokens live, the queries, and a cache with NaN in all slots that hold no token of a sequence, and
        in all blocks that no query sees."""
        dice, size = random.Random(0), self.block_size
        torch.manual_seed(0)
        contexts = [past + new for past, new in self.items]
        counts = [-(-context // size) for context in contexts]
        ids = list(range(sum(counts) + 3))
        dice.shuffle(ids)
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        width = max(counts)
        owned = [
            table[p // size] * size + p % size
            for table, context in zip(tables, contexts, strict=True)
            for p in range(context)
        ]
        num_slots, planes = (sum(counts) + 3) * size, 1 if self.value_dim else 2
        cache = torch.full((planes, num_slots, self.kv_heads, self.head_dim), float("nan"), device=DEVICE)
        cache[:, owned] = torch.randn(planes, len(owned), self.kv_heads, self.head_dim, device=DEVICE)
        query = torch.randn(sum(new for _, new in self.items), self.heads, self.head_dim, device=DEVICE)
        inputs = attention_inputs(
            [new for _, new in self.items],
            contexts,
            torch.zeros(len(query), dtype=torch.int64, device=DEVICE),
            torch.tensor([table + (table or [0])[:1] * (width - len(table)) for table in tables], device=DEVICE),
            size,
        )
        if self.window is not None:
            cache = hide_unseen_blocks(cache, self.items, tables, self.spec, size)
        cache = cache.to(self.dtype)
        parts = (cache,) if self.kept_as is None else quantise(cache, self.kept_as)
        held = LayerCache(*(by_head(part.view(torch.uint8), size).view(part.dtype) if part.itemsize == 1
                            else by_head(part, size) for part in parts))  # fmt: skip
        return inputs, query.to(self.dtype), held


def reference(case: Case, inputs: AttentionInputs, query: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """TorchAttention's, in float32."""
    values = cache.values if cache.scales is None else dequantise(cache.values, cache.scales, torch.float32)
    backend = TorchAttention()
    backend.begin(inputs)
    return backend.attend(query.float(), LayerCache(values.float().nan_to_num()), case.spec)


def attend(
    case: Case,
    inputs: AttentionInputs,
    query: torch.Tensor,
    cache: LayerCache,
    tiles: Tiles | None = SMALL,
    num_multiprocessors: int = 8,
) -> torch.Tensor:
    backend = TritonAttention(DEVICE, num_multiprocessors=num_multiprocessors, short=tiles, long=tiles)
    backend.begin(inputs)
    return backend.attend(query, cache, case.spec)


def check(case: Case, tiles: Tiles | None = SMALL, num_multiprocessors: int = 8) -> None:
    built = case.build()
    # In 16 bits the shares are rounded before they are multiplied with the values, and the result is rounded.
    error = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[case.dtype]
    if case.kept_as in (KV_FP8, KV_INT8):
        error = max(error, 2e-3)  # queries and shares in float16
    got = attend(case, *built, tiles, num_multiprocessors)
    torch.testing.assert_close(got.float(), reference(case, *built), rtol=error, atol=error)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), *further((2, 2), (4, 1), (8, 1), (3, 1))])
def test_a_mixed_batch_with_grouped_queries_equals_the_reference(heads, kv_heads):
    check(Case(heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("head_dim", [80, *further(64, 128, 256)])
def test_every_size_of_head_equals_the_reference(head_dim):
    check(Case(((18, 1), (5, 10)), head_dim=head_dim))


@pytest.mark.parametrize(("value_dim", "rope_dim"), [(24, 8), *further((32, 8), (16, 0))])
def test_values_that_are_the_first_part_of_the_keys(value_dim, rope_dim):
    check(Case(heads=3, head_dim=value_dim + rope_dim, value_dim=value_dim))


@pytest.mark.parametrize("window", [5, *further(1, 16, 100)])
def test_a_sliding_window_equals_the_reference(window):
    check(Case(window=window))


@pytest.mark.parametrize(("window", "sink_tokens"), [(5, 2), (3, 20), *further((16, 4), (1, 1), (12, 17), (100, 4))])
def test_sink_tokens_beside_a_window_equal_the_reference(window, sink_tokens):
    check(Case(window=window, sink_tokens=sink_tokens))
    check(Case(((90, 1), (70, 9)), window=window, sink_tokens=sink_tokens), replace(SMALL, two_loops=True))


@pytest.mark.parametrize("window", [7, *further(None)])
def test_slopes_equal_the_reference(window):
    check(Case(heads=3, sloped=True, window=window))


@pytest.mark.parametrize("two_loops", [False, *further(True)])
def test_soft_caps_and_sink_logits_equal_the_reference(two_loops):
    check(Case(heads=4, kv_heads=2, soft_cap=0.7, sinks=True), replace(SMALL, two_loops=two_loops))


def test_segments_share_one_sink():
    check(Case(((90, 1), (3, 1), (60, 12)), heads=2, sinks=True, window=50))


@pytest.mark.parametrize("block_size", [24, *further(1, 16, 64)])
def test_blocks_smaller_and_larger_than_a_tile_or_no_part_of_it(block_size):
    check(Case(block_size=block_size))


# The interpreter multiplies no bfloat16; those of 8 bits are multiplied in float16.
@pytest.mark.parametrize(
    ("dtype", "kept_as"),
    [
        (torch.float16, KV_FP8),
        (torch.float16, KV_INT8),
        (torch.float32, KV_INT4),
        *further((torch.float16, None), (torch.bfloat16, KV_FP8), (torch.bfloat16, KV_INT8), (torch.float16, KV_INT4)),
    ],
)
def test_narrow_numbers_equal_the_reference_within_their_rounding(dtype, kept_as):
    check(Case(dtype=dtype, kept_as=kept_as))


@pytest.mark.parametrize("head_dim", [80, *further(64, 96)])
def test_int4_vectors_of_any_size_equal_the_reference(head_dim):
    check(Case(((18, 1), (5, 10)), head_dim=head_dim, kept_as=KV_INT4, window=12))
    check(Case(((98, 1),), head_dim=head_dim, kept_as=KV_INT4))  # in parts


@pytest.mark.parametrize("kept_as", [KV_FP8, KV_INT8])
def test_latent_attention_in_eight_bits_equals_the_reference(kept_as):
    check(Case(head_dim=40, value_dim=32, dtype=torch.float16, kept_as=kept_as))


def test_tiles_without_masks_equal_the_reference():
    check(Case(((0, 40), (30, 17))), replace(SMALL, two_loops=True))


def test_segments_change_a_result_by_rounding_alone():
    case = Case(((90, 1), (3, 1), (60, 12)))
    built = case.build()
    whole, cut = (attend(case, *built, tiles) for tiles in (UNCUT, SMALL))
    torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-6)
    assert not torch.equal(cut, whole), "nothing was cut"


def test_a_padded_row_reads_nothing_and_gives_zeros():
    case = Case(((20, 1), (3, 1), (-1, 1), (-1, 1)))
    inputs, query, cache = case.build()
    inputs.block_tables[2:] = 1 << 30  # of no cache
    got = attend(case, inputs, query, cache)
    real = Case(case.items[:2])
    torch.testing.assert_close(got[:2], reference(real, *restricted(inputs, query, 2), cache), rtol=1e-5, atol=1e-5)
    assert torch.equal(got[2:], torch.zeros_like(got[2:]))


def restricted(inputs: AttentionInputs, query: torch.Tensor, count: int) -> tuple[AttentionInputs, torch.Tensor]:
    """The first sequences of a batch alone."""
    lens = inputs.query_lens[:count]
    tables = inputs.block_tables[:count]
    alone = attention_inputs(lens, inputs.context_lens[:count], inputs.slots, tables, inputs.block_size)
    return alone, query[: sum(lens)]


def test_a_launch_serves_lengths_that_the_host_does_not_know():
    """As a captured graph is replayed: the host saw the shape of the batch, the device holds other contexts."""
    case = Case(((90, 1), (3, 1), (60, 1)))
    inputs, query, cache = case.build()
    expected = attend(case, inputs, query, cache)
    blind = replace(inputs, context_lens=[1, 1, 1])
    assert torch.equal(attend(case, blind, query, cache), expected)


def test_every_step_is_planned_anew():
    case = Case(((90, 1), (3, 1), (60, 1)))
    inputs, query, cache = case.build()
    backend = TritonAttention(DEVICE, num_multiprocessors=8, short=SMALL, long=SMALL)
    alone, first = restricted(inputs, query, 1)
    for step, rows in ((alone, first), (inputs, query)):
        backend.begin(step)
        got = backend.attend(rows, cache, case.spec)
        assert torch.equal(got, backend.attend(rows, cache, case.spec))
        torch.testing.assert_close(got, reference(case, step, rows, cache), rtol=1e-5, atol=1e-5)


def test_a_result_does_not_depend_on_company_that_leaves_its_segments_as_they_are():
    items = ((37, 1), (20, 1), (50, 1))
    case = Case(items)
    inputs, query, cache = case.build()
    together = attend(case, inputs, query, cache, UNCUT)
    alone = attend(case, *restricted(inputs, query, 1), cache, UNCUT)
    assert torch.equal(together[:1], alone)


def test_queries_may_be_a_view_of_a_wider_row():
    case = Case()
    inputs, query, cache = case.build()
    wide = torch.randn(len(query), case.heads + 5, case.head_dim, device=DEVICE)
    wide[:, 2 : 2 + case.heads] = query
    assert torch.equal(attend(case, inputs, wide[:, 2 : 2 + case.heads], cache), attend(case, inputs, query, cache))


def test_a_number_that_is_none_spoils_its_own_sequence_alone():
    case = Case(((20, 1), (37, 1)))
    inputs, query, cache = case.build()
    clean = attend(case, inputs, query, cache)
    cache.values[0, int(inputs.block_tables[0, 0]), 0] = float("nan")
    spoilt = attend(case, inputs, query, cache)
    assert spoilt[0].isnan().all() and torch.equal(spoilt[1], clean[1])


@pytest.mark.parametrize("num_multiprocessors", [1, 64])
def test_segments_are_put_together_by_whichever_program_ends_last(num_multiprocessors):
    """Many segments of few rows, and few of many: the counters are 0 again behind each launch."""
    case = Case(((200, 1), (3, 1), (90, 12)), heads=4, kv_heads=2)
    built = case.build()
    backend = TritonAttention(DEVICE, num_multiprocessors=num_multiprocessors, short=SMALL, long=SMALL)
    for _ in range(2):
        backend.begin(built[0])
        got = backend.attend(built[1], built[2], case.spec)
        torch.testing.assert_close(got, reference(case, *built), rtol=1e-5, atol=1e-5)
        assert not any(room.arrivals.any() for room in backend._rooms.values())


def slow(*families: str) -> list:
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", *slow("deepseek-v2-lite", "mpt", "qwen3-windows", "gemma", "llama")])
def test_an_engine_with_these_kernels_gives_the_tokens_of_the_reference(family, checkpoints):
    prompts = random_prompts((9, 20))
    reference_only = {"device": DEVICE.type, "graphs": "off", "attention_backend": "torch", "fused_operations": "off"}
    expected, _ = generate(checkpoints[family], prompts, 3, **reference_only)
    engine, published = make_engine(checkpoints[family], **reference_only)
    engine.runner.eager.attention = TritonAttention(DEVICE, num_multiprocessors=4, short=SMALL, long=SMALL)
    hand_over(engine, [submit(f"r{i}", prompt, 3) for i, prompt in enumerate(prompts)])
    drain(engine)
    assert [published.tokens[f"r{i}"] for i in range(len(prompts))] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"), [("qwen3", "fp8"), ("qwen3", "int8"), ("qwen3", "int4"), ("deepseek-v2-lite", "fp8")]
)
def test_a_quantised_cache_is_written_and_read_as_by_the_reference(family, name, checkpoints):
    """Queries and shares in float16 are all that differs: a fraction of what the format costs."""
    settings = {"device": DEVICE.type, "graphs": "off", "attention_backend": "torch", "fused_operations": "off"}
    prompts, told = random_prompts((20, 9)), []
    for narrow, fused in (({}, False), ({"kv_cache_dtype": name}, False), ({"kv_cache_dtype": name}, True)):
        engine, published = make_engine(checkpoints[family], **settings, **narrow)
        eager = engine.runner.eager
        eager.model = load_model(checkpoints[family], torch.float32, DEVICE, None)  # as on a GPU: not packed
        if fused:
            eager.attention = TritonAttention(DEVICE, num_multiprocessors=4, short=SMALL, long=SMALL)
            eager.operations = TritonOperations()
        hand_over(engine, [submit(f"r{i}", prompt, 1, prompt_logprobs=0) for i, prompt in enumerate(prompts)])
        drain(engine)
        told.append(torch.tensor([one.logprob for i in range(2) for one in published.prompt_logprobs[f"r{i}"]]))
    exact, reference, ours = told
    assert (ours - reference).abs().mean() < (0.3 if name == "int8" else 0.1) * (reference - exact).abs().mean()


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("head_dim", [24, 64, 96, 128])
@pytest.mark.parametrize("tiles", [SMALL, replace(SMALL, block_m=32, block_n=32, two_loops=True, slack=2)])
def test_the_matrix_equals_the_reference(group, window, head_dim, tiles):
    check(Case(heads=group * 2, kv_heads=2, window=window, head_dim=head_dim), tiles)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kept_as", [None, KV_FP8])
def test_latent_attention_at_its_real_size_equals_the_reference(dtype, kept_as):
    items = ((70, 1), (5, 1), (20, 9))
    check(Case(items, heads=16, kv_heads=1, head_dim=576, value_dim=512, dtype=dtype, kept_as=kept_as), None)


DECODES = tuple((past, 1) for past in (2047, 2046, 100, 4000) * 16)
PROMPTS = ((0, 8192), (4096, 700), (0, 33))
USUAL = Case(DECODES, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16, block_size=16)
LATENT = replace(USUAL, items=(*DECODES[:9], (0, 700)), heads=128, kv_heads=1, head_dim=576, value_dim=512)
REAL = [
    USUAL,
    replace(USUAL, items=DECODES[:3]),
    replace(USUAL, items=((131_000, 1),)),
    replace(USUAL, items=tuple((past, 4) for past, _ in DECODES), heads=32, kv_heads=4),
    replace(USUAL, items=PROMPTS),
    replace(USUAL, items=((30_000, 512),)),
    replace(USUAL, items=DECODES + PROMPTS[:2], heads=8, kv_heads=1, head_dim=256),
    replace(USUAL, items=DECODES + PROMPTS[:2], heads=14, kv_heads=2, head_dim=64, window=1000),
    replace(USUAL, items=DECODES + PROMPTS[:2], heads=8, kv_heads=4, head_dim=256, window=4096, soft_cap=50.0),
    replace(USUAL, items=DECODES + PROMPTS[:2], heads=64, kv_heads=8, head_dim=64, window=128, sinks=True),
    replace(USUAL, items=DECODES + PROMPTS[:2], heads=12, kv_heads=12, head_dim=80, sloped=True),
    LATENT,
    *(replace(USUAL, items=DECODES + PROMPTS[:2], kept_as=kept_as) for kept_as in QUANTISED.values()),
    replace(LATENT, kept_as=KV_FP8),
    replace(LATENT, kept_as=KV_INT8),
    replace(USUAL, items=DECODES + PROMPTS[:1], dtype=torch.float16),
    replace(USUAL, items=DECODES[:5] + PROMPTS[1:], dtype=torch.float32),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL)
def test_real_sizes_on_the_device_equal_the_reference(case):
    built = case.build()
    got, expected = attend(case, *built, None, None).float(), reference(case, *built)
    assert ((got - expected).norm() / expected.norm()).item() < 6e-3
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths():
    case = replace(USUAL, items=DECODES[:16])
    inputs, query, cache = case.build()
    backend = TritonAttention(DEVICE)
    backend.reserve(64, 64)
    backend.begin(inputs)
    expected = backend.attend(query, cache, case.spec)
    lengths = inputs.contexts.clone()
    inputs.contexts.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.begin(inputs)
        output = backend.attend(query, cache, case.spec)
    inputs.contexts.copy_(lengths)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
