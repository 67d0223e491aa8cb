"""Samples by the kernels of engine.compute.triton, instead of torch operations, and gives the same ids."""

import torch

from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.logits import LogitEdits
from sojourn.engine.compute.triton.edits import edit_rows
from sojourn.engine.compute.triton.sampling import COLUMNS, draw_rows
from sojourn.engine.sampling import GREEDY_BELOW, SamplingParams
from sojourn.engine.token.sampling.state import RowTable, TokenHistory


class FusedSampler:
    """Owns the table of sampling parameters: a stable row for each live request, so that a step sends only which rows
    it has.

    Beyond `max_rows` the table grows by doubling, and moves: for a CUDA graph it must have its final size.
    """

    def __init__(self, device: torch.device, history: TokenHistory, biases: RowTable, max_rows: int):
        self._device = device
        self._history, self._biases = history, biases
        self._parameters = RowTable(COLUMNS, torch.int64, device, max_rows)

    def enter(self, params: SamplingParams) -> int:
        row = self._parameters.take()
        temperature = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
        controls = torch.tensor([temperature, params.top_p, params.min_p, params.top_n_sigma], dtype=torch.float64)
        whole = torch.tensor([params.top_k, params.seed, 0, 0], dtype=torch.int64)
        self._parameters.values[row] = to_device(torch.cat((controls.view(torch.int64), whole)), self._device)
        return row

    def leave(self, row: int) -> None:
        self._parameters.give_back(row)

    def sample(
        self,
        logits: torch.Tensor,
        rows: list[int],
        positions: list[int],
        edits: LogitEdits | None,
        edited_rows: torch.Tensor | None,
        masks: torch.Tensor | None,
        remember: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Sampler.sample; OVERFLOWED where the logits are no numbers. `rows` are those of the table; `edited_rows`
        [rows] int32: the edited row of each, or -1."""
        # As many bits as in a graph: else the kernels would be compiled for both.
        rows, positions = to_device(torch.tensor([rows, positions], dtype=torch.int32), self._device).unbind(0)
        if edits is None:
            return self.draw_rows(logits, rows, positions, remember)
        logits = logits.float()
        edited = edit_rows(logits, edits, *self._history.tables, self._biases.values, masks)
        edits.add(edited)
        return draw_rows(logits, rows, positions, self._parameters.values, edited, edited_rows, remember=remember)

    def draw_rows(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        remember: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Ids [rows] int64 for rows without edits; a row of -1 is padding and gives -1. A CUDA graph can hold it.

        `rows` and `positions` [rows] int32; for `remember` see engine.compute.triton.sampling.draw_rows.
        """
        return draw_rows(logits, rows, positions, self._parameters.values, remember=remember)

    def warm_up(self, logits: torch.Tensor, last_ids: torch.Tensor) -> None:
        """Compiles what the draws of any request need, with logits [1, vocab_size] of the dtype that the model gives:
        the kernels for rows with and without edits, and for a grammar's masks. `last_ids` [max_rows] int32 stay."""
        vocab_size, row = logits.shape[1], self.enter(SamplingParams(max_tokens=1))
        none = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        edits = LogitEdits(none + 1, none, none, none, torch.zeros((1, 3), device=self._device))
        masks = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32, device=self._device)
        remember = (none.int(), last_ids)
        self.sample(logits, [row], [0], None, None, None, remember)
        for mask in (None, masks):
            self.sample(logits, [row], [0], edits, none.int() + 1, mask, remember)
        self.leave(row)
