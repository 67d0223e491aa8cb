"""The inputs of a drafter's own forward pass: it computes other tokens than the step, in the same blocks."""

from collections.abc import Sequence

import numpy as np
import torch

from sojourn.engine.compute.attention.backend import AttentionInputs
from sojourn.engine.compute.buffers import to_device


class DraftTables:
    """The block tables of some sequences, sent to the device once for all passes of a chain."""

    def __init__(self, blocks: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int, device: torch.device):
        """`lengths` are the most positions of each sequence that a pass sees."""
        counts = [-(-length // block_size) for length in lengths]
        host = np.empty((len(blocks), max(counts)), dtype=np.int32)
        for row, (table, count) in enumerate(zip(blocks, counts, strict=True)):
            host[row, :count] = table[:count]
            host[row, count:] = table[0]  # a masked read of these finds numbers of the same sequence
        self._host, self._block_size, self._device = host, block_size, device
        self._tables = to_device(torch.from_numpy(host), device)

    def inputs(
        self, begins: np.ndarray, counts: np.ndarray, rows: np.ndarray | None = None
    ) -> tuple[torch.Tensor, AttentionInputs]:
        """Positions, and where they are, of `counts` [n] new tokens from `begins` [n] of the sequences `rows` [n], by
        default all. Sequences with one new token must stand first."""
        host, tables = self._host, self._tables
        if rows is not None and len(rows) < len(host):
            host, tables = host[rows], tables[torch.from_numpy(rows).to(tables.device)]
        starts = np.concatenate(([0], np.cumsum(counts)))
        of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], counts)
        size = self._block_size
        slots = host[of_token, positions // size].astype(np.int64) * size + positions % size
        contexts = begins + counts
        places = self._sent(slots)
        return self._sent(positions), AttentionInputs(
            counts.tolist(), contexts.tolist(), int((counts == 1).sum()), places, tables, size,
            self._sent(starts.astype(np.int32)), self._sent(contexts.astype(np.int32)),
        )  # fmt: skip

    def _sent(self, values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(values), self._device)
