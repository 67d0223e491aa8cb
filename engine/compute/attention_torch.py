"""The torch reference: gathers keys and values by block table. Runs on any device and is the oracle for the others."""

import torch
import torch.nn.functional as F

from engine.compute.attention import AttentionInputs

GATHERED_TOKENS = 65_536  # KV positions that one group of single-token sequences gathers at most, padding included


class TorchAttention:
    """Single-token sequences in groups of like length, each one padded batch with the query heads of a KV head folded
    into the query length; the longer ones one after another."""

    def begin(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs
        tables, size, singles = inputs.block_tables, inputs.block_size, inputs.num_single
        device = tables.device
        self._groups = []
        for begin, end in _groups(inputs.context_lens[:singles]):
            lengths = torch.tensor(inputs.context_lens[begin:end], device=device)
            blocks = tables[begin:end, : -(-max(inputs.context_lens[begin:end]) // size)]
            positions = torch.arange(blocks.shape[1] * size, device=device)
            self._groups.append((begin, end, blocks, (positions < lengths[:, None])[:, None, None, :]))
        self._chunks = []
        begin = singles
        for index in range(singles, len(inputs.query_lens)):
            new, context = inputs.query_lens[index], inputs.context_lens[index]
            mask = None  # nothing in the cache: plain causal attention among the new tokens
            if context > new:
                positions = torch.arange(context, device=device)
                mask = positions <= positions[context - new :, None]
            self._chunks.append((begin, begin + new, tables[index : index + 1, : -(-context // size)], context, mask))
            begin += new

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_cache: torch.Tensor
    ) -> torch.Tensor:
        layer_cache[0].index_copy_(0, self._inputs.slots, key)
        layer_cache[1].index_copy_(0, self._inputs.slots, value)
        keys, values = layer_cache.unflatten(1, (-1, self._inputs.block_size))  # whole blocks are gathered, not slots
        output = torch.empty_like(query)
        for begin, end, blocks, mask in self._groups:
            folded = query[begin:end].unflatten(1, (keys.shape[2], -1))  # [sequences, kv_heads, group, head_dim]
            attended = F.scaled_dot_product_attention(
                folded, _gather(keys, blocks), _gather(values, blocks), attn_mask=mask
            )
            output[begin:end] = attended.flatten(1, 2)
        for begin, end, blocks, context, mask in self._chunks:
            attended = F.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1)[None],
                _gather(keys, blocks)[:, :, :context],
                _gather(values, blocks)[:, :, :context],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            output[begin:end] = attended[0].transpose(0, 1)
        return output


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


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block_size, heads, head_dim] by [rows, blocks] → [rows, heads, blocks * block_size, head_dim]."""
    gathered = cache.index_select(0, blocks.flatten()).view(*blocks.shape, *cache.shape[1:])
    return gathered.flatten(1, 2).transpose(1, 2)
