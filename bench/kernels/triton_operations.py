"""The Triton kernels beside attention on a CUDA device, beside its measured bandwidth and matrix rate.

    python -m bench.kernels.triton_operations

`measure` gives the rows to `sojourn dev bench kernels`. Calls are replayed in a CUDA graph; each reads other inputs, of
MOST_SETS sets at most: large ones pass the device's own cache, small ones stay in it, as they do between the kernels of
a step. The bytes are those that a kernel cannot do without: every input once, every result once, of a table only the
rows that are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from bench.kernels.triton_attention import seconds_of
from bench.results import BenchError, Row
from sojourn.engine.compute.kv_cache import KVLayout, allocate
from sojourn.engine.compute.kv_formats import KV_FP8
from sojourn.engine.compute.operations import reference as ops
from sojourn.engine.compute.operations.backend import HeadSpec, Rope
from sojourn.engine.compute.operations.triton_backend import TritonOperations
from sojourn.engine.compute.triton.step_inputs import StepRows, step_inputs
from sojourn.engine.sampling import SamplingParams
from sojourn.engine.token.sampling.sampler import Sampler
from sojourn.metrics.compute.roofline import Ceilings, device_name, load_ceilings
from sojourn.metrics.errors import CalibrationError

OPERATIONS = TritonOperations()
BLOCK_SIZE = 16  # tokens of a block of the KV cache
ROTATED_BYTES = 256 << 20  # of inputs: more than the device's own cache
MOST_SETS = 12  # of inputs: as many calls as one graph holds
VOCABULARY = 151_936


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel on inputs of one shape. `make` gives a call with inputs of its own."""

    kernel: str
    shape: str
    moved_bytes: int
    make: Callable[[], Callable[[], object]]
    flops: int = 0


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def norm_call(rows: int, size: int) -> Callable[[], object]:
    x, residual, weight = bfloat16(rows, size), bfloat16(rows, size), bfloat16(size)
    return lambda: OPERATIONS.add_norm(ops.rms_norm, x, residual, weight, 1e-6)


def gate_call(rows: int, size: int) -> Callable[[], object]:
    both = bfloat16(rows, 2 * size)
    return lambda: OPERATIONS.gate(ops.silu_gate, both)


def heads_call(tokens: int, heads: int, kv_heads: int, dim: int, eight_bit: bool) -> Callable[[], object]:
    qkv, norms = bfloat16(tokens, (heads + 2 * kv_heads) * dim), (bfloat16(dim), bfloat16(dim))
    dtype, blocks = KV_FP8 if eight_bit else torch.bfloat16, -(-2 * tokens // BLOCK_SIZE)
    layout = KVLayout(2, kv_heads, dim)
    cache = allocate(layout, 1, blocks, BLOCK_SIZE, dtype, torch.device("cuda")).layers()[0]
    rope = Rope(bfloat16(4096, 1, dim), bfloat16(4096, 1, dim), torch.randint(0, 4096, (tokens,), device="cuda"))
    slots, spec = torch.randperm(2 * tokens, device="cuda")[:tokens], HeadSpec(heads, kv_heads, dim, 1e-6, *norms)
    return lambda: OPERATIONS.write_heads(qkv, spec, rope, slots, cache)


def step_call(sequences: int) -> Callable[[], object]:
    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1000, shape, dtype=torch.int32, device="cuda")

    rows = torch.arange(sequences, dtype=torch.int32, device="cuda")
    starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
    step = StepRows(rows, starts, integers(sequences), integers(sequences), integers(sequences, 128), rows)
    return lambda: step_inputs(step, 16)


@dataclass(frozen=True, slots=True)
class Drawer:
    """A request as the sampler knows it."""

    id: str
    sampling: SamplingParams
    token_ids: tuple[int, ...] = (1, 2, 3)
    prompt_tokens: int = 1


def draw_call(rows: int, spread: float, controls: dict[str, float]) -> Callable[[], object]:
    """`spread` is the standard deviation of the logits: the larger, the fewer tokens there are to speak of."""
    sampler = Sampler(VOCABULARY, torch.device("cuda"), fused=True, max_rows=rows)
    drawers = [Drawer(str(row), SamplingParams(max_tokens=1, seed=row, **controls)) for row in range(rows)]
    inputs = sampler.prepare(drawers).fused
    logits = spread * torch.randn(rows, VOCABULARY, device="cuda")
    table_rows, positions = torch.tensor([inputs.table_rows, inputs.positions], device="cuda").unbind(0)
    return lambda: sampler.fused.draw_rows(logits, table_rows, positions)


