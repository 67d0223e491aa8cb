"""The C++ kernels compute what the torch reference computes, and where they cannot be built it takes their place."""

import math
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.compute.attention.backend import AttentionInputs, AttentionSpec
from sojourn.engine.compute.attention.cpp_backend import CppAttention
from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.backends import make_attention, make_operations
from sojourn.engine.compute.cpp import extension
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.logits import argmax
from sojourn.engine.compute.operations import reference as ops
from sojourn.engine.compute.operations.backend import HeadSpec, Operations, Rope
from sojourn.engine.compute.operations.cpp_backend import CppOperations
from sojourn.engine.token.models.mpt import alibi_slopes
from sojourn.metrics.errors import ModelError
from tests.engine.compute.attention_inputs import attention_inputs, by_head
from tests.engine.compute.test_attention import hide_unseen_blocks
from tests.engine.harness import generate

TOLERANCE = 4e-6  # float32 sums in another order, of values around 1: 2.4e-6 was the worst seen
EPS = 1e-6
CPU = torch.device("cpu")

Items = list[tuple[int, int]]  # past and new tokens of each sequence
SHORT: Items = [(0, 1), (3, 1), (15, 1), (16, 1), (100, 1), (0, 2), (0, 9), (4, 5), (95, 3), (40, 70)]
LONG: Items = [(511, 1), (512, 1), (1500, 1), (508, 9), (1100, 40)]  # around the parts of a context, and above them
REFERENCE = Operations()


@pytest.fixture
def operations(library) -> CppOperations:
    return CppOperations(library)


