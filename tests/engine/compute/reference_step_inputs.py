"""The inputs of a step, as engine.compute.triton.step_inputs makes them, by torch operations."""

import torch

from sojourn.engine.compute.triton.step_inputs import StepInputs, StepRows, empty_step_inputs


def reference_step_inputs(step: StepRows, block_size: int, out: StepInputs | None = None) -> StepInputs:
    num_sequences, num_tokens = len(step.rows), len(step.known_ids)
    if out is None:
        out = empty_step_inputs(num_sequences, num_tokens, step.rows.device)
    out.contexts.copy_((step.past + step.query_start.diff()) * (step.rows >= 0))
    index = torch.arange(num_tokens, dtype=torch.int32, device=step.rows.device)
    sequence = torch.searchsorted(step.query_start[:-1].contiguous(), index, right=True) - 1
    row = step.rows[sequence]
    real = (row >= 0) & (index < step.query_start[-1])
    row = row.clamp(min=0)
    position = (step.past[sequence] + index - step.query_start[sequence]) * real
    known = step.known_ids * real
    block = step.block_tables[row, position // block_size].long()
    out.ids.copy_(torch.where(known < 0, step.last_ids[row], known))
    out.positions.copy_(position)
    out.slots.copy_(torch.where(real, block * block_size + position % block_size, -1))
    return out
