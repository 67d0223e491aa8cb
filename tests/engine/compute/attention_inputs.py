"""AttentionInputs of steps that no runner prepared, and caches by slots in the order of the KV cache."""

from itertools import accumulate

import torch

from sojourn.engine.compute.attention.backend import AttentionInputs


def attention_inputs(
    query_lens: list[int], context_lens: list[int], slots: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> AttentionInputs:
    """AttentionInputs from what the host knows; the tensors say which device."""
    starts, device = [0, *accumulate(query_lens)], block_tables.device
    return AttentionInputs(
        query_lens,
        context_lens,
        sum(1 for new in query_lens if new == 1),
        slots,
        block_tables.to(torch.int32),
        block_size,
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(context_lens, dtype=torch.int32, device=device),
    )


def by_head(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """A copy of [planes, num_slots, num_kv_heads, ...] as a LayerCache has it: the vectors of a block's head are
    neighbours."""
    return values.unflatten(1, (-1, block_size)).transpose(2, 3).contiguous().transpose(2, 3)