@pytest.fixture
def threads():
    """Sets torch's threads, and puts them back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_step(items: Items, block_size: int, seed: int = 0) -> tuple[AttentionInputs, int]:
    """A step over shuffled blocks, and how many slots there are. Some blocks belong to nobody."""
    counts = [-(-(past + new) // block_size) for past, new in items]
    ids = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(ids)
    num_slots = len(ids) * block_size
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    padded = [table + table[:1] * (max(counts) - len(table)) for table in tables]
    num_tokens = sum(new for _, new in items)
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    query_lens, contexts = [new for _, new in items], [past + new for past, new in items]
    return attention_inputs(query_lens, contexts, slots, torch.tensor(padded), block_size), num_slots


def attend(backend, inputs: AttentionInputs, query, cache, spec: AttentionSpec) -> torch.Tensor:
    backend.begin(inputs)
    return backend.attend(query, LayerCache(by_head(cache, inputs.block_size)), spec)


def check_attention(
    library,
    items: Items,
    heads,
    kv_heads,
    dim,
    value_dim,
    block_size,
    window,
    alibi,
    soft_cap=None,
    sinks=False,
    sink_tokens=0,
) -> None:
    inputs, num_slots = make_step(items, block_size)
    query = randn(len(inputs.slots), heads, dim)
    cache = randn(2 if value_dim == dim else 1, num_slots, kv_heads, dim, seed=1)
    slopes, sink_logits = alibi_slopes(heads) if alibi else None, torch.linspace(-4, 8, heads) if sinks else None
    spec = AttentionSpec(1 / math.sqrt(dim), value_dim, window, slopes, soft_cap, sink_logits, sink_tokens)
    cache = hide_unseen_blocks(cache, items, inputs.block_tables, spec, block_size)
    expected = attend(TorchAttention(), inputs, query.double(), cache.double(), spec)
    output = attend(CppAttention(library), inputs, query, cache, spec)
    torch.testing.assert_close(output.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "block_size", "window", "alibi"),
    [
        (4, 4, 16, 16, 16, None, False),
        (8, 4, 64, 64, 16, None, False),
        (6, 2, 80, 80, 5, None, False),
        (8, 2, 128, 128, 32, None, False),
        (5, 1, 64, 64, 16, None, False),
        (16, 2, 64, 64, 16, 50, False),
        (4, 2, 256, 256, 1, 7, False),
        (2, 2, 32, 32, 16, 20, False),
        (3, 3, 20, 20, 16, None, True),
        (8, 2, 64, 64, 16, 33, True),
        (16, 1, 72, 64, 16, None, False),
        (3, 1, 72, 60, 16, 1, False),
    ],
)
def test_attention_is_that_of_the_reference(library, heads, kv_heads, dim, value_dim, block_size, window, alibi):
    check_attention(library, SHORT, heads, kv_heads, dim, value_dim, block_size, window, alibi)


@pytest.mark.parametrize(("soft_cap", "sinks"), [(0.8, False), (None, True), (30.0, True)])
@pytest.mark.parametrize("items", [SHORT, LONG])
def test_soft_caps_and_sink_logits_are_those_of_the_reference(library, items, soft_cap, sinks):
    check_attention(library, items, 4, 2, 32, 32, 16, 700, False, soft_cap, sinks)
    check_attention(library, items, 6, 1, 32, 32, 16, None, True, soft_cap, sinks)


@pytest.mark.parametrize("window", [None, 900])
@pytest.mark.parametrize("alibi", [False, True])
def test_a_long_context_is_attended_to_in_parts(library, window, alibi):
    check_attention(library, LONG, 4, 2, 32, 32, 16, window, alibi)


@settings(max_examples=40, derandomize=True)
@given(
    items=st.lists(st.tuples(st.integers(0, 130), st.integers(1, 40)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.integers(1, 70),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 150),
    sink_tokens=st.just(0) | st.integers(0, 40),
    alibi=st.booleans(),
)
def test_attention_of_any_shape_is_that_of_the_reference(
    library, items, kv_heads, group, dim, block_size, window, sink_tokens, alibi
):
    items.sort(key=lambda item: item[1] > 1)  # single tokens come first
    heads = kv_heads * group
    check_attention(
        library, items, heads, kv_heads, dim, dim, block_size, window, alibi, sink_tokens=sink_tokens if window else 0
    )


@pytest.mark.parametrize(("window", "sink_tokens"), [(900, 4), (40, 700), (20, 4)])
@pytest.mark.parametrize("heads", [2, 12])
def test_a_long_context_with_sink_tokens_is_attended_to_in_parts(library, heads, window, sink_tokens):
    check_attention(library, LONG, heads, 2, 32, 32, 16, window, False, sink_tokens=sink_tokens)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 1)])
def test_a_sequence_has_the_same_bits_in_any_company_and_on_any_number_of_threads(library, threads, heads, kv_heads):
    items = SHORT + LONG
    inputs, num_slots = make_step(items, 16)
    query, cache = randn(len(inputs.slots), heads, 64), randn(2, num_slots, kv_heads, 64, seed=1)
    spec, backend = AttentionSpec(0.125, 64), CppAttention(library)
    threads(2)
    together = attend(backend, inputs, query, cache, spec).clone()
    threads(1)
    assert torch.equal(attend(backend, inputs, query, cache, spec), together)
    for index, (past, new) in enumerate(items):
        rows = slice(inputs.query_start[index], inputs.query_start[index + 1])
        table = inputs.block_tables[index : index + 1]
        alone = attention_inputs([new], [past + new], inputs.slots[rows], table, 16)
        assert torch.equal(attend(backend, alone, query[rows], cache, spec), together[rows]), (past, new)


def test_padding_rows_give_zeros_and_unused_slots_are_not_read(library):
    inputs, num_slots = make_step([(20, 1), (7, 1), (30, 4)], 16)
    query, cache = randn(len(inputs.slots), 4, 32), torch.full((2, num_slots, 2, 32), math.nan)
    for index, context in enumerate(inputs.context_lens):
        slots = [int(inputs.block_tables[index, p // 16]) * 16 + p % 16 for p in range(context)]
        cache[:, slots] = randn(2, context, 2, 32, seed=index)
    padded = replace(inputs, contexts=inputs.contexts.clone().index_fill_(0, torch.tensor([1]), 0))
    output = attend(CppAttention(library), padded, query, cache, AttentionSpec(0.2, 32))
    assert not output[1].any()
    assert output.isfinite().all() and output[0].any() and output[2:].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("past", "new"), [(200, 1), (200, 20), (1500, 1)])
@pytest.mark.parametrize("plane", [0, 1])
def test_what_is_no_number_shows(library, value, past, new, plane):
    inputs, num_slots = make_step([(past, new)], 16)
    query, cache = randn(new, 2, 16), randn(2, num_slots, 2, 16, seed=1)
    cache[plane, int(inputs.block_tables[0, 3]) * 16, 1, 5] = value
    query[:, 1, 5] = 1.0  # so that an infinite key is attended to, not left out
    output = attend(CppAttention(library), inputs, query, cache, AttentionSpec(0.25, 16))
    assert output[:, 0].isfinite().all()
    assert (~output[:, 1].isfinite()).any(-1).all()


def test_steps_of_like_size_reuse_their_room(library, operations):
    backend, spec = CppAttention(library), AttentionSpec(0.2, 16)
    inputs, num_slots = make_step([(5, 1), (8, 1)], 16)
    query, cache = randn(2, 2, 16), randn(2, num_slots, 2, 16)
    first = attend(backend, inputs, query, cache, spec)
    assert attend(backend, inputs, query, cache, spec).data_ptr() == first.data_ptr()
    gated = operations.gate(ops.silu_gate, randn(4, 32))
    assert operations.gate(ops.silu_gate, randn(3, 32)).data_ptr() == gated.data_ptr()


@pytest.mark.parametrize("kind", [ops.rms_norm, ops.gemma_rms_norm, ops.layer_norm])
@pytest.mark.parametrize(("rows", "size"), [(1, 512), (3, 7), (5, 1000), (600, 576)])
def test_norms_are_those_of_the_reference(operations, kind, rows, size):
    x, residual, weight = randn(rows, size), 3 * randn(rows, size, seed=1), randn(size, seed=2)
    expected, total = REFERENCE.add_norm(kind, x, residual, weight, EPS)
    torch.testing.assert_close(
        operations.norm(kind, x, weight, EPS), REFERENCE.norm(kind, x, weight, EPS), rtol=2e-6, atol=0
    )
    normed, added = operations.add_norm(kind, x, residual, weight, EPS)
    torch.testing.assert_close(normed, expected, rtol=2e-6, atol=1e-6)
    assert torch.equal(added, total)


@pytest.mark.parametrize("kind", [ops.silu_gate, ops.gelu_gate, ops.clamped_swish_gate])
@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (3, 7), (200, 1000)])
def test_gates_are_those_of_the_reference(operations, kind, rows, size):
    gate_up = torch.cat((randn(rows, size) * 20, randn(rows, size, seed=1)), dim=-1)
    gate_up[0, :4] = torch.tensor([0.0, 150.0, -150.0, 1e-30])
    expected = kind(gate_up.double())
    torch.testing.assert_close(operations.gate(kind, gate_up).double(), expected, rtol=1e-6, atol=1e-9)
    gate_up[0, 3] = math.nan
    assert operations.gate(kind, gate_up)[0, 3].isnan()


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("normed", [None, ops.rms_norm, ops.gemma_rms_norm])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 4, 64), (3, 3, 6), (4, 1, 80), (6, 2, 128)])
def test_heads_are_split_normed_rotated_and_written_as_by_the_reference(
    operations, heads, kv_heads, dim, normed, rotated
):
    num_tokens, num_slots = 37, 60
    qkv = randn(num_tokens, (heads + 2 * kv_heads) * dim)
    norms = (randn(dim, seed=1), randn(dim, seed=2), normed) if normed else ()
    spec = HeadSpec(heads, kv_heads, dim, EPS, *norms)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0))[:num_tokens]
    slots[[3, 36]] = -1
    rope = None
    if rotated:
        positions = torch.randint(0, 90, (num_tokens,), generator=torch.Generator().manual_seed(0))
        rope = Rope(randn(90, 1, dim, seed=3), randn(90, 1, dim, seed=4), positions)
    before = randn(2, num_slots, kv_heads, dim, seed=5)
    expected, written = before.clone().unflatten(1, (-1, 4)), by_head(before, 4)  # in both orders
    query = REFERENCE.write_heads(qkv, spec, rope, slots, LayerCache(expected))
    told = operations.write_heads(qkv, spec, rope, slots, LayerCache(written))
    torch.testing.assert_close(told, query, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(written, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("planes", [1, 2])
def test_rows_are_written_to_their_slots_and_padding_nowhere(operations, planes):
    key, value = randn(5, 2, 12), randn(5, 2, 12, seed=1)
    slots = torch.tensor([7, -1, 0, 3, -1])
    before = randn(planes, 9, 2, 12, seed=2)
    expected, written = before.clone().unflatten(1, (-1, 3)), by_head(before, 3)
    for backend, cache in ((REFERENCE, expected), (operations, written)):
        backend.write(key, value if planes == 2 else None, slots, LayerCache(cache))
    assert torch.equal(written, expected)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 63), (2, 320), (40, 8191)])
def test_the_largest_of_a_row_is_the_first_of_equals(library, rows, size):
    x = randn(rows, size).mul(3).round()  # many are equal
    assert torch.equal(argmax(x), x.argmax(-1))
    assert torch.equal(argmax(torch.full((rows, size), -math.inf)), torch.zeros(rows, dtype=torch.int64))
    x[:, -1] = 100.0
    assert (argmax(x) == size - 1).all()
    strided = x.repeat(1, 2)[:, :size]
    assert torch.equal(argmax(strided), x.argmax(-1))


def test_a_row_has_the_same_bits_in_any_batch(operations, threads):
    x, weight, gate_up = randn(700, 512), randn(512), randn(700, 1024)
    threads(2)
    normed, gated = operations.norm(ops.rms_norm, x, weight, EPS).clone(), operations.gate(ops.silu_gate, gate_up)
    for row in (0, 123, 699):
        assert torch.equal(operations.norm(ops.rms_norm, x[row : row + 1], weight, EPS)[0], normed[row])
        assert torch.equal(CppOperations.gate(operations, ops.silu_gate, gate_up)[row], gated[row])


def test_threads_are_those_of_torch(library, threads):
    openmp = library.handle.omp_get_max_threads
    for count in (1, 2):
        threads(count)
        assert openmp() == count


def test_the_reference_draws_the_same_tokens(library, checkpoints):
    prompts = [[5 + i * j % 300 for j in range(1, length)] for i, length in ((1, 3), (2, 17), (3, 60))]
    drawn = [
        generate(checkpoints["qwen3"], prompts, 12, attention_backend=backend, fused_operations=fused)[0]
        for backend, fused in (("cpp", "auto"), ("torch", "off"))
    ]
    assert drawn[0] == drawn[1]


@pytest.fixture
def afresh(monkeypatch, tmp_path):
    """An empty cache folder, and nothing known of an earlier build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    extension._outcome.cache_clear()
    yield monkeypatch
    extension._outcome.cache_clear()


