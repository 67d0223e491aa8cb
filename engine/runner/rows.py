"""A step as one array of integers. It names rows of the device's tables, instead of lists of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain

import numpy as np

from sojourn.engine.memory.window import HOLE
from sojourn.engine.request.plan import ScheduledTokens
from sojourn.engine.request.request import Request

UNKNOWN = -1  # a token that the device sampled and the host has not read
ALIGNED = 4  # numbers: each part begins at 16 bytes, or kernels would be compiled for each other alignment
_ROWS = (1, 1, 1, 1, 1, 1, 2, 3, 1, 2)  # of each part of a packed step
PADDING_ROW = -1  # of a padding sequence; as an index it names the tables' last row, which no request has


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Parts of one int32 array: numpy's on the host, tensors on the device."""

    whole: np.ndarray
    rows: np.ndarray  # [num_sequences]
    query_start: np.ndarray  # [num_sequences + 1]: new tokens, added up
    past: np.ndarray  # [num_sequences]
    known_ids: np.ndarray  # [num_tokens], or UNKNOWN
    sample_tokens: np.ndarray  # [num_sampling]: the tokens behind which one is sampled
    sample_rows: np.ndarray  # [num_sampling]: their rows
    row_fills: np.ndarray  # [2, n]: rows, and the block that fills all their columns before the updates
    block_table_updates: np.ndarray  # [3, n]: rows, columns, blocks
    blocks_to_zero: np.ndarray  # [n]: the step writes their first slots, and not the last
    copies: np.ndarray  # [2, n] blocks, from and to, before all else; all are read before any is written

    @property
    def lengths(self) -> list[int]:
        """Of the parts."""
        return [getattr(self, part.name).size for part in fields(self)[1:]]


class StableRows:
    """The row of each request that has blocks, from its first step until it ends or is preempted."""

    def __init__(self, max_rows: int):
        self._free = list(range(max_rows - 1, -1, -1))
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = self._free.pop()
        return row

    def release(self, request_id: str) -> None:
        """A step under way may still use the row: the next owner's steps come after it."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)


def pack(
    items: Sequence[ScheduledTokens], stable: StableRows, block_size: int, copies: Sequence[tuple[int, int]] = ()
) -> PackedStep:
    """`items` in the order of the batch, with the blocks that changed since the last call."""
    rows, lengths, past, known, sample_tokens, sample_rows = [], [], [], [], [], []
    fills, updates, blocks_to_zero = ([], []), ([], [], []), []
    for item in items:
        request, begin, new = item.request, item.past_tokens, item.new_tokens
        end, row = begin + new, stable.of(request.id)
        rows.append(row)
        lengths.append(new)
        past.append(begin)
        ids, starts_at = request.token_ids, len(known)
        if new == 1:
            known.append(ids[begin] if begin < len(ids) else UNKNOWN)
        else:
            known += ids[begin:end]
            known += item.drafts
            known += [UNKNOWN] * (starts_at + new - len(known))
        if item.samples:
            drafted = len(item.drafts)
            sample_tokens += range(len(known) - 1 - drafted, len(known))
            sample_rows += [row] * (1 + drafted)
            ahead = -(-end // block_size)
            if ahead < len(request.blocks):  # blocks for drafts of the next step, or of rejected ones
                blocks_to_zero += request.blocks[max(ahead, request.first_changed_block) :]
        if request.first_changed_block < len(request.blocks):
            _add_updates(request, row, fills, updates)
        if end % block_size and end - end % block_size >= begin:
            blocks_to_zero.append(request.blocks[end // block_size])
    starts = [0, *accumulate(lengths)]
    sources, targets = zip(*copies, strict=True) if copies else ((), ())
    flat = ([*chain.from_iterable(columns)] for columns in (fills, updates, (sources, targets)))
    filled, updated, copied = flat
    parts = (rows, starts, past, known, sample_tokens, sample_rows, filled, updated, blocks_to_zero, copied)
    whole: list[int] = []
    for part in parts:
        whole += part
        whole += [0] * (-len(part) % ALIGNED)
    return split(np.array(whole, dtype=np.int32), [len(part) for part in parts])


def empty_step() -> PackedStep:
    """A step without sequences."""
    return split(np.zeros(ALIGNED, dtype=np.int32), (0, 1, *[0] * 8))


def _add_updates(request: Request, row: int, fills: tuple[list, list], updates: tuple[list, list, list]) -> None:
    """The blocks that the tables lack. Columns behind the last block get the first one, and holes the last: a masked
    read of them finds numbers of the same request."""
    first, last = request.first_changed_block, request.blocks[-1]
    if first == 0:
        fills[0].append(row)
        fills[1].append(last if request.blocks[0] == HOLE else request.blocks[0])
    count = len(request.blocks) - first
    updates[0].extend([row] * count)
    updates[1].extend(range(first, first + count))
    updates[2].extend([last if block == HOLE else block for block in request.blocks[first:]])
    request.first_changed_block = len(request.blocks)


def split(whole, lengths: Sequence[int]) -> PackedStep:
    """The parts of an array or a tensor, which have these lengths."""
    parts, begin = [], 0
    for length, rows in zip(lengths, _ROWS, strict=True):
        part = whole[begin : begin + length]
        parts.append(part if rows == 1 else part.reshape(rows, length // rows))
        begin += length + -length % ALIGNED
    return PackedStep(whole, *parts)
