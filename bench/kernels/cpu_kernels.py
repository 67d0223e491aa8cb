"""Attention and the small operations of a layer on a CPU: ours and torch's, in turns.

    python -m bench.kernels.cpu_kernels

prints them; `measure` gives them to `sojourn dev bench kernels`. Every call reads another cache, of more memory than
the processor's caches hold, and a decode's blocks are shuffled.
"""

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from bench.results import BenchError, Row
from sojourn.engine.compute.attention.backend import AttentionInputs, AttentionSpec
from sojourn.engine.compute.attention.cpp_backend import CppAttention
from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.cpp.extension import Library, library, unavailable
from sojourn.engine.compute.kv_cache import KVLayout, LayerCache, allocate
from sojourn.engine.compute.operations import reference as ops
from sojourn.engine.compute.operations.backend import HeadSpec, Operations, Rope
from sojourn.engine.compute.operations.cpp_backend import CppOperations
from sojourn.metrics.compute.roofline import load_ceilings
from sojourn.metrics.errors import CalibrationError
from tests.engine.compute.attention_inputs import attention_inputs

ROTATED_BYTES = 96 << 20
REPEATS = 15
BLOCK_SIZE = 16
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int


SHAPES = (Shape("small", 8, 4, 64, 512, 1536), Shape("0.6b", 16, 8, 128, 1024, 3072))
DECODES = ((1, 256), (8, 256), (32, 256), (8, 1024), (1, 4096))  # sequences and context of each
PROMPTS = ((0, 128), (0, 512), (1536, 512), (0, 2048))  # past and new tokens
BATCHES = (1, 8, 32, 512)  # tokens of the small operations


def in_turns(calls: dict[str, Callable[[int], None]], repeats: int = REPEATS) -> dict[str, float]:
    """Median seconds of each call; what slows the machine for a while slows all of them."""
    durations: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            begin = time.perf_counter()
            call(turn)
            if turn >= 2:
                durations[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in durations.items()}


def make_inputs(past: int, new: int, sequences: int) -> tuple[AttentionInputs, int]:
    """Alike sequences over shuffled blocks, and how many slots these are."""
    width = -(-(past + new) // BLOCK_SIZE)
    blocks = list(range(width * sequences))
    random.Random(0).shuffle(blocks)
    tables = torch.tensor(blocks).view(sequences, width)
    slots = torch.zeros(sequences * new, dtype=torch.int64)
    inputs = attention_inputs([new] * sequences, [past + new] * sequences, slots, tables, BLOCK_SIZE)
    return inputs, len(blocks) * BLOCK_SIZE


def layer_cache(shape: Shape, num_slots: int) -> LayerCache:
    layout = KVLayout(2, shape.num_kv_heads, shape.head_dim)
    cache = allocate(layout, 1, num_slots // BLOCK_SIZE, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache.values.normal_()
    return cache.layers()[0]


def attention_times(shape: Shape, past: int, new: int, sequences: int) -> tuple[dict[str, float], float, float]:
    """Seconds of a layer by backend, and its FLOPs and bytes."""
    inputs, num_slots = make_inputs(past, new, sequences)
    size = (2, num_slots, shape.num_kv_heads, shape.head_dim)
    caches = [layer_cache(shape, num_slots) for _ in range(max(2, ROTATED_BYTES // (4 * math.prod(size))))]
    query = torch.randn(sequences * new, shape.num_heads, shape.head_dim)
    spec = AttentionSpec(shape.head_dim**-0.5, shape.head_dim)
    backends = {"ours": CppAttention(_kernels()), "torch": TorchAttention()}
    for backend in backends.values():
        backend.begin(inputs)
    calls = {
        name: lambda turn, backend=backend: backend.attend(query, caches[turn % len(caches)], spec)
        for name, backend in backends.items()
    }
    pairs = sequences * (new * past + new * (new + 1) // 2)
    moved = 4 * (math.prod(size) * (past + new) * sequences / num_slots + 2 * query.numel())
    return in_turns(calls), 4 * pairs * shape.num_heads * shape.head_dim, moved


def operation_times(shape: Shape, rows: int) -> dict[str, tuple[dict[str, float], float]]:
    """Operation → seconds by implementation, and the bytes that it moves at least."""
    heads = HeadSpec(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        EPS,
        torch.randn(shape.head_dim),
        torch.randn(shape.head_dim),
    )
    angles = torch.randn(2, 4096, 1, shape.head_dim)
    x, residual = torch.randn(2, rows, shape.hidden_size)
    weight = torch.ones(shape.hidden_size)
    gate_up = torch.randn(rows, 2 * shape.intermediate_size)
    qkv = torch.randn(rows, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    slots = torch.randperm(4096)[:rows]
    cache = layer_cache(shape, 4096)
    positions = torch.randint(0, 4096, (rows,))

    def of(operations) -> dict[str, Callable[[int], None]]:
        rope = Rope(angles[0], angles[1], positions)
        return {
            "add and norm": lambda _: operations.add_norm(ops.rms_norm, x, residual, weight, EPS),
            "gate": lambda _: operations.gate(ops.silu_gate, gate_up),
            "heads": lambda _: operations.write_heads(qkv, heads, rope, slots, cache),
        }

    ours, torchs = of(CppOperations(_kernels())), of(Operations())
    moved = {"add and norm": 16 * x.numel(), "gate": 6 * gate_up.numel(), "heads": 8 * qkv.numel()}
    return {name: (in_turns({"ours": ours[name], "torch": torchs[name]}), moved[name]) for name in ours}


@torch.inference_mode()
def measure() -> list[Row]:
    """Raises BenchError where the kernels cannot be built."""
    try:
        ceilings = load_ceilings()
    except CalibrationError:
        ceilings = None
    rows = []
    for shape in SHAPES:
        for sequences, context in DECODES:
            seconds, flops, moved = attention_times(shape, context - 1, 1, sequences)
            limit = ceilings and ceilings.roofline_ns(flops, moved, "float32")
            case = f"{shape.name}, {sequences} x {context} tokens"
            rows += _rows("decode attention", case, seconds, moved, "GB/s", limit)
        for past, new in PROMPTS:
            seconds, flops, moved = attention_times(shape, past, new, 1)
            limit = ceilings and ceilings.roofline_ns(flops, moved, "float32")
            case = f"{shape.name}, {new} tokens behind {past}"
            rows += _rows("prompt attention", case, seconds, flops, "GFLOP/s", limit)
        for count in BATCHES:  # what they touch comes from a product and goes into one: caches hold it
            for name, (seconds, moved) in operation_times(shape, count).items():
                rows += _rows(name, f"{shape.name}, {count} tokens", seconds, moved, "GB/s", None)
    return rows


def _kernels() -> Library:
    if (kernels := library()) is None:
        raise BenchError(f"there are no C++ kernels to measure: {unavailable()}")
    return kernels


def _rows(
    kernel: str, case: str, seconds: dict[str, float], work: float, unit: str, limit_ns: float | None
) -> list[Row]:
    return [
        Row(f"{kernel}, {name}", case, took * 1e6, work / took / 1e9, unit, limit_ns and limit_ns / took / 1e7)
        for name, took in seconds.items()
    ]


def main() -> None:
    table = Table("kernel", "case", "µs", "rate", "", "% of limit")
    for row in measure():
        percent = "" if row.percent_of_limit is None else f"{row.percent_of_limit:.0f}"
        table.add_row(row.kernel, row.case, f"{row.microseconds:.1f}", f"{row.achieved:.1f}", row.unit, percent)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
