"""What a step should cost: exact FLOPs and bytes from its composition.

Formulas for decoders with causal attention, counted per multiply and add (2 FLOPs). Bytes count each weight once a
step, keys and values read once and written once; activations are left out. A model states its own coefficients.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

Windows = tuple[tuple[int | None, int], ...]
PARTS = ("attention", "mlp", "head", "adapters")  # of a model: a step has the FLOPs of each


class ExpertShape(msgspec.Struct, frozen=True):
    """The routed experts of a mixture."""

    num_layers: int  # that have them
    num_experts: int  # in each
    num_chosen: float  # for each token; of a rank that holds some experts, its share
    expert_bytes: int  # weights of one


class Expansion(msgspec.Struct, frozen=True):
    """Latent attention to keys and values that are expanded from the latents of the whole context (DeepSeek-V2, 2024).

    Each pair then costs less, and each past position a product with the factors of keys and values. New tokens take the
    same product either way: for their own latents, or for their queries and results.
    """

    saved_pair_flops: int  # of a query and a key in one layer, all heads
    position_flops: int  # of a past position in one layer
    most_context: int  # positions: the expanded keys and values take memory


class ModelShape(msgspec.Struct, frozen=True):
    """What a decoder's cost depends on. Parameters are those that one token is multiplied by, in all layers."""

    vocab_size: int
    hidden_size: int
    attention_parameters: int  # projections to queries, keys and values, and from what was mixed
    mlp_parameters: int  # of the feed-forward parts, routers included; of the routed experts only the chosen
    pair_flops: int  # of one query and one key in one layer: their product and the mixing, all heads
    windows: Windows  # (keys that a token sees at most, sink tokens included, or None; number of layers with it)
    kv_bytes_per_token: int  # all layers
    weight_bytes: int  # that every step reads: no embedding table, of which rows are gathered, no routed experts
    experts: ExpertShape | None = None
    expansion: Expansion | None = None  # `pair_flops` is without it
    sink_tokens: int = 0  # first tokens that each token sees beside its window

    @property
    def longest_window(self) -> int | None:
        """Last tokens beside the sinks that some layer still reads; None where a layer reads all."""
        windows = [window for window, _ in self.windows]
        return None if None in windows else max(windows) - self.sink_tokens

    @property
    def num_layers(self) -> int:
        return sum(layers for _, layers in self.windows)

    @property
    def linear_flops_per_token(self) -> int:
        return 2 * (self.attention_parameters + self.mlp_parameters)

    @property
    def head_flops_per_row(self) -> int:
        return 2 * self.hidden_size * self.vocab_size


Count = int | np.ndarray  # of one step, or an int64 array [steps] of several


class StepWork(NamedTuple):
    """A step's composition, as its cost depends on it. Pairs and reads are summed over layers."""

    tokens: Count
    decodes: Count  # sequences with one new token
    decode_pairs: Count  # of a query and a key that it sees, in those
    chunks: Count  # sequences with more
    chunk_pairs: Count
    kv_reads: Count  # token positions whose keys and values are read, each once a sequence
    logit_rows: Count
    saved_flops: Count = 0  # by expanded latents: see Expansion
    saved_pairs: Count = 0  # pairs of chunks that cost as much as that


class StepCost(NamedTuple):
    """FLOPs of a step by part of the model, and the bytes that it must move at least."""

    attention: Count  # its projections, the scores and the mixing
    mlp: Count
    head: Count
    moved_bytes: Count

    @property
    def flops(self) -> Count:
        return self.attention + self.mlp + self.head


def shape_from(meta: Mapping[str, Any]) -> ModelShape | None:
    """The model shape in a `run.json`; None where no server of ours wrote one. Raises msgspec.ValidationError."""
    recorded = meta.get("model_shape")
    return None if recorded is None else msgspec.convert(recorded, ModelShape)


