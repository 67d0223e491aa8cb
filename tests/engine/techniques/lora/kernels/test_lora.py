"""What adds the deltas of adapters, on every device, against one product after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.compute.cpp.extension import library
from sojourn.engine.techniques.lora.kernels.backend import AdaptedLinear, AdapterParts, LoraPart, tiles_of
from sojourn.engine.techniques.lora.kernels.cpp_backend import CppLora
from sojourn.engine.techniques.lora.kernels.torch_backend import TorchLora
from tests.engine.compute.triton_harness import DEVICE, Compilation, assert_no_spills

SIZES = (AdaptedLinear(40, 100, (0, 64, 82)), AdaptedLinear(33, 70, (0,)))
SLOTS = 3


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adapter(seed: int, rank: int, dtype: torch.dtype = torch.float32) -> AdapterParts:
    """Of the first linear layer some parts, of the second one all; ranks differ by part."""
    found: AdapterParts = {}
    for index, size in enumerate(SIZES):
        ends = (*size.begins[1:], size.out_features)
        for place, (begin, end) in enumerate(zip(size.begins, ends, strict=True)):
            if (seed + place) % 3 or index:
                own = max(1, rank - place)
                a = randn(seed + place, own, size.in_features, dtype=dtype)
                b = randn(seed + 7, end - begin, own, dtype=dtype)
                found.setdefault(index, []).append(LoraPart(begin, a, b, 0.5 + place))
    return found


def filled(backend, adapters: list[AdapterParts]):
    for slot, parts in enumerate(adapters):
        backend.install(slot, backend.pack(parts))
    return backend


def added(backend, index: int, sequences: list[tuple[int, int]], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    slots, counts = zip(*sequences, strict=True)
    backend.begin(tiles_of(slots, counts, backend.tile_tokens))
    return backend.add(index, x, y.clone())


MIXES = st.lists(st.tuples(st.integers(-1, SLOTS - 1), st.integers(1, 40)), min_size=1, max_size=6)


@pytest.mark.compiler
@given(MIXES, st.sampled_from([1, 4, 16, 64, 256]), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 1))
@settings(max_examples=30)
def test_cpp_gives_what_torch_does_for_any_mix_of_ranks_and_sequences(sequences, rank, dtype, index):
    adapters = [adapter(seed, max(1, rank - seed), dtype) for seed in range(SLOTS)]
    reference = filled(TorchLora(SLOTS, torch.float32, torch.device("cpu")), adapters)
    cpp = filled(CppLora(library(), SLOTS, [(s.in_features, s.out_features) for s in SIZES]), adapters)
    count = sum(count for _, count in sequences)
    x, y = randn(1, count, SIZES[index].in_features), randn(2, count, SIZES[index].out_features)
    expected = added(reference, index, sequences, x, y)
    torch.testing.assert_close(added(cpp, index, sequences, x, y), expected, rtol=1e-4, atol=2e-4 * rank)


@pytest.mark.compiler
@given(MIXES)
@settings(max_examples=15)
def test_cpp_gives_a_token_the_same_bits_alone_and_in_any_company(sequences):
    cpp = filled(
        CppLora(library(), SLOTS, [(s.in_features, s.out_features) for s in SIZES]),
        [adapter(seed, 9) for seed in range(SLOTS)],
    )
    count = sum(count for _, count in sequences)
    x, y = randn(1, count, 40), randn(2, count, 100)
    together = added(cpp, 0, sequences, x, y)
    token = 0
    for slot, length in sequences:
        for _ in range(length):
            row = slice(token, token + 1)
            assert torch.equal(added(cpp, 0, [(slot, 1)], x[row], y[row]), together[row])
            token += 1


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 50)), max_size=8), st.integers(1, 20))
def test_tiles_hold_every_token_of_a_sequence_with_a_slot_once(sequences, most):
    tiles = tiles_of([slot for slot, _ in sequences], [count for _, count in sequences], most)
    by_token = {token: tile.slot for tile in tiles for token in range(tile.begin, tile.begin + tile.count)}
    flat = [slot for slot, count in sequences for _ in range(count)]
    assert by_token == {token: slot for token, slot in enumerate(flat) if slot >= 0}
    assert sum(tile.count for tile in tiles) == len(by_token) and all(0 < tile.count <= most for tile in tiles)


def test_triton_gives_what_torch_does():
    pytest.importorskip("triton")
    from sojourn.engine.techniques.lora.kernels.triton_backend import TritonLora

    adapters = [adapter(seed, rank) for seed, rank in enumerate((3, 17, 1))]
    reference = filled(TorchLora(SLOTS, torch.float32, DEVICE), adapters)
    triton = filled(TritonLora(SLOTS, 17, SIZES, torch.float32, DEVICE), adapters)
    sequences = [(0, 1), (-1, 2), (2, 1), (1, 20), (1, 3)]
    for index, size in enumerate(SIZES):
        x, y = (randn(seed, 27, width).to(DEVICE) for seed, width in ((1, size.in_features), (2, size.out_features)))
        expected = added(reference, index, sequences, x, y)
        torch.testing.assert_close(added(triton, index, sequences, x, y), expected, rtol=1e-4, atol=1e-3)
        for slots in ([1, -1, 0], [2, 2]):  # as a graph of four tokens replays them
            triton.set_decodes(slots, 4)
            triton.begin_decodes(4)
            decodes = [(slot, 1) for slot in (*slots, *[-1] * (4 - len(slots)))]
            expected = added(reference, index, decodes, x[:4], y[:4])
            torch.testing.assert_close(triton.add(index, x[:4], y[:4].clone()), expected, rtol=1e-4, atol=1e-3)


def test_an_evicted_adapter_leaves_nothing_in_its_slot():
    pytest.importorskip("triton")
    from sojourn.engine.techniques.lora.kernels.triton_backend import TritonLora

    triton = TritonLora(1, 16, SIZES, torch.float32, DEVICE)
    triton.install(0, triton.pack(adapter(1, 16)))
    triton.install(0, triton.pack({}))
    x, y = randn(1, 2, 40).to(DEVICE), randn(2, 2, 100).to(DEVICE)
    assert torch.equal(added(triton, 0, [(0, 2)], x, y), y)


@pytest.mark.compiler
def test_the_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    assert_no_spills(compilations(256, 64))


def compilations(rank: int, rows: int) -> list[Compilation]:
    """What TritonLora would have compiled, in bfloat16."""
    module = "sojourn.engine.compute.triton.lora"
    shared = {"WIDTH": 3 * rank, "RANK": rank, "ROWS": rows, "RANK_BLOCK": min(32, rank)}
    shrink = dict.fromkeys(("x_pointer", "a_pointer"), "*bf16:16") | dict.fromkeys(
        ("scales_pointer", "h_pointer"), "*fp32:16"
    )
    expand = {"h_pointer": "*fp32:16"} | dict.fromkeys(("b_pointer", "y_pointer"), "*bf16:16")
    tiles, sizes = {"tiles_pointer": "*i32:16"}, ("x_stride", "in_features")
    return [
        Compilation(f"{module}:shrink_kernel", shrink | tiles | dict.fromkeys(sizes, "i32:16"), shared | {"DEPTH": 64}),
        Compilation(
            f"{module}:expand_kernel",
            expand | tiles | {"blocks_pointer": "*i32:16", "y_stride": "i32:16", "out_features": "i32:16"},
            shared | {"COLUMNS": 64},
            num_stages=2,
        ),
    ]
