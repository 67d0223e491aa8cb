"""Penalties, biases and masks of the rows that have any, in one pass over their logits."""

import torch
import triton
import triton.language as tl

from sojourn.engine.compute.logits import LogitEdits

BLOCK = 2048


@triton.jit
def edit_kernel(
    logits_pointer, rows_pointer, history_rows_pointer, bias_rows_pointer, mask_rows_pointer, penalties_pointer,
    prompts_pointer, counts_pointer, biases_pointer, masks_pointer, out_pointer,
    logits_stride, vocab_size, num_words, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    edited = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    row = tl.load(rows_pointer + edited)
    x = tl.load(logits_pointer + row * logits_stride + tokens, mask=inside, other=0.0)
    history = tl.load(history_rows_pointer + edited)
    if history >= 0:
        repetition = tl.load(penalties_pointer + 3 * edited)
        frequency = tl.load(penalties_pointer + 3 * edited + 1)
        presence = tl.load(penalties_pointer + 3 * edited + 2)
        counts = tl.load(counts_pointer + history * vocab_size + tokens, mask=inside, other=0.0)
        prompt = tl.load(prompts_pointer + history * vocab_size + tokens, mask=inside, other=0)
        in_output = counts > 0
        factor = tl.where(in_output | (prompt != 0), repetition, 1.0)
        x = tl.where(x > 0, x / factor, x * factor)
        x = x - frequency * counts - tl.where(in_output, presence, 0.0)
    bias_row = tl.load(bias_rows_pointer + edited)
    if bias_row >= 0:
        x += tl.load(biases_pointer + bias_row * vocab_size + tokens, mask=inside, other=0.0)
    if MASKED:
        mask_row = tl.load(mask_rows_pointer + edited)
        if mask_row >= 0:
            words = tl.load(masks_pointer + mask_row * num_words + tokens // 32, mask=inside, other=0)
            x = tl.where(((words >> (tokens % 32)) & 1) != 0, x, float("-inf"))
    tl.store(out_pointer + edited * vocab_size + tokens, x, mask=inside)


def edit_rows(
    logits: torch.Tensor,
    edits: LogitEdits,
    prompts: torch.Tensor,
    counts: torch.Tensor,
    biases: torch.Tensor,
    masks: torch.Tensor | None,
) -> torch.Tensor:
    """engine.compute.logits.edit_rows, whose arithmetic it follows."""
    (_, vocab_size), num_edited = logits.shape, len(edits.rows)
    out = torch.empty((num_edited, vocab_size), dtype=torch.float32, device=logits.device)
    assert logits.stride(1) == 1 and logits.dtype == torch.float32, "rows of neighbours"
    if num_edited:
        block = min(BLOCK, triton.next_power_of_2(vocab_size))
        edit_kernel[(num_edited, triton.cdiv(vocab_size, block))](
            logits, edits.rows, edits.history_rows, edits.bias_rows, edits.mask_rows, edits.penalties,
            prompts.view(torch.uint8), counts, biases, masks, out,
            logits.stride(0), vocab_size, masks.shape[1] if masks is not None else 0,
            MASKED=masks is not None, BLOCK=block,
        )  # fmt: skip
    return out
