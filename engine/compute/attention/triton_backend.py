"""Attention by Triton kernels: the backend for GPUs. Its oracle is torch_backend.

`begin` keeps what the host knows, and the first layer of each kind has the device plan the step; neither waits for the
device. Memory is sized by `reserve`, and grids by the numbers of sequences and new tokens alone, so a step can be
captured in a CUDA graph and replayed with other lengths.
"""

import math
from dataclasses import dataclass

import torch

from sojourn.engine.compute.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.kv_formats import KV_INT4
from sojourn.engine.compute.triton.attention import ITEM_FIELDS, attend_kernel
from sojourn.engine.compute.triton.attention_plan import PLAN_FIELDS, plan_kernel
from sojourn.engine.compute.triton.attention_tiles import SHORT_TOKENS, Shape, Tiles, long_tiles, padded, short_tiles
from sojourn.engine.compute.triton.kv_formats import format_of

LOG2_E = math.log2(math.e)
CHUNK = 128  # sequences, or items, that a planning program looks at at once
COMBINED = 1024  # partial results that a warp reads at once
COMBINED_SEGMENTS = 8  # partial results that a warp reads at once are of so many segments at most


@dataclass(frozen=True, slots=True)
class Kind:
    """What layers must have in common to share a plan of one kind of launch."""

    short: bool  # sequences of at most SHORT_TOKENS new tokens, or those of more
    tiles: Tiles
    num_kv_heads: int
    group: int
    main: int  # dimensions of a value, padded
    window: int  # 0: none
    target: int  # programs that all work is cut into
    places: int  # programs that run at once
    sink_tokens: int = 0

    @property
    def most_work(self) -> int:
        """Bound of a KV head's segments: the planner counts a prompt's mean block, half of its longest at least."""
        return (self.target if self.short else 2 * self.target) // self.num_kv_heads

    def most_extra(self, num_sequences: int) -> int:
        """Bound of a KV head's items beyond one a block. Where the last wave runs half empty, each of `num_sequences`
        may be cut in two, unless they make so many waves that the last one does not matter."""
        return max(self.most_work, min(num_sequences, 2 * self.most_work)) if self.short else self.most_work

    @property
    def combined(self) -> tuple[int, int]:
        """Rows and segments that are put together at once."""
        rows = min(4 if self.short else 16, self.tiles.block_m)
        segments = COMBINED * self.tiles.num_warps // (rows * self.main)
        return rows, max(1, min(COMBINED_SEGMENTS, 1 << segments.bit_length() - 1)) if segments else 1

    def num_blocks(self, num_new: int) -> int:
        return -(-num_new * self.group // self.tiles.block_m)


@dataclass(frozen=True, slots=True)
class Room:
    """Device memory of one kind: see the kernels for what stands in it."""

    plan: torch.Tensor
    items: torch.Tensor
    arrivals: torch.Tensor
    partial_output: torch.Tensor
    partial_lse: torch.Tensor


class TritonAttention(AttentionBackend):
    """Attention on one device.

    `short` and `long` replace the tiles that would be chosen, and `num_multiprocessors` what the device says: for
    measurements and tests.
    """

    indexes_tables = True
    reads_behind_contexts = False

    def __init__(
        self,
        device: torch.device,
        *,
        num_multiprocessors: int | None = None,
        short: Tiles | None = None,
        long: Tiles | None = None,
    ) -> None:
        if num_multiprocessors is None:
            num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._device = device
        self._num_multiprocessors = num_multiprocessors
        self._short, self._long = short, long
        self._max_sequences = self._max_tokens = 0
        self._rooms: dict[Kind, Room] = {}
        self._slopes: dict[AttentionSpec, torch.Tensor] = {}

    def another(self) -> "TritonAttention":
        return TritonAttention(
            self._device, num_multiprocessors=self._num_multiprocessors, short=self._short, long=self._long
        )

    def reserve(self, max_sequences: int, max_tokens: int) -> None:
        """Makes room for steps of so many sequences and new tokens. A graph captured before is void if this grows."""
        max_tokens = max(max_tokens, max_sequences)
        if max_sequences > self._max_sequences or max_tokens > self._max_tokens:
            self._max_sequences = max(self._max_sequences, max_sequences)
            self._max_tokens = max(self._max_tokens, max_tokens)
            self._rooms.clear()

    def begin(self, inputs: AttentionInputs) -> None:
        self.reserve(len(inputs.query_lens), sum(inputs.query_lens))
        self.inputs = inputs
        self._short_lens = [new for new in inputs.query_lens if new <= SHORT_TOKENS]
        self._long_lens = [new for new in inputs.query_lens if new > SHORT_TOKENS]
        self._planned: set[Kind] = set()

    def attend(self, query: torch.Tensor, layer_cache: LayerCache, spec: AttentionSpec) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim], the last dimension dense, in float32, float16 or bfloat16; the cache
        in the same dtype or quantised. Returns [num_tokens, num_heads, value_dim]."""
        num_tokens, num_heads, head_dim = query.shape
        planes, _, block_size, num_kv_heads, _ = layer_cache.values.shape
        assert block_size == self.inputs.block_size, "the cache and the tables have blocks of one size"
        whole = planes == 2 and spec.value_dim == head_dim
        assert whole or layer_cache.values.dtype != KV_INT4, "a vector's halves are not those of shorter values"
        wide = layer_cache.values[0].numel() >= 2**31
        group, itemsizes = num_heads // num_kv_heads, (query.itemsize, layer_cache.values.itemsize)
        shape = Shape(group, head_dim, spec.value_dim, *itemsizes, wide)
        output = query.new_empty(num_tokens, num_heads, spec.value_dim)
        if self._short_lens:
            tiles = self._short or short_tiles(shape, max(self._short_lens))
            self._launch(query, layer_cache, spec, output, self._kind(True, tiles, shape, num_kv_heads, spec))
        if self._long_lens:
            tiles = self._long or long_tiles(shape)
            self._launch(query, layer_cache, spec, output, self._kind(False, tiles, shape, num_kv_heads, spec))
        return output

    def _kind(self, short: bool, tiles: Tiles, shape: Shape, num_kv_heads: int, spec: AttentionSpec) -> Kind:
        places = tiles.resident * self._num_multiprocessors
        target, main = max(tiles.waves * places, num_kv_heads), padded(spec.value_dim)
        return Kind(short, tiles, num_kv_heads, shape.group, main, spec.window or 0, target, places, spec.sink_tokens)

    def _launch(
        self, query: torch.Tensor, layer_cache: LayerCache, spec: AttentionSpec, output: torch.Tensor, kind: Kind
    ) -> None:
        room = self._rooms.get(kind) or self._make_room(kind)
        num_items = self._num_items(kind)
        if kind not in self._planned:
            self._plan(kind, room, num_items)
            self._planned.add(kind)
        inputs, tiles, values, scales = self.inputs, kind.tiles, layer_cache.values, layer_cache.scales
        latent = values.shape[0] == 1
        head_dim, (token_stride, head_stride) = query.shape[2], layer_cache.strides()
        attend_kernel[(num_items * kind.num_kv_heads,)](
            query,
            values[0],
            None if latent else values[1],
            None if scales is None else scales[0],
            None if scales is None else scales[-1],
            self._device_slopes(spec),
            spec.sink_logits,
            output,
            room.partial_output,
            room.partial_lse,
            room.arrivals,
            inputs.block_tables,
            inputs.table_rows,
            inputs.query_start,
            inputs.contexts,
            room.items,
            spec.scale * LOG2_E,
            query.stride(0),
            query.stride(1),
            inputs.block_tables.stride(0),
            NUM_KV_HEADS=kind.num_kv_heads,
            GROUP=kind.group,
            HEAD_DIM=head_dim,
            VALUE_DIM=spec.value_dim,
            MAIN=kind.main,
            REST=padded(head_dim - spec.value_dim) if head_dim > spec.value_dim else 0,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_SIZE=inputs.block_size,
            TOKEN_STRIDE=token_stride,
            HEAD_STRIDE=head_stride,
            WINDOW=kind.window,
            SINK_TOKENS=kind.sink_tokens if kind.window else 0,
            SOFT_CAP=0.0 if spec.soft_cap is None else spec.soft_cap / spec.scale,
            SLOPED=spec.alibi_slopes is not None,
            LATENT=latent,
            FORMAT=format_of(values.dtype),
            WIDE=values[0].numel() >= 2**31,
            TWO_LOOPS=tiles.two_loops and kind.window == 0,
            ROWS=kind.combined[0],
            SEGMENTS=kind.combined[1],
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )

    def _num_items(self, kind: Kind) -> int:
        lens = self._short_lens if kind.short else self._long_lens
        return sum(map(kind.num_blocks, lens)) + kind.most_extra(len(lens))

    def _plan(self, kind: Kind, room: Room, num_items: int) -> None:
        inputs, tiles = self.inputs, kind.tiles
        num_sequences = len(inputs.query_lens)
        plan_kernel[(-(-num_items // CHUNK),)](
            inputs.query_start,
            inputs.contexts,
            room.plan,
            room.items,
            num_sequences,
            1 if kind.short else SHORT_TOKENS + 1,
            SHORT_TOKENS if kind.short else 2**31 - 1,
            kind.target,
            kind.places,
            tiles.least_tiles,
            kind.most_extra(len(self._short_lens)),
            num_sequences.bit_length(),
            num_items,
            NUM_KV_HEADS=kind.num_kv_heads,
            GROUP=kind.group,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            WINDOW=kind.window and kind.window + -(-kind.sink_tokens // tiles.block_n) * tiles.block_n,
            SLACK=tiles.slack,
            RAGGED=kind.short,
            CHUNK=CHUNK,
        )

    def _make_room(self, kind: Kind) -> Room:
        max_blocks = kind.num_blocks(self._max_tokens) + self._max_sequences
        most_extra = kind.most_extra(self._max_sequences)
        partials = (2 * most_extra if kind.short else most_extra) * kind.num_kv_heads  # a cut makes two of one

        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=self._device)

        room = Room(
            empty(self._max_sequences + 1, PLAN_FIELDS.value, dtype=torch.int32),
            empty(max_blocks + most_extra, ITEM_FIELDS.value, dtype=torch.int32),
            empty(partials, dtype=torch.int32).zero_(),
            empty(partials, kind.tiles.block_m, kind.main, dtype=torch.float32),
            empty(partials, kind.tiles.block_m, dtype=torch.float32),
        )
        self._rooms[kind] = room
        return room

    def _device_slopes(self, spec: AttentionSpec) -> torch.Tensor | None:
        """Over the scale, because the kernel scales its logits after it has added them."""
        if spec.alibi_slopes is None:
            return None
        if spec not in self._slopes:
            slopes = [slope / spec.scale for slope in spec.alibi_slopes]
            self._slopes[spec] = torch.tensor(slopes, dtype=torch.float32, device=self._device)
        return self._slopes[spec]
