"""The ids, positions and slots of a step's tokens, made on the device from tables with one stable row a request.

The host sends which rows take part and how many tokens each adds. A token that was sampled in the step before is taken
from the pool of last ids, so that the host need not have read it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 128
SEARCH_STEPS = 12  # enough for 4096 sequences, which is as many as an engine may run


@dataclass(frozen=True, slots=True)
class StepRows:
    """Which requests a step computes, and what the device knows of them. All int32.

    Padding is a sequence whose row is -1, and a token behind the last sequence's.
    """

    rows: torch.Tensor  # [num_sequences], of the tables below; -1: padding
    query_start: torch.Tensor  # [num_sequences + 1]: new tokens of each sequence, added up
    past: torch.Tensor  # [num_sequences]: tokens that the KV cache holds
    known_ids: torch.Tensor  # [num_tokens]: new tokens that the host knows; -1: the row's last id
    block_tables: torch.Tensor  # [max_rows, max_blocks]
    last_ids: torch.Tensor  # [max_rows]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Of padding, ids and positions are 0, slots -1 and contexts 0."""

    ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slots: torch.Tensor  # [num_tokens] int64
    contexts: torch.Tensor  # [num_sequences] int32: past and new tokens


def empty_step_inputs(num_sequences: int, num_tokens: int, device: torch.device) -> StepInputs:
    """Room for steps of this size, for a CUDA graph to read."""
    aligned = num_tokens + num_tokens % 2  # each part begins at 16 bytes, or kernels would be compiled for both ways
    ids, positions, slots = torch.empty((3, aligned), dtype=torch.int64, device=device)[:, :num_tokens].unbind(0)
    return StepInputs(ids, positions, slots, torch.empty(num_sequences, dtype=torch.int32, device=device))


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])  # or it would be compiled again while requests wait
def step_kernel(
    rows_pointer, query_start_pointer, past_pointer, known_pointer, tables_pointer, last_ids_pointer,
    ids_pointer, positions_pointer, slots_pointer, contexts_pointer,
    num_sequences, num_tokens, table_stride, block_size,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # As many sequences as tokens, one a lane.
    is_sequence = index < num_sequences
    own_row = tl.load(rows_pointer + index, mask=is_sequence, other=-1)
    begin = tl.load(query_start_pointer + index, mask=is_sequence, other=0)
    end = tl.load(query_start_pointer + index + 1, mask=is_sequence, other=0)
    own_past = tl.load(past_pointer + index, mask=is_sequence, other=0)
    tl.store(contexts_pointer + index, tl.where(own_row >= 0, own_past + end - begin, 0), mask=is_sequence)
    # The sequence of a token is the last one that begins at it or before.
    is_token = index < num_tokens
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + num_sequences
    for _ in range(STEPS):
        middle = (low + high) // 2
        begins = tl.load(query_start_pointer + middle, mask=is_token, other=0) <= index
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    row = tl.load(rows_pointer + low, mask=is_token, other=-1)
    start = tl.load(query_start_pointer + low, mask=is_token, other=0)
    real = is_token & (row >= 0) & (index < tl.load(query_start_pointer + num_sequences))
    position = tl.load(past_pointer + low, mask=real, other=0) + index - start
    known = tl.load(known_pointer + index, mask=real, other=0)
    last = tl.load(last_ids_pointer + row, mask=real & (known < 0), other=0)
    block = tl.load(tables_pointer + row.to(tl.int64) * table_stride + position // block_size, mask=real, other=0)
    slot = block.to(tl.int64) * block_size + position % block_size
    tl.store(ids_pointer + index, tl.where(known < 0, last, known).to(tl.int64), mask=is_token)
    tl.store(positions_pointer + index, tl.where(real, position, 0).to(tl.int64), mask=is_token)
    tl.store(slots_pointer + index, tl.where(real, slot, -1), mask=is_token)


def step_inputs(step: StepRows, block_size: int, out: StepInputs | None = None) -> StepInputs:
    """One launch; `out` is filled and returned where it is given."""
    num_sequences, num_tokens = len(step.rows), len(step.known_ids)
    if out is None:
        out = empty_step_inputs(num_sequences, num_tokens, step.rows.device)
    step_kernel[(triton.cdiv(max(num_sequences, num_tokens, 1), BLOCK),)](
        step.rows, step.query_start, step.past, step.known_ids, step.block_tables, step.last_ids,
        out.ids, out.positions, out.slots, out.contexts,
        num_sequences, num_tokens, step.block_tables.stride(0), block_size,
        STEPS=SEARCH_STEPS, BLOCK=BLOCK,
    )  # fmt: skip
    return out