def step_work(shape: ModelShape, new_tokens: Sequence[int], past_tokens: Sequence[int], logit_rows: int) -> StepWork:
    """Counts a step in which sequences compute so many new tokens after so many past ones, `logit_rows` with logits."""
    new, past = (np.array(tokens, dtype=np.int64) for tokens in (new_tokens, past_tokens))
    pairs, reads = pairs_and_reads(shape, new, past)
    single = new == 1
    counts = new.sum(), single.sum(), pairs[single].sum(), (~single).sum(), pairs[~single].sum(), reads.sum()
    saved = int(np.sum(saved_flops(shape, new, past)))
    return StepWork(*map(int, counts), logit_rows, saved, saved // shape.pair_flops)


def steps_work(
    shape: ModelShape, new: np.ndarray, past: np.ndarray, sequences: np.ndarray, logit_rows: np.ndarray
) -> StepWork:
    """What `step_work` counts of a step, of many: arrays [steps]. `new` and `past` tokens are of every sequence of
    every step, one step after the other; `sequences` and `logit_rows` [steps]."""
    pairs, reads = pairs_and_reads(shape, new, past)
    single = new == 1
    edges = np.concatenate(([0], np.cumsum(sequences)))

    def summed(values: np.ndarray) -> np.ndarray:
        return np.diff(np.concatenate(([0], np.cumsum(values)))[edges])

    decodes = summed(single)
    saved = 0 if shape.expansion is None else summed(saved_flops(shape, new, past))
    return StepWork(
        tokens=summed(new),
        decodes=decodes,
        decode_pairs=summed(pairs * single),
        chunks=sequences - decodes,
        chunk_pairs=summed(pairs * ~single),
        kv_reads=summed(reads),
        logit_rows=logit_rows,
        saved_flops=saved,
        saved_pairs=saved // shape.pair_flops,
    )


def pairs_and_reads(shape: ModelShape, new: np.ndarray, past: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of sequences [n]: pairs of a query and a key that it sees, and positions whose KV is read, over all layers."""
    pairs, reads = np.zeros_like(new), np.zeros_like(new)
    for window, layers in shape.windows:
        pairs += layers * num_pairs(new, past, window)
        reads += layers * (past + new if window is None else np.minimum(past + new, window + new - 1))
    return pairs, reads


def expansion_savings(expansion: Expansion, new: Count, past: Count) -> Count:
    """FLOPs of one layer that a sequence saves if its latents are expanded; below 0 where they should not be. The rule
    by which the engine chooses."""
    saved = num_pairs(new, past, None) * expansion.saved_pair_flops - past * expansion.position_flops
    allowed = (new > 1) & (new + past <= expansion.most_context)
    return np.where(allowed, saved, -1) if isinstance(new, np.ndarray) else (saved if allowed else -1)


def saved_flops(shape: ModelShape, new: Count, past: Count) -> Count:
    """FLOPs of all layers that sequences save by expanded latents."""
    if shape.expansion is None:
        return 0
    saved = expansion_savings(shape.expansion, new, past)
    return shape.num_layers * (np.maximum(saved, 0) if isinstance(saved, np.ndarray) else max(saved, 0))


def step_cost(shape: ModelShape, work: StepWork) -> StepCost:
    """Exact FLOPs, and the least bytes: weights once, the KV that its tokens see once, the new KV once.

    Of the routed experts it counts the expected number of distinct ones, as if tokens chose evenly and independently;
    real routers are less even, so they read fewer.
    """
    tokens, num_layers, experts = work.tokens, shape.num_layers, shape.experts
    moved = shape.weight_bytes + shape.kv_bytes_per_token * (work.kv_reads + tokens * num_layers) // num_layers
    if experts is not None:
        distinct = experts.num_experts * (1 - (1 - experts.num_chosen / experts.num_experts) ** tokens)
        read = np.rint(experts.num_layers * distinct * experts.expert_bytes)
        moved += read.astype(np.int64) if isinstance(tokens, np.ndarray) else int(read)
    return StepCost(
        2 * tokens * shape.attention_parameters
        + shape.pair_flops * (work.decode_pairs + work.chunk_pairs)
        - work.saved_flops,
        2 * tokens * shape.mlp_parameters,
        work.logit_rows * shape.head_flops_per_row,
        moved,
    )


def tier_bytes(shape: ModelShape, positions: Count) -> Count:
    """Keys and values that a KV tier gives or takes of so many positions, all layers. No FLOPs belong to them."""
    return shape.kv_bytes_per_token * positions


def request_flops(shape: ModelShape, new_tokens: int, past_tokens: int, sampled: int = 0) -> int:
    """FLOPs of `new_tokens` after `past_tokens` of one sequence, `sampled` of them with logits."""
    pairs = prompt_pairs(shape.windows, new_tokens, past_tokens)
    linear = new_tokens * shape.linear_flops_per_token + sampled * shape.head_flops_per_row
    return linear + shape.pair_flops * pairs - saved_flops(shape, new_tokens, past_tokens)


def chunk_pairs(shape: ModelShape, new_tokens: int, past_tokens: int) -> int:
    """Pairs of one sequence with a chunk, as the time of a step depends on them: expanded latents save some."""
    pairs = prompt_pairs(shape.windows, new_tokens, past_tokens)
    return pairs - saved_flops(shape, new_tokens, past_tokens) // shape.pair_flops


def decode_flops(shape: ModelShape, past_tokens: Sequence[int]) -> int:
    """FLOPs of a step in which each of so many sequences computes one token and draws the next."""
    linear = len(past_tokens) * (shape.linear_flops_per_token + shape.head_flops_per_row)
    return linear + shape.pair_flops * decode_pairs(shape.windows, past_tokens)


def decode_pairs(windows: Windows, past_tokens: Sequence[int]) -> int:
    """Pairs of a query and a key that it sees, over all layers, where each of so many sequences computes one token."""
    count, pairs = len(past_tokens), 0
    for window, layers in windows:
        seen = sum(past_tokens) + count if window is None else sum([min(past + 1, window) for past in past_tokens])
        pairs += layers * seen
    return pairs


def prompt_pairs(windows: Windows, new_tokens: int, past_tokens: int) -> int:
    """... where one sequence computes `new_tokens` after `past_tokens`."""
    return sum([layers * num_pairs(new_tokens, past_tokens, window) for window, layers in windows])


def num_pairs(new: Count, past: Count, window: int | None) -> Count:
    """Pairs of a query and a key that it sees, exact causal."""
    growing = new  # queries that see everything before them
    if window is not None:
        room = window - past
        growing = np.clip(room, 0, new) if isinstance(new, np.ndarray) else min(max(room, 0), new)
    pairs = growing * past + growing * (growing + 1) // 2
    return pairs if window is None else pairs + (new - growing) * window