def mixture_call(tokens: int, chosen: int, experts: int, hidden: int, intermediate: int) -> Callable[[], object]:
    x, weights = bfloat16(tokens, hidden), torch.rand(tokens, chosen, device="cuda")
    picked = torch.rand(tokens, experts, device="cuda").topk(chosen, dim=-1).indices
    gate_up, down = bfloat16(experts, 2 * intermediate, hidden), bfloat16(experts, hidden, intermediate)
    return lambda: OPERATIONS.mixture(x, weights, picked, gate_up, down)


def cases() -> list[Case]:
    found = []
    for rows, size in ((256, 1024), (256, 5120), (8192, 1024), (8192, 5120)):
        found.append(Case("add and norm", f"{rows} x {size}", 8 * rows * size, partial(norm_call, rows, size)))
    for rows, size in ((256, 3072), (256, 17408), (8192, 3072), (8192, 17408)):
        found.append(Case("SiLU gate", f"{rows} x {size}", 6 * rows * size, partial(gate_call, rows, size)))
    for tokens in (1, 64, 256, 8192):
        for eight_bit in (False, True):
            num_bytes = 2 * 8 * (132 if eight_bit else 256)
            moved = tokens * (2 * (16 + 16) * 128 + 2 * 16 * 128 + num_bytes)
            shape = f"{tokens} x 16/8 heads of 128{', 8 bits' if eight_bit else ''}"
            found.append(Case("heads", shape, moved, partial(heads_call, tokens, 16, 8, 128, eight_bit)))
    found.append(Case("step inputs", "256 decodes", 256 * 56, partial(step_call, 256)))
    draws = {
        "greedy": (3.0, {"temperature": 0.0}),
        "temperature": (3.0, {"temperature": 0.6}),
        "top-k 20, top-p 0.95": (3.0, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        "top-p 0.9, peaked": (6.0, {"top_p": 0.9}),
        "top-p 0.9, flat": (0.5, {"top_p": 0.9}),
        "min-p 0.05": (3.0, {"min_p": 0.05}),
    }
    for name, (spread, controls) in draws.items():
        for rows in (1, 64, 256):
            moved = 4 * rows * VOCABULARY
            found.append(Case(f"draw, {name}", f"{rows} rows", moved, partial(draw_call, rows, spread, controls)))
    for tokens in (1, 64, 4096):
        # Of 128 experts, those that a random choice of 8 a token leaves out are not read.
        used = 128 * (1 - (1 - 8 / 128) ** tokens)
        moved = round(used * 3 * 768 * 2048 * 2) + tokens * (2 * 2048 * 2 + 8 * 768 * 4)
        flops = tokens * 8 * 6 * 768 * 2048
        shape = f"{tokens} tokens, 8 of 128 experts of 768"
        found.append(Case("mixture", shape, moved, partial(mixture_call, tokens, 8, 128, 2048, 768), flops))
    return found


@torch.inference_mode()
def measure() -> list[Row]:
    """Raises BenchError where no device is."""
    if not torch.cuda.is_available():
        raise BenchError("the Triton kernels are measured on a CUDA device, and torch finds none")
    try:
        ceilings = load_ceilings(device_name(torch.cuda.get_device_name()))
    except CalibrationError:
        ceilings = None  # `sojourn calibrate device` stores them
    torch.manual_seed(0)
    return [_row(case, ceilings) for case in cases()]


def _row(case: Case, ceilings: Ceilings | None) -> Row:
    calls = [case.make() for _ in range(min(MOST_SETS, max(2, ROTATED_BYTES // case.moved_bytes)))]
    seconds = seconds_of(lambda turn: calls[turn % len(calls)]())
    percent = None
    if ceilings is not None:
        percent = float(100 * ceilings.roofline_ns(case.flops, case.moved_bytes, "bfloat16") / 1e9 / seconds)
    return Row(case.kernel, case.shape, seconds * 1e6, case.moved_bytes / 1e9 / seconds, "GB/s", percent)


def main() -> None:
    table = Table("kernel", "case", "µs", "GB/s", "% of limit")
    for row in measure():
        percent = "" if row.percent_of_limit is None else f"{row.percent_of_limit:.0f}"
        table.add_row(row.kernel, row.case, f"{row.microseconds:.1f}", f"{row.achieved:.0f}", percent)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
