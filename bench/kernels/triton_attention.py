"""The Triton attention kernels on a CUDA device, beside its measured bandwidth and matrix rate.

    python -m bench.kernels.triton_attention            # the tiles that a server takes
    python -m bench.kernels.triton_attention --sweep    # others beside them, best first; some minutes

`measure` gives the first to `sojourn dev bench kernels`. A layer is timed as a decode step replays it, in a CUDA graph,
the plan of the step not counted; every call reads another cache, over shuffled blocks.
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from triton.runtime.errors import OutOfResources

from bench.results import BenchError, Row
from sojourn.engine.compute.attention.backend import AttentionSpec
from sojourn.engine.compute.attention.triton_backend import TritonAttention
from sojourn.engine.compute.kv_cache import KVLayout, LayerCache, allocate, bytes_per_token
from sojourn.engine.compute.kv_formats import KV_FP8, SCALE_BYTES
from sojourn.engine.compute.triton.attention_tiles import Shape, Tiles, long_tiles, short_tiles
from sojourn.metrics.compute.roofline import Ceilings, device_name, load_ceilings
from sojourn.metrics.errors import CalibrationError
from tests.engine.compute.attention_inputs import attention_inputs

BLOCK_SIZE = 16
ROTATED_BYTES = 256 << 20  # of caches: more than the device's own cache
CALLS, REPLAYS = 12, 15


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of like sequences before one layer."""

    name: str
    past: int
    new: int
    sequences: int
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None  # latent
    eight_bit: bool = False

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.head_dim**-0.5, self.value_dim or self.head_dim)

    @property
    def flops(self) -> int:
        pairs = self.new * self.past + self.new * (self.new + 1) // 2
        return 2 * self.sequences * pairs * self.num_heads * (self.head_dim + self.spec.value_dim)

    @property
    def moved_bytes(self) -> int:
        """Every key and value once, queries and results."""
        planes = 1 if self.value_dim else 2
        vector = self.head_dim + SCALE_BYTES if self.eight_bit else 2 * self.head_dim
        cache_bytes = (self.past + self.new) * self.num_kv_heads * planes * vector
        return self.sequences * (cache_bytes + 2 * self.new * self.num_heads * (self.head_dim + self.spec.value_dim))

    @property
    def shape(self) -> Shape:
        group, kv_bytes = self.num_heads // self.num_kv_heads, 1 if self.eight_bit else 2
        return Shape(group, self.head_dim, self.spec.value_dim, 2, kv_bytes)

    @property
    def is_short(self) -> bool:
        return self.new <= 8


DECODE = Case("0.6B heads, decode", 2047, 1, 64)
PROMPT = Case("0.6B heads, prompt", 0, 8192, 1)
CASES = (
    DECODE,
    replace(DECODE, past=1023, sequences=256),
    replace(DECODE, sequences=8),
    replace(DECODE, sequences=1),
    replace(DECODE, past=65_535, sequences=1),
    replace(DECODE, name="0.6B heads, 8 bits", eight_bit=True),
    replace(DECODE, name="0.6B heads, verification", new=4, past=2044),
    replace(DECODE, name="14B heads, decode", num_heads=40),
    Case("latent, decode", 2047, 1, 64, num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512),
    PROMPT,
    replace(PROMPT, new=2048, sequences=4),
    replace(PROMPT, name="0.6B heads, chunk", past=32_256, new=512),
    replace(PROMPT, name="0.6B heads, 8 bits", eight_bit=True),
    replace(PROMPT, name="14B heads, prompt", num_heads=40),
)


