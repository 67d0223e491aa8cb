"""What every attention backend is given, and what it must do."""

from dataclasses import dataclass
from itertools import accumulate
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
    slots: torch.Tensor  # [num_tokens] int64: where each new token's key and value go; -1: nowhere
    block_tables: torch.Tensor  # [num_sequences, max_blocks] int32, padded with a block of the same sequence
    block_size: int
    query_start: torch.Tensor  # [num_sequences + 1] int32: query_lens added up, on the device
    contexts: torch.Tensor  # [num_sequences] int32: context_lens, on the device; 0 is a padding row


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
class LayerCache:
    """The KV cache of one layer.

    The slot of position p of a sequence is `block_table[p // block_size] * block_size + p % block_size`.
    """

    values: torch.Tensor  # [planes, num_slots, num_kv_heads, head_dim]
    scales: torch.Tensor | None = (
        None  # [planes, num_slots, num_kv_heads] float32, with 8-bit values: real = value * scale
    )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class KVCache:
    """The KV cache of all layers, as the model's KVLayout says."""

    values: torch.Tensor  # [num_layers, planes, num_slots, num_kv_heads, head_dim]
    scales: torch.Tensor | None = None  # [num_layers, planes, num_slots, num_kv_heads] float32

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def layers(self) -> list[LayerCache]:
        scales = [None] * len(self.values) if self.scales is None else self.scales.unbind(0)
        return [LayerCache(values, scale) for values, scale in zip(self.values.unbind(0), scales, strict=True)]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends. Multi-head, grouped and multi-query attention differ only in the number of KV heads."""

    scale: float  # of the product of query and key
    value_dim: int
    window: int | None = None  # a token sees itself and the window - 1 before it
    alibi_slopes: tuple[float, ...] | None = None  # a query head's: slope * (key - query position) is added


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache that holds the step's own keys and values already."""

    def reserve(self, max_sequences: int, max_tokens: int) -> None:
        """Makes room for steps of so many sequences and new tokens: what a CUDA graph captures stays where it is."""
        ...

    def begin(self, inputs: AttentionInputs) -> None:
        """Called once a step, before the layers: whatever all layers share is made here."""
        ...

    def attend(self, query: torch.Tensor, layer_cache: LayerCache, spec: AttentionSpec) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim] → [num_tokens, num_heads, value_dim]."""
        ...