def test_without_a_compiler_torch_takes_over_and_asking_for_cpp_is_refused(afresh, tmp_path):
    afresh.setenv("PATH", str(tmp_path))
    assert isinstance(make_attention("auto", CPU, torch.float32, torch.float32), TorchAttention)
    assert isinstance(make_operations("auto", CPU, torch.float32, torch.float32), Operations)
    with pytest.raises(ModelError, match=r"attention_backend=cpp .* no C\+\+ compiler was found .* install g\+\+"):
        make_attention("cpp", CPU, torch.float32, torch.float32)


def test_a_compiler_that_is_not_there_or_fails_is_named(afresh, tmp_path):
    afresh.setenv("CXX", "no-such-compiler")
    assert extension.library() is None
    assert extension.unavailable().startswith("CXX=no-such-compiler is not a program")
    failing = tmp_path / "failing"
    failing.write_text('#!/bin/sh\necho "x.cpp:1: error: out of luck" >&2\nexit 1\n')
    failing.chmod(0o755)
    afresh.setenv("CXX", str(failing))
    extension._outcome.cache_clear()
    assert extension.unavailable() == f"{failing} could not build the kernels: x.cpp:1: error: out of luck"
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_cpp_attention_is_for_float32_on_a_cpu(library):
    assert isinstance(make_attention("auto", CPU, torch.bfloat16, torch.bfloat16), TorchAttention)
    with pytest.raises(ModelError, match=r"computes in float32 on a CPU, not in torch\.bfloat16"):
        make_attention("cpp", CPU, torch.bfloat16, torch.bfloat16)


