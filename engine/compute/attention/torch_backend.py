"""The torch reference: gathers keys and values by block table. Runs on any device and is the oracle for the others."""

import torch
import torch.nn.functional as F

from sojourn.engine.compute.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.kv_formats import dequantise

GATHERED_TOKENS = 65_536  # KV positions that one group of single-token sequences gathers at most, padding included
# From here on a gather keeps its room on a CPU. The C library gives back what is larger than its threshold (at first
# 128 KiB) and faults it in again page by page at every call, which tripled the time of a step of 16 decodes.
SMALLEST_REUSED_ELEMENTS = 1 << 15
BEHIND = 1 << 40  # a column behind every context


class TorchAttention(AttentionBackend):
    """Single-token sequences in groups of like length, each one padded batch with the query heads of a KV head folded
    into the query length; the longer ones one after another.

    Of a layer with a window only the blocks that some query sees are gathered: the others may be another sequence's.
    """

    def __init__(self) -> None:
        self._room: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]  # where keys and values are gathered to

    def another(self) -> "TorchAttention":
        return TorchAttention()

    def begin(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs
        tables, size, singles = inputs.block_tables, inputs.block_size, inputs.num_single
        self._groups = []
        for begin, end in _groups(inputs.context_lens[:singles]):
            self._groups.append((begin, end, tables[begin:end], inputs.context_lens[begin:end]))
        self._chunks = []
        begin = singles
        for index in range(singles, len(inputs.query_lens)):
            new, context = inputs.query_lens[index], inputs.context_lens[index]
            self._chunks.append((begin, begin + new, tables[index, : -(-context // size)], context))
            begin += new
        self._gathers: dict[tuple, tuple[list, list]] = {}  # made by the first layer of each kind, for the others too

    def attend(self, query: torch.Tensor, layer_cache: LayerCache, spec: AttentionSpec) -> torch.Tensor:
        # Whole blocks are gathered, not slots.
        planes = layer_cache.values.unbind(0)
        scales = None if layer_cache.scales is None else layer_cache.scales.unbind(0)
        plain = spec.soft_cap is None and spec.sink_logits is None
        kind = (spec.window, spec.sink_tokens, spec.alibi_slopes, plain)
        if kind not in self._gathers:
            self._gathers[kind] = self._make_gathers(spec, layer_cache.values.shape[3], query.dtype, plain)
        of_groups, of_chunks = self._gathers[kind]
        parts = []
        for (begin, end, _, _), (blocks, mask) in zip(self._groups, of_groups, strict=True):
            keys, values = self._gather(planes, scales, blocks, end - begin, spec, query.dtype)
            folded = query[begin:end].unflatten(1, (keys.shape[1], -1))  # [sequences, kv_heads, group, head_dim]
            if plain:
                attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=spec.scale)
            else:
                attended = _attend(folded, keys, values, mask, spec, (keys.shape[1], -1, 1))
            parts.append(attended.flatten(1, 2))
        for (begin, end, _, _), (blocks, count, mask) in zip(self._chunks, of_chunks, strict=True):
            keys, values = self._gather(planes, scales, blocks, 1, spec, query.dtype)
            keys, values, chunk = keys[:, :, :count], values[:, :, :count], query[begin:end].transpose(0, 1)
            if plain:
                attended = F.scaled_dot_product_attention(
                    chunk[None], keys, values, attn_mask=mask, is_causal=mask is None, scale=spec.scale, enable_gqa=True
                )[0]
            else:  # the heads that share a KV head are its rows
                folded = chunk.unflatten(0, (keys.shape[1], -1))  # [kv_heads, group, new, head_dim]
                mask = mask.unflatten(0, (keys.shape[1], -1)) if mask.dim() == 3 else mask
                shared = keys[0][:, None], values[0][:, None]
                attended = _attend(folded, *shared, mask, spec, (keys.shape[1], -1, 1, 1)).flatten(0, 1)
            parts.append(attended.transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather(
        self,
        planes: tuple[torch.Tensor, ...],
        scales: tuple[torch.Tensor, ...] | None,
        blocks: torch.Tensor,
        rows: int,
        spec: AttentionSpec,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Planes [num_blocks, block_size, heads, stored_dim] and the scales of codes, by the blocks of `rows` sequences
        → keys [rows, heads, num_keys, head_dim] and values [..., value_dim]. They stand until the next call."""
        gathered = []
        for index, plane in enumerate(planes):
            size = len(blocks) * plane.stride(0)
            if scales is not None:
                stored = plane.view(torch.uint8).index_select(0, blocks).view(plane.dtype)
                out = dequantise(stored, scales[index].index_select(0, blocks), dtype)
            elif plane.is_cpu and size >= SMALLEST_REUSED_ELEMENTS:
                if self._room[index].numel() < size or self._room[index].dtype != plane.dtype:
                    self._room[index] = torch.empty(size, dtype=plane.dtype)
                out = self._room[index][:size].view(len(blocks), *plane.shape[1:])
                torch.index_select(plane, 0, blocks, out=out)
            else:
                out = plane.index_select(0, blocks)
            gathered.append(out.view(rows, -1, *out.shape[2:]).transpose(1, 2))
        return gathered[0], gathered[-1][..., : spec.value_dim]

    def _make_gathers(
        self, spec: AttentionSpec, num_kv_heads: int, dtype: torch.dtype, plain: bool
    ) -> tuple[list, list]:
        """For each group the blocks to gather, of all its sequences, and a mask that broadcasts to [sequences,
        kv_heads, group, num_keys]. For each chunk its blocks, how many keys of them it has, and a mask that broadcasts
        to [1, heads, new, num_keys], or, if `plain`, None where causal attention among the new tokens is meant."""
        device, size = self.inputs.block_tables.device, self.inputs.block_size
        slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes, device=device)
        groups, chunks = [], []
        for _, _, tables, contexts in self._groups:
            columns, positions = _visible([context - 1 for context in contexts], contexts, spec, size, device)
            lengths = torch.tensor(contexts, device=device)
            blocks = tables.gather(1, columns).flatten()
            if spec.window is None and slopes is None:
                groups.append((blocks, (positions < lengths[:, None])[:, None, None]))
                continue
            per_head = None if slopes is None else slopes.view(num_kv_heads, -1, 1)
            mask = _mask((lengths - 1)[:, None, None, None], positions[:, None, None], spec, per_head, dtype)
            groups.append((blocks, mask))
        for begin, end, table, context in self._chunks:
            new = end - begin
            if plain and new == context and slopes is None and (spec.window is None or spec.window >= context):
                chunks.append((table, context, None))
                continue
            columns, positions = _visible([context - new], [context], spec, size, device)
            count = columns.shape[1] * size - -context % size
            queries = torch.arange(context - new, context, device=device)
            per_head = None if slopes is None else slopes.view(-1, 1, 1)
            mask = _mask(queries[:, None], positions[0, :count], spec, per_head, dtype)
            chunks.append((table[columns[0]], count, mask))
        return groups, chunks


def _visible(
    firsts: list[int], contexts: list[int], spec: AttentionSpec, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of the block tables that hold keys for the queries from position `firsts` on, [sequences, columns],
    and the keys' positions, [sequences, columns * size].

    Rows are padded at their end, with a position behind their context, and columns of their own.
    """
    window = spec.window
    last = [max(0, context - 1) // size for context in contexts]
    begin = [0 if window is None else max(0, first - window + 1) // size for first in firsts]
    num_sinks = 0 if window is None else min(-(-spec.sink_tokens // size), max(begin))
    width = max(end - start + 1 for start, end in zip(begin, last, strict=True))
    lasts, begins = (torch.tensor(columns, device=device)[:, None] for columns in (last, begin))
    sinks = torch.arange(num_sinks, device=device)
    # A block of sinks that the window has reached is not gathered twice.
    kept = torch.where(sinks < begins, sinks, BEHIND)
    columns = torch.cat((kept, begins + torch.arange(width, device=device)), 1)
    positions = columns[:, :, None] * size + torch.arange(size, device=device)
    return torch.minimum(columns, lasts), positions.flatten(1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    spec: AttentionSpec,
    sinks_shape: tuple[int, ...],
) -> torch.Tensor:
    """Attention with a soft cap or sink logits, which torch's own product lacks; all but the last two dimensions of
    query, keys and values broadcast. The scores are kept as a whole, in float32 at least."""
    scores = query @ keys.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * spec.scale
    if spec.soft_cap is not None:
        scores = (scores / spec.soft_cap).tanh_() * spec.soft_cap
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if spec.sink_logits is None:
        return scores.softmax(-1).to(values.dtype) @ values
    sinks = spec.sink_logits.to(scores.dtype).view(sinks_shape)
    most = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - most).exp_()
    weights = weights / (weights.sum(-1, keepdim=True) + (sinks - most).exp())
    return weights.to(values.dtype) @ values


def _mask(
    queries: torch.Tensor, keys: torch.Tensor, spec: AttentionSpec, slopes: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """True where a query sees a key, both by their positions; with slopes, what is added to their product."""
    distances = queries - keys
    visible = distances >= 0
    if spec.window is not None:
        visible &= (distances < spec.window) | (keys < spec.sink_tokens)
    if slopes is None:
        return visible
    return (-slopes * distances).masked_fill(~visible, float("-inf")).to(dtype)


def _groups(lengths: list[int]) -> list[tuple[int, int]]:
    """Neighbours that share a padded gather: none more than twice as long as the first, all within GATHERED_TOKENS."""
    groups, begin = [], 0
    for end in range(1, len(lengths) + 1):
        longest = max(lengths[begin : end + 1])
        full = end == len(lengths) or (end + 1 - begin) * longest > GATHERED_TOKENS
        if full or longest > 2 * lengths[begin] + 64:
            groups.append((begin, end))
            begin = end
    return groups
