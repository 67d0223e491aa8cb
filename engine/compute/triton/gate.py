"""The gates of feed-forward networks, over both halves of a row."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x) in float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """By the tanh approximation: (1 + tanh(y)) / 2 is sigmoid(2y), of which small values keep their digits."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def gate_kernel(both_pointer, out_pointer, both_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(both_pointer + row * both_stride + columns, mask=inside, other=0.0)
    up = tl.load(both_pointer + row * both_stride + size + columns, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    activated = gelu(x) if GELU else silu(x)
    gated = activated.to(gate.dtype).to(tl.float32) * up  # rounded between, as the reference rounds
    tl.store(out_pointer + row * size + columns, gated.to(gate.dtype), mask=inside)


def gate(both: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
    """reference.silu_gate, or reference.gelu_gate: [num_tokens, 2 * size] → [num_tokens, size]."""
    assert both.dim() == 2 and both.stride(1) == 1, "rows of neighbours"
    rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, size), dtype=both.dtype, device=both.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(size))
        gate_kernel[(rows, triton.cdiv(size, block))](both, out, both.stride(0), size, GELU=gelu, BLOCK=block)
    return out
