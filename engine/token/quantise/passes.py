"""A whole text through a model at once, with the reference operations: for measurements, not for serving."""

import torch

from sojourn.engine.compute.attention.backend import AttentionInputs
from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.kv_cache import allocate
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.token.models.decoder import Decoder

BLOCK_SIZE = 16


@torch.inference_mode()
def hidden_states(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Behind the last norm, [len(ids), hidden_size]."""
    device, length = model.norm.device, len(ids)
    positions = torch.arange(length, device=device)
    num_blocks = -(-length // BLOCK_SIZE)
    inputs = AttentionInputs(
        query_lens=[length],
        context_lens=[length],
        num_single=int(length == 1),
        slots=positions,
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        block_size=BLOCK_SIZE,
        query_start=torch.tensor([0, length], dtype=torch.int32, device=device),
        contexts=torch.tensor([length], dtype=torch.int32, device=device),
    )
    attention = TorchAttention()
    attention.begin(inputs)
    cache = allocate(model.kv_layout, len(model.layers), num_blocks, BLOCK_SIZE, model.norm.dtype, device)
    return model(torch.tensor(ids, device=device), positions, positions, Operations(), attention, cache)
