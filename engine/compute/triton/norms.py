"""Root-mean-square norms, alone and behind the addition to the residual stream: one program a row."""

import torch
import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x_pointer, residual_pointer, weight_pointer, normed_pointer, total_pointer, eps,
    x_stride, residual_stride, size,
    ADD: tl.constexpr, GEMMA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_pointer + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_pointer + row * residual_stride + columns, mask=inside, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(total_pointer + row * size + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    # All but Gemma round before the weight as well: the models were trained with that.
    normed = scaled * (1.0 + weight) if GEMMA else scaled.to(x.dtype).to(tl.float32) * weight
    tl.store(normed_pointer + row * size + columns, normed.to(x.dtype), mask=inside)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, gemma: bool = False) -> torch.Tensor:
    """reference.rms_norm, or gemma_rms_norm, of [num_tokens, size]; rows may have any stride."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, normed, normed, eps, add=False, gemma=gemma)
    return normed


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, gemma: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of residual + x, and residual + x, which is rounded to its dtype first; all [num_tokens, size]."""
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, normed, total, eps, add=True, gemma=gemma)
    return normed, total


def _launch(x, residual, weight, normed, total, eps: float, *, add: bool, gemma: bool) -> None:
    assert x.dim() == 2 and x.stride(1) == 1 and residual.stride(1) == 1, "rows of neighbours"
    rows, size = x.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(size)
    norm_kernel[(rows,)](
        x, residual, weight, normed, total, eps, x.stride(0), residual.stride(0), size,
        ADD=add, GEMMA=gemma, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