def build(case: Case, device: torch.device, backend: TritonAttention) -> Callable[[int], torch.Tensor]:
    """One layer's attention, of another cache at every turn; the step is planned."""
    width = -(-(case.past + case.new) // BLOCK_SIZE)
    blocks = list(range(width * case.sequences))
    random.Random(0).shuffle(blocks)
    tables = torch.tensor(blocks, device=device).view(case.sequences, width)
    lens = [case.new] * case.sequences, [case.past + case.new] * case.sequences
    inputs = attention_inputs(*lens, torch.zeros(1, device=device), tables, BLOCK_SIZE)
    layout = KVLayout(1 if case.value_dim else 2, case.num_kv_heads, case.head_dim)
    num_bytes = bytes_per_token(layout, 1, torch.bfloat16) * len(blocks) * BLOCK_SIZE // (2 if case.eight_bit else 1)
    caches = [_cache(layout, len(blocks), case.eight_bit, device) for _ in range(max(2, ROTATED_BYTES // num_bytes))]
    query = torch.randn(case.sequences * case.new, case.num_heads, case.head_dim, device=device).bfloat16()
    backend.begin(inputs)
    backend.attend(query, caches[0], case.spec)
    return lambda turn: backend.attend(query, caches[turn % len(caches)], case.spec)


def _cache(layout: KVLayout, num_blocks: int, eight_bit: bool, device: torch.device) -> LayerCache:
    dtype = KV_FP8 if eight_bit else torch.bfloat16
    cache = allocate(layout, 1, num_blocks, BLOCK_SIZE, dtype, device).layers()[0]
    cache.values.copy_((50 if eight_bit else 1) * torch.randn(cache.values.shape, device=device))
    if eight_bit:
        cache.scales.uniform_(0, 0.02)
    return cache


def seconds_of(call: Callable[[int], torch.Tensor]) -> float:
    """Median over replays of a graph of CALLS calls."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(CALLS):
            call(turn)
    durations = []
    for _ in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        durations.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(durations[2:])


@torch.inference_mode()
def measure() -> list[Row]:
    """Every case with the tiles that a server takes. Raises BenchError where no device is."""
    device, ceilings = _device()
    rows = []
    for case in CASES:
        seconds = seconds_of(build(case, device, TritonAttention(device)))
        rows.append(_row(case, f"{case.sequences} x {case.past + case.new} tokens", seconds, ceilings))
    return rows


def _row(case: Case, text: str, seconds: float, ceilings: Ceilings | None) -> Row:
    limit = None if ceilings is None else ceilings.roofline_ns(case.flops, case.moved_bytes, "bfloat16") / 1e9
    rate, unit = (case.moved_bytes / 1e9, "GB/s") if case.is_short else (case.flops / 1e12, "TFLOP/s")
    percent = None if limit is None else float(100 * limit / seconds)
    return Row(f"attention, {case.name}", text, seconds * 1e6, rate / seconds, unit, percent)


def candidates(case: Case) -> Iterator[Tiles]:
    """The tiles of a server first, then others."""
    if case.is_short:
        chosen = short_tiles(case.shape, case.new)
        yield chosen
        for keys, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4)):
            yield replace(chosen, block_n=keys, num_warps=warps, num_stages=stages)
        for resident, waves in itertools.product((1, 2, 4), (1, 2, 4, 8)):
            yield replace(chosen, resident=resident, waves=waves)
        return
    chosen = long_tiles(case.shape)
    yield chosen
    for rows, keys, warps in ((128, 128, 8), (128, 64, 8), (128, 64, 4), (128, 32, 4), (64, 64, 4), (64, 128, 4)):
        for stages in (2, 3, 4):
            yield replace(chosen, block_m=rows, block_n=keys, num_warps=warps, num_stages=stages)
    yield replace(chosen, two_loops=False)
    for waves, slack in ((1, 1), (1, 2), (2, 2), (4, 5)):
        yield replace(chosen, waves=waves, slack=slack)


@torch.inference_mode()
def sweep(cases: tuple[Case, ...]) -> Iterator[tuple[Case, list[tuple[Tiles, Row]]]]:
    """Of each case, what its candidates take, best first. Those that do not fit the device are left out."""
    device, ceilings = _device()
    for case in cases:
        found = []
        for tiles in dict.fromkeys(candidates(case)):
            try:
                seconds = seconds_of(build(case, device, TritonAttention(device, short=tiles, long=tiles)))
            except OutOfResources:
                continue
            found.append((tiles, _row(case, f"{case.sequences} x {case.past + case.new} tokens", seconds, ceilings)))
        yield case, sorted(found, key=lambda pair: pair[1].microseconds)


def _device() -> tuple[torch.device, Ceilings | None]:
    if not torch.cuda.is_available():
        raise BenchError("the Triton kernels are measured on a CUDA device, and torch finds none")
    try:
        return torch.device("cuda"), load_ceilings(device_name(torch.cuda.get_device_name()))
    except CalibrationError:
        return torch.device("cuda"), None  # `sojourn calibrate device` stores them


def _print(title: str, rows: list[tuple[str, Row]]) -> None:
    table = Table("kernel", "case", "µs", "rate", "", "% of limit", title=title)
    for text, row in rows:
        percent = "" if row.percent_of_limit is None else f"{row.percent_of_limit:.0f}"
        table.add_row(row.kernel, text, f"{row.microseconds:.1f}", f"{row.achieved:.1f}", row.unit, percent)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="other tiles, for decodes and prompts, in 16 and 8 bits")
    if not parser.parse_args().sweep:
        _print("attention", [(row.case, row) for row in measure()])
        return
    swept = tuple(case for case in CASES if case in (DECODE, PROMPT) or case.eight_bit)
    for case, found in sweep(swept):
        _print(f"{case.name}: the server takes {next(candidates(case))}", [(str(t), row) for t, row in found[:10]])


if __name__ == "__main__":
    main()
