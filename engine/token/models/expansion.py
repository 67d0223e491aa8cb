"""Which sequences of a step attend to keys and values that are expanded from the latents, and where those stand.

Absorbed, a pair of a query and a key costs about three times the FLOPs, but nothing is computed for past positions.
Expanded, the latents of the whole context go through a matrix product first. Chunks of some hundred tokens, and whole
prompts, are cheaper that way: `metrics.compute.cost_model.expansion_savings` decides by FLOPs, for each sequence alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sojourn.engine.compute.attention.backend import AttentionBackend, AttentionInputs
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.kv_formats import dequantise
from sojourn.metrics.compute.cost_model import Expansion, expansion_savings

ROOM_BYTES = 1 << 28  # of the expanded keys and values of one layer
BLOCK = 128  # positions of a block of the room: whole tiles of the kernels

Rows = slice | torch.Tensor  # of the step's tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of a step that attend together."""

    attention: AttentionBackend
    rows: Rows
    # Of each sequence whose latents are expanded: its blocks in the cache, its context, its first block in the room.
    expanded: tuple[tuple[torch.Tensor, int, int], ...] = ()

    @property
    def num_blocks(self) -> int:
        return sum(-(-context // BLOCK) for _, context, _ in self.expanded)


class Expander:
    """Splits each step once for all layers of a model. `head_dim` is of an expanded key."""

    def __init__(self, head_dim: int):
        self._head_dim = head_dim
        self._room = torch.empty(0)
        self._known: tuple[AttentionBackend | None, AttentionInputs | None] = None, None
        self._parts: list[Part] | None = None
        self._others: list[AttentionBackend] = []  # of the step's kind, one a part

    def parts(self, attention: AttentionBackend, expansion: Expansion | None) -> list[Part] | None:
        """Of the step that `attention` has begun; None where all of it is absorbed."""
        known, inputs = self._known, attention.inputs
        if known[0] is not attention:
            self._others.clear()
        if known[0] is not attention or known[1] is not inputs:
            self._known, self._parts = (attention, inputs), None
            if expansion is not None and inputs.num_single < len(inputs.query_lens):
                self._parts = self._split(attention, inputs, expansion)
        return self._parts

    def room(self, num_blocks: int, num_heads: int, like: torch.Tensor) -> LayerCache:
        """Keys and values of so many blocks; what stands behind a context is finite."""
        shape = (num_heads, BLOCK, self._head_dim)
        size = 2 * num_blocks * math.prod(shape)
        if self._room.numel() < size or self._room.dtype != like.dtype or self._room.device != like.device:
            self._room = torch.zeros(size, dtype=like.dtype, device=like.device)
        return LayerCache(self._room[:size].view(2, num_blocks, *shape).transpose(2, 3))

    def _split(self, attention: AttentionBackend, inputs: AttentionInputs, expansion: Expansion) -> list[Part] | None:
        sequences = list(zip(inputs.query_lens, inputs.context_lens, strict=True))
        chosen = {index for index, (new, context) in enumerate(sequences)
                  if expansion_savings(expansion, new, context - new) > 0}  # fmt: skip
        if not chosen:
            return None
        parts = []
        if absorbed := [index for index in range(len(sequences)) if index not in chosen]:
            parts.append(self._absorbed(self._other(attention, 0), inputs, absorbed))
        for group in _groups(sorted(chosen), inputs.context_lens, expansion.most_context):
            parts.append(self._expanded(self._other(attention, len(parts)), inputs, group))
        return parts

    def _other(self, attention: AttentionBackend, place: int) -> AttentionBackend:
        while len(self._others) <= place:
            self._others.append(attention.another())
        return self._others[place]

    def _absorbed(self, attention: AttentionBackend, inputs: AttentionInputs, chosen: list[int]) -> Part:
        where = _places(chosen, inputs.block_tables.device)
        tables, table_rows = inputs.block_tables, inputs.table_rows
        if table_rows is None:
            tables = tables[where]
        else:
            table_rows = table_rows[where]
        return _begun(attention, inputs, chosen, tables, inputs.block_size, table_rows)

    def _expanded(self, attention: AttentionBackend, inputs: AttentionInputs, chosen: list[int]) -> Part:
        device, expanded, first = inputs.block_tables.device, [], 0
        counts = [-(-inputs.context_lens[index] // BLOCK) for index in chosen]
        tables = [[0] * max(counts) for _ in chosen]
        for row, (index, count) in enumerate(zip(chosen, counts, strict=True)):
            context = inputs.context_lens[index]
            table = inputs.block_tables[index]
            if inputs.table_rows is not None:  # by a number that is on the device
                table = inputs.block_tables.index_select(0, inputs.table_rows[index : index + 1])[0]
            expanded.append((table[: -(-context // inputs.block_size)], context, first))
            tables[row] = [first + min(place, count - 1) for place in range(max(counts))]
            first += count
        return _begun(attention, inputs, chosen, _sent(tables, device), BLOCK, None, tuple(expanded))


def gathered(layer_cache: LayerCache, blocks: torch.Tensor, context: int, dtype: torch.dtype) -> torch.Tensor:
    """The vectors of one plane and one head of a sequence: [context, head_dim]."""
    plane = layer_cache.values[0]
    if layer_cache.scales is None:
        return plane.index_select(0, blocks)[:, :, 0].flatten(0, 1)[:context]
    stored = plane.view(torch.uint8).index_select(0, blocks).view(plane.dtype)
    return dequantise(stored, layer_cache.scales[0].index_select(0, blocks), dtype)[:, :, 0].flatten(0, 1)[:context]


def place(room: torch.Tensor, first: int, columns: slice, vectors: torch.Tensor) -> None:
    """vectors [heads, context, dim] → a plane [num_blocks, BLOCK, heads, head_dim] of the room, from a block on."""
    whole = vectors.shape[1] // BLOCK
    target = room[..., columns].permute(0, 2, 1, 3)  # [num_blocks, heads, BLOCK, dim]
    if whole:
        target[first : first + whole] = vectors[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).transpose(0, 1)
    if rest := vectors.shape[1] - whole * BLOCK:
        target[first + whole, :, :rest] = vectors[:, whole * BLOCK :]


def _begun(
    attention: AttentionBackend,
    inputs: AttentionInputs,
    chosen: list[int],
    tables: torch.Tensor,
    block_size: int,
    table_rows: torch.Tensor | None,
    expanded: tuple[tuple[torch.Tensor, int, int], ...] = (),
) -> Part:
    device = inputs.block_tables.device
    query_lens, contexts = ([lens[index] for index in chosen] for lens in (inputs.query_lens, inputs.context_lens))
    starts = list(accumulate(inputs.query_lens, initial=0))
    rows = [row for index in chosen for row in range(starts[index], starts[index + 1])]
    attention.begin(
        AttentionInputs(
            query_lens,
            contexts,
            sum(new == 1 for new in query_lens),
            inputs.slots[:0],
            tables,
            block_size,
            _sent(list(accumulate(query_lens, initial=0)), device),
            _sent(contexts, device),
            table_rows,
        )
    )
    return Part(attention, _places(rows, device), expanded)


def _groups(chosen: list[int], contexts: Sequence[int], most: int) -> list[list[int]]:
    """Sequences that share the room, of which each fits alone."""
    groups, total = [[]], 0
    for index in chosen:
        if groups[-1] and total + contexts[index] > most:
            groups.append([])
            total = 0
        groups[-1].append(index)
        total += contexts[index]
    return groups


def _places(indices: list[int], device: torch.device) -> Rows:
    if indices[-1] - indices[0] == len(indices) - 1:  # neighbours
        return slice(indices[0], indices[-1] + 1)
    return _sent(indices, device).long()


def _sent(numbers: list, device: torch.device) -> torch.Tensor:
    """int32 on the device, without waiting for it."""
    numbers = torch.tensor(numbers, dtype=torch.int32)
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)
