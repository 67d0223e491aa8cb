"""The interface of attention backends: a step's inputs, and what a backend computes."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from sojourn.engine.compute.kv_cache import LayerCache


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
    # [num_sequences] int32: the row of block_tables that each sequence has, for a backend that `indexes_tables`; None:
    # row i is sequence i's.
    table_rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends. Multi-head, grouped and multi-query attention differ only in the number of KV heads."""

    scale: float  # of the product of query and key
    value_dim: int
    window: int | None = None  # a token sees itself and the window - 1 before it
    alibi_slopes: tuple[float, ...] | None = None  # a query head's: slope * (key - query position) is added
    soft_cap: float | None = None  # a scaled product s becomes soft_cap * tanh(s / soft_cap), before slopes are added
    # [num_heads]: the logit of one more key without a value, which takes its share of the softmax (gpt-oss). Weights
    # of one layer: layers that differ in nothing else share what a backend prepares.
    sink_logits: torch.Tensor | None = field(default=None, compare=False)
    sink_tokens: int = 0  # with a window: so many first tokens are seen from everywhere (Xiao et al., 2023)


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache that holds the step's own keys and values already."""

    indexes_tables = False  # whether AttentionInputs may have table_rows
    inputs: AttentionInputs  # of the step that has begun
    reads_behind_contexts = True  # whether slots behind a sequence are multiplied: then they must hold finite numbers

    def reserve(self, max_sequences: int, max_tokens: int) -> None:
        """Allocates for steps of so many sequences and new tokens: memory in a CUDA graph must not move.

        A backend whose memory grows when it is needed leaves this out.
        """

    def begin(self, inputs: AttentionInputs) -> None:
        """Called once a step, before the layers, for what all layers share."""
        ...

    def another(self) -> "AttentionBackend":
        """One more of the same kind, with inputs of its own: for vectors that stand outside of the KV cache."""
        ...

    def attend(self, query: torch.Tensor, layer_cache: LayerCache, spec: AttentionSpec) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim] → [num_tokens, num_heads, value_dim]. Values may be shorter than the
        vectors of their plane: their first dimensions."""
        ...