@pytest.fixture
def small_sources(library, tmp_path):
    """A folder with the smallest source, which builds at once."""
    folder = tmp_path / "sources"
    folder.mkdir()
    shutil.copy(extension.SOURCES / "threads.cpp", folder)
    return folder


def test_builders_at_the_same_time_do_not_disturb_each_other(small_sources, tmp_path):
    compiler = extension.find_compiler()
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: extension.load(compiler, tmp_path / "cache", small_sources), range(4)))
    assert len({library.path for library in built}) == 1
    assert [path.name for path in built[0].path.parent.iterdir()] == ["kernels.so"]


def test_a_truncated_library_is_built_again(small_sources, tmp_path):
    compiler = extension.find_compiler()
    path = extension.load(compiler, tmp_path / "cache", small_sources).path
    whole = path.read_bytes()
    path.unlink()  # it is mapped: what is written into it would change what runs
    path.write_bytes(whole[: len(whole) // 2])
    assert extension.load(compiler, tmp_path / "cache", small_sources).path == path
    assert path.stat().st_size == len(whole)


def test_another_source_or_header_gives_another_library(small_sources, tmp_path):
    compiler = extension.find_compiler()
    first = extension.load(compiler, tmp_path / "cache", small_sources).path
    (small_sources / "new.h").write_text("// nothing\n")
    assert extension.load(compiler, tmp_path / "cache", small_sources).path != first
