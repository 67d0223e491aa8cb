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
    block_tables: torch.Tensor  # [num_sequences, max_blocks] int64, padded with a block of the same sequence
    block_size: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a slot of the KV cache holds in each layer: the model's own statement.

    `planes` is 2 for a key and a value, and 1 where one vector is both: the key, of which the first dimensions are the
    value (multi-head latent attention).
    """

    planes: int
    num_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.planes * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends. Multi-head, grouped and multi-query attention differ only in the number of KV heads."""

    scale: float  # of the product of query and key
    value_dim: int
    window: int | None = None  # a token sees itself and the window - 1 before it
    alibi_slopes: tuple[float, ...] | None = None  # a query head's: slope * (key - query position) is added


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache.

    `kv_cache` is [num_layers, planes, num_blocks * block_size, num_kv_heads, head_dim] as the model's KVLayout says;
    the slot of position p of a sequence is `block_table[p // block_size] * block_size + p % block_size`.
    """

    def begin(self, inputs: AttentionInputs) -> None:
        """Called once a step, before the layers: whatever all layers share is made here."""
        ...

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        layer_cache: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Writes the new keys and values, then attends.

        query [num_tokens, num_heads, head_dim]; key [num_tokens, num_kv_heads, head_dim]; value [num_tokens,
        num_kv_heads, value_dim], or None where the layout has one plane; layer_cache [planes, num_slots, num_kv_heads,
        head_dim]. Returns [num_tokens, num_heads, value_dim].
        """
        ...
