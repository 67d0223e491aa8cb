"""Products with quantised weights on a CUDA device: their error against the dequantised weights, and their time.

`python -m bench.gpu.smoke` calls it; each kind of matrix is one part of its report.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sojourn.engine.compute.quantisation.devices import device_kernels
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.compute.quantisation.rounding import round_to_nearest

SHAPE = (6144, 4096)  # outputs and inputs
ROWS = (1, 8, 32, 256)
REPEATS = 20
FP8 = torch.float8_e4m3fn
MOST_ERROR = {None: 0.01, "int8": 0.03, "fp8": 0.06}  # relative, by what activations are rounded to


def _four_bits(weight: torch.Tensor) -> QuantisedMatrix:
    return round_to_nearest(weight, 128)


def _int8(weight: torch.Tensor) -> QuantisedMatrix:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return QuantisedMatrix(codes, scales, None, weight.shape[1], 8, activations="int8")


def _fp8(weight: torch.Tensor) -> QuantisedMatrix:
    scales = weight.abs().amax(1, keepdim=True) / 448
    return QuantisedMatrix((weight / scales).to(FP8), scales, None, weight.shape[1], 8, activations="fp8")


def _fp8_blocks(weight: torch.Tensor) -> QuantisedMatrix:
    scales = weight.unflatten(1, (-1, 128)).abs().amax(2) / 448
    return QuantisedMatrix((weight / scales.repeat_interleave(128, 1)).to(FP8), scales, None, 128, 8)


KINDS: dict[str, Callable[[torch.Tensor], QuantisedMatrix]] = {
    "W4A16, groups of 128": _four_bits, "W8A8 int8": _int8, "W8A8 fp8": _fp8, "W8A16 fp8, blocks": _fp8_blocks,
}  # fmt: skip


def product(kind: str) -> dict[str, Any]:
    """Of one kind: by rows, the relative error and the microseconds, beside those of the dequantised weight. Raises
    AssertionError where the error is too large."""
    device = torch.device("cuda")
    matrix = KINDS[kind](torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02)
    kernel = device_kernels(device, torch.bfloat16).fitting(matrix)
    if kernel is None:
        return {"kernel": None}
    method = kernel.make(matrix, None)
    plain = method.dequantised().to(device, torch.bfloat16)
    found: dict[str, Any] = {"kernel": kernel.name, "bytes": method.nbytes}
    for rows in ROWS:
        x = torch.randn(rows, SHAPE[1], device=device, dtype=torch.bfloat16)
        exact = F.linear(x, plain).float()
        error = ((method.apply(x).float() - exact).norm() / exact.norm()).item()
        assert error < MOST_ERROR[matrix.activations], f"{kind}, {rows} rows: relative error {error:.3f}"
        graph = torch.cuda.CUDAGraph()  # a wait for the host within would fail here
        with torch.cuda.graph(graph):
            method.apply(x)
        found[str(rows)] = {
            "error": round(error, 5), "us": _microseconds(graph.replay),
            "dequantised_us": _microseconds(lambda x=x: F.linear(x, plain)),
        }  # fmt: skip
    return found


def _microseconds(work: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()
    begin.record()
    for _ in range(REPEATS):
        work()
    end.record()
    torch.cuda.synchronize()
    return round(1e3 * begin.elapsed_time(end) / REPEATS, 2)
