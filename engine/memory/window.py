"""Which blocks of a sequence some layer may still read, where every layer has a sliding window. Pure bookkeeping."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs numpy, and the help of the program loads this module
    from sojourn.metrics.compute.cost_model import ModelShape

HOLE = -1  # in a sequence's list of blocks: no later position reads what was there


@dataclass(frozen=True, slots=True)
class FreedWindow:
    """Of each sequence the last `tokens` are read again, and the first `sink_tokens`; blocks between are given back.

    One step computes `most_new` tokens of a sequence at most, and two steps may be under way. The last full block stays
    in any case: it is the parent of the next one.
    """

    tokens: int
    sink_tokens: int
    most_new: int

    def hole(self, num_tokens: int, block_size: int) -> tuple[int, int]:
        """First and end of the blocks that no position from `num_tokens` on reads."""
        begin = -(-self.sink_tokens // block_size)
        dead = num_tokens - max(block_size + 1, self.tokens) + 1
        return begin, max(begin, dead // block_size)

    def most_blocks(self, block_size: int) -> int:
        """That one sequence holds at a time, however long it is."""
        held = max(block_size + 1, self.tokens) - 1 + 2 * self.most_new
        return -(-self.sink_tokens // block_size) + held // block_size + 2

    def admitted_tokens(self, num_computed: int, num_tokens: int) -> int:
        """Tokens for which a request gets blocks at first: what it holds at most, if it is longer than that."""
        ahead = self.tokens + 2 * self.most_new - min(num_computed, self.tokens)
        return min(num_tokens, num_computed + ahead)

    def longest_prefix(self, is_cached: Sequence[bool], block_size: int) -> int:
        """The most full blocks of a chain, so that all blocks that are read behind them are cached."""
        runs, run = [], 0  # cached blocks without a gap, up to each
        for cached in is_cached:
            run = run + 1 if cached else 0
            runs.append(run)
        leading = is_cached.index(False) if False in is_cached else len(is_cached)
        for count in range(len(is_cached), 0, -1):
            begin, end = self.hole(count * block_size, block_size)
            if leading >= min(begin, count) and runs[count - 1] >= count - end:
                return count
        return 0


def freed_window(shape: "ModelShape", most_new: int, *, keeps_all: bool) -> FreedWindow | None:
    """The window behind which blocks are given back, of a model with this shape; `most_new` as in FreedWindow. None
    where a layer reads all tokens, and with settings that keep all."""
    tokens = shape.longest_window
    return None if tokens is None or keeps_all else FreedWindow(tokens, shape.sink_tokens, most_new)
