"""What the host knows of a step, as one array of integers: rows of tables that stay, instead of lists of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from engine.request.plan import ScheduledTokens
from engine.request.request import Request

UNKNOWN = -1  # a token that the device drew and the host has not read
ALIGNED = 4  # numbers: each part begins at 16 bytes, or kernels would be compiled for every way in which it may not
NOBODY = -1  # the row of a padding sequence; as an index it names the tables' last row, which belongs to no request


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Parts of one int32 array, on the host or on the device."""

    whole: np.ndarray
    rows: np.ndarray  # [num_sequences]
    query_start: np.ndarray  # [num_sequences + 1]: new tokens, added up
    past: np.ndarray  # [num_sequences]
    known_ids: np.ndarray  # [num_tokens], or UNKNOWN
    sample_tokens: np.ndarray  # [num_sampling]: which tokens are followed by a draw
    sample_rows: np.ndarray  # [num_sampling]: whose they are
    fills: np.ndarray  # [2, n]: rows, and the block that all their columns get first
    changes: np.ndarray  # [3, n]: rows, columns, blocks
    begun: np.ndarray  # [n] blocks whose first slots this step fills, and not the last
    copies: np.ndarray  # [2, n] blocks, from and to, before all else; all are read before any is written


class StableRows:
    """The row of each request that has blocks, from its first step until it ends or gives its blocks away."""

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
        """A step that is under way may still use the row: the next owner's steps come after it."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)


def pack(
    items: Sequence[ScheduledTokens], stable: StableRows, block_size: int, copies: Sequence[tuple[int, int]] = ()
) -> PackedStep:
    """`items` in the order in which they stand in the batch. Looks at the blocks that changed since the last time."""
    rows, lengths, past, known, tokens, drawing = [], [], [], [], [], []
    fills, changes, begun = ([], []), ([], [], []), []
    for item in items:
        request, begin, new = item.request, item.past_tokens, item.new_tokens
        end, row = begin + new, stable.of(request.id)
        rows.append(row)
        lengths.append(new)
        past.append(begin)
        ids = request.token_ids
        if new == 1:
            known.append(ids[begin] if begin < len(ids) else UNKNOWN)
        else:
            known += ids[begin:end]
            known += [UNKNOWN] * (end - len(ids))
        if item.samples:
            tokens.append(len(known) - 1)
            drawing.append(row)
        if request.changed_from < len(request.blocks):
            _note_changes(request, row, fills, changes)
        if end % block_size and end - end % block_size >= begin:
            begun.append(request.blocks[end // block_size])
    starts = [0, *accumulate(lengths)]
    sources, targets = zip(*copies, strict=True) if copies else ((), ())
    filled, changed, copied = ([*chain.from_iterable(columns)] for columns in (fills, changes, (sources, targets)))
    parts = (rows, starts, past, known, tokens, drawing, filled, changed, begun, copied)
    whole: list[int] = []
    for part in parts:
        whole += part
        whole += [0] * (-len(part) % ALIGNED)
    return _split(np.array(whole, dtype=np.int32), [len(part) for part in parts])


def empty_step() -> PackedStep:
    """A step of nobody."""
    return _split(np.zeros(ALIGNED, dtype=np.int32), (0, 1, *[0] * 8))


def _note_changes(request: Request, row: int, fills: tuple[list, list], changes: tuple[list, list, list]) -> None:
    """What the tables do not hold yet. Columns behind the last block get the first one: whoever reads them, masked,
    finds numbers of this request."""
    first = request.changed_from
    if first == 0:
        fills[0].append(row)
        fills[1].append(request.blocks[0])
    count = len(request.blocks) - first
    changes[0].extend([row] * count)
    changes[1].extend(range(first, first + count))
    changes[2].extend(request.blocks[first:])
    request.changed_from = len(request.blocks)


def _split(whole: np.ndarray, lengths: Sequence[int]) -> PackedStep:
    parts, begin = [], 0
    for length in lengths:
        parts.append(whole[begin : begin + length])
        begin += length + -length % ALIGNED
    *plain, fills, changes, begun, copies = parts
    return PackedStep(whole, *plain, fills.reshape(2, -1), changes.reshape(3, -1), begun, copies.reshape(2, -1))
