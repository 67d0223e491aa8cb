"""What every attention backend is given, and what it must do."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where one step's tokens live. Rows are ordered: first the sequences with one new token, then the longer ones.

    A sequence's new tokens are neighbours in the batch, and its last new token is its last position.
    """

    query_lens: list[int]  # new tokens of each sequence
    context_lens: list[int]  # past and new tokens of each sequence
    num_single: int  # sequences with exactly one new token: the first rows
    slots: torch.Tensor  # [num_tokens] int64: where each new token's key and value go
    block_tables: torch.Tensor  # [num_sequences, max_blocks] int64, padded with 0
    block_size: int


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache.

    `kv_cache` is [num_layers, 2, num_blocks * block_size, num_kv_heads, head_dim], keys at 0 and values at 1; the slot
    of position p of a sequence is `block_table[p // block_size] * block_size + p % block_size`.
    """

    def begin(self, inputs: AttentionInputs) -> None:
        """Called once a step, before the layers: whatever all layers share is made here."""
        ...

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_cache: torch.Tensor
    ) -> torch.Tensor:
        """Writes the new keys and values, then attends.

        query [num_tokens, num_heads, head_dim]; key and value [num_tokens, num_kv_heads, head_dim]; layer_cache
        [2, num_slots, num_kv_heads, head_dim]. Returns [num_tokens, num_heads, head_dim]. Scale is head_dim ** -0.5.
        """
        ...
