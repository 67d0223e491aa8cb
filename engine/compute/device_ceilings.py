"""Measures what a device can do at most: memory bandwidth, matrix products by precision and rows, launches, links.

Every product reads weights that no cache holds, as a decode step does: the weights rotate over more memory than the
caches have. The best of several batches of calls counts, because a ceiling is what the device can do undisturbed.
"""

import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial

import torch

from sojourn.engine.compute.cpp.extension import library
from sojourn.engine.compute.weight_formats import cpp_formats, has_bfloat16, torch_formats
from sojourn.engine.process import num_cores
from sojourn.metrics.compute.link import Link
from sojourn.metrics.compute.roofline import Ceilings, Gemm, device_name
from sojourn.metrics.errors import CalibrationError
from sojourn.metrics.machine.host import versions

CPU_ROWS = (1, 8, 32, 64, 128, 512, 2048)
CUDA_ROWS = (1, 8, 32, 64, 128, 512, 2048, 8192)
CPU_INNER, CUDA_INNER = 2048, 8192
ROTATED_BYTES = 256 << 20  # more than any cache
STREAM_BYTES = 512 << 20  # of one array that is read or copied
CELL_SECONDS = 0.25  # spent on one precision and number of rows, once warm

Product = Callable[[torch.Tensor], None]  # x [rows, inner] times the next weights
Links = Callable[[torch.device, int], list[Link]]  # of ranks that share so many threads


def calibrate(kind: str, threads: int | None = None, links: Links | None = None) -> Ceilings:
    """Measures a `cpu` (with `threads`, by default all of its cores) or `cuda` (`auto`: where there is one): some 30 s.
    `links` measures the exchanges between ranks.

    Raises CalibrationError where torch finds no CUDA device.
    """
    cuda = torch.cuda.is_available() and kind != "cpu"
    if kind == "cuda" and not cuda:
        raise CalibrationError("device cuda was asked for, but torch finds none; use --device cpu")
    device = torch.device("cuda" if cuda else "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or num_cores())
    try:
        with torch.inference_mode():
            read, copy = _bandwidths(device)
            inner = CUDA_INNER if cuda else CPU_INNER
            rates: dict[tuple[str, int], float] = {}
            for precision, dtype, product in _products(device, inner):
                for rows in CUDA_ROWS if cuda else CPU_ROWS:
                    rate = _product_rate(device, product, dtype, rows, inner)
                    rates[precision, rows] = max(rate, rates.get((precision, rows), 0.0))
            gemm = [Gemm(precision, rows, rate) for (precision, rows), rate in rates.items()]
            return Ceilings(
                device=device_name(torch.cuda.get_device_name(device) if cuda else None),
                threads=torch.get_num_threads(),
                measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
                versions=versions(),
                read_bytes_per_s=max(read, *(_weight_rate(product) for product in gemm)),
                copy_bytes_per_s=copy,
                inner=inner,
                gemm=gemm,
                launch_ns=_launch_ns(device) if cuda else None,
                links=[] if links is None else links(device, torch.get_num_threads()),
            )
    finally:
        torch.set_num_threads(before)


def _weight_rate(product: Gemm) -> float:
    """Bytes of weights a second that a product has read."""
    size = {"float32": 4, "int8": 1}.get(product.precision, 2)
    return size * product.flops_per_s / (2 * product.rows)


def _bandwidths(device: torch.device) -> tuple[float, float]:
    """Bytes a second: read, and copied (read plus written)."""
    count = STREAM_BYTES // 4 * (8 if device.type == "cuda" else 1)
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    half = count // 2
    reads = (lambda: source.sum(), lambda: torch.dot(source[:half], source[half:]))
    seconds = min(_best_seconds(device, read) for read in reads)
    copied = _best_seconds(device, lambda: target.copy_(source))
    return 4 * count / seconds, 8 * count / copied


def _product_rate(device: torch.device, product: Product, dtype: torch.dtype, rows: int, inner: int) -> float:
    """FLOPs a second of [rows, inner] x [inner, inner]."""
    x = torch.randn(rows, inner, device=device).to(dtype)
    return 2 * rows * inner * inner / _best_seconds(device, lambda: product(x))


def _products(device: torch.device, inner: int) -> Iterator[tuple[str, torch.dtype, Product]]:
    """Precision, dtype of the activations, and a product; of a precision with several kernels the fastest counts."""
    weight = torch.randn(inner, inner, device=device).mul_(0.02)
    if device.type == "cuda":
        for name in ("float32", "float16", "bfloat16"):
            dtype = getattr(torch, name)
            copies = _copies(dtype.itemsize * inner**2, partial(weight.to, dtype, copy=True))
            yield name, dtype, _rotating(copies, lambda x, weight: x @ weight.T)
        return
    kernels = library()
    for formats in (torch_formats(), {} if kernels is None else cpp_formats(kernels)):
        for name in ("float32", "float16", "int8"):
            if name in formats:
                size = {"float32": 4, "float16": 2, "int8": 1}[name]
                copies = _copies(size * inner**2, partial(formats[name].pack, weight, None))
                yield name, torch.float32, _rotating(copies, lambda x, weight: weight.apply(x))
    if has_bfloat16():
        pack, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
        copies = _copies(2 * inner**2, partial(pack, weight.bfloat16(), 8))
        yield "bfloat16", torch.bfloat16, _rotating(copies, lambda x, weight: linear(x, weight, None, "none", [], ""))


def _copies(num_bytes: int, make: Callable[[], object]) -> list:
    """As many packed weights as no cache holds together."""
    return [make() for _ in range(max(3, math.ceil(ROTATED_BYTES / num_bytes)))]


def _rotating(packed: list, multiply: Callable) -> Product:
    turn = -1

    def product(x: torch.Tensor) -> None:
        nonlocal turn
        turn = (turn + 1) % len(packed)
        multiply(x, packed[turn])

    return product


def _best_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of one call: the best of batches that are long enough for the clock."""
    _timed(device, work, 1)  # libraries choose and load their kernels
    seconds = _timed(device, work, 2)
    batch = max(1, min(200, round(CELL_SECONDS / 8 / max(seconds, 1e-6))))
    best, end = seconds, time.perf_counter() + CELL_SECONDS
    while time.perf_counter() < end:
        best = min(best, _timed(device, work, batch))
    return best


def _timed(device: torch.device, work: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / calls


def _launch_ns(device: torch.device) -> float:
    """Host nanoseconds of launching one kernel that does next to nothing."""
    x = torch.zeros(1, device=device)
    return 1e9 * min(_timed(device, lambda: x.add_(1), 2000) for _ in range(5))
