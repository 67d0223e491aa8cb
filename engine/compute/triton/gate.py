"""The gates of feed-forward networks, over both halves of a row."""

import torch
import triton
import triton.language as tl

from sojourn.engine.compute.operations.reference import GATE_LIMIT, SWISH_GAIN

BLOCK = 1024
SILU, GELU, CLAMPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of gates
LIMIT, GAIN = tl.constexpr(GATE_LIMIT), tl.constexpr(SWISH_GAIN)


@triton.jit
def silu(x):
    """x * sigmoid(x) in float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """By the tanh approximation: (1 + tanh(y)) / 2 is sigmoid(2y), of which small values keep their digits."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """Two halves in their own dtype → their gate in float32, rounded between as the reference rounds. NaN stays NaN:
    the language's minimum would drop it."""
    wide, wide_up = gate.to(tl.float32), up.to(tl.float32)
    if KIND == CLAMPED:
        wide = tl.where(wide > LIMIT, LIMIT, wide)
        wide_up = tl.where(wide_up > LIMIT, LIMIT, tl.where(wide_up < -LIMIT, -LIMIT, wide_up)) + 1.0
        activated = wide / (1.0 + tl.exp(wide * -GAIN))
    elif KIND == GELU:
        activated = gelu(wide)
    else:
        activated = silu(wide)
    return activated.to(gate.dtype).to(tl.float32) * wide_up


@triton.jit
def gate_kernel(both_pointer, out_pointer, both_stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(both_pointer + row * both_stride + columns, mask=inside, other=0.0)
    up = tl.load(both_pointer + row * both_stride + size + columns, mask=inside, other=0.0)
    tl.store(out_pointer + row * size + columns, gated(gate, up, KIND).to(gate.dtype), mask=inside)


def gate(both: torch.Tensor, kind: int = SILU.value) -> torch.Tensor:
    """A gate of the reference: [num_tokens, 2 * size] → [num_tokens, size]."""
    assert both.dim() == 2 and both.stride(1) == 1, "rows of neighbours"
    rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, size), dtype=both.dtype, device=both.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(size))
        gate_kernel[(rows, triton.cdiv(size, block))](both, out, both.stride(0), size, KIND=kind, BLOCK=block)
    return out
