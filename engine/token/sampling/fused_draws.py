"""Draws by the kernels of engine.compute.triton, instead of the sampler's own torch operations, for the same ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.compute.triton.edits import EditedRows, edit_rows
from engine.compute.triton.sampling import COLUMNS, draw_rows
from engine.sampling import GREEDY_BELOW, SamplingParams
from engine.token.sampling.controls import Controls, Drawer
from engine.token.sampling.penalties import TokenHistory
from engine.token.sampling.row_table import RowTable


@dataclass(frozen=True, slots=True)
class FusedEdits:
    """Rows whose logits are changed before they are drawn from."""

    changed: EditedRows
    edited_rows: torch.Tensor  # [rows] int32: which of them each row of the logits is; -1: none
    penalised: tuple[torch.Tensor, torch.Tensor] | None  # rows of the logits, and of the histories [n]
    changes: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # edited rows, tokens int64, what to add [n]


@dataclass(frozen=True, slots=True)
class FusedInputs:
    """How the rows of one step draw."""

    table_rows: list[int]  # of the table of parameters
    positions: list[int]  # where the drawn tokens will stand
    edits: FusedEdits | None


class FusedDraws:
    """Owns the table of how live requests draw: a stable row each, so that a step sends only which rows it has.

    Beyond `max_rows` the table grows by doubling, and moves: for a CUDA graph it has to be as large as it may get.
    """

    def __init__(self, vocab_size: int, device: torch.device, history: TokenHistory, biases: RowTable, max_rows: int):
        self._vocab_size, self._device = vocab_size, device
        self._history, self._biases = history, biases
        self._parameters = torch.zeros((max_rows, COLUMNS), dtype=torch.int64, device=device)
        self._free = list(range(max_rows - 1, -1, -1))

    def enter(self, params: SamplingParams) -> int:
        """The row of a new request."""
        if not self._free:
            old = len(self._parameters)
            self._parameters = torch.cat((self._parameters, torch.zeros_like(self._parameters)))
            self._free = list(range(2 * old - 1, old - 1, -1))
        row = self._free.pop()
        temperature = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
        controls = torch.tensor([temperature, params.top_p, params.min_p, params.top_n_sigma], dtype=torch.float64)
        whole = torch.tensor([params.top_k, params.seed, 0, 0], dtype=torch.int64)
        self._parameters[row] = self._sent(torch.cat((controls.view(torch.int64), whole)))
        return row

    def leave(self, row: int) -> None:
        self._free.append(row)

    def prepare(
        self, requests: Sequence[Drawer], positions: Sequence[int], controls: Sequence[Controls]
    ) -> FusedInputs:
        rows = [known.draw_row for known in controls]
        edited = [row for row, known in enumerate(controls) if known.edits]
        edits = self._edits(edited, requests, positions, controls) if edited else None
        return FusedInputs(rows, list(positions), edits)

    def draw(self, logits: torch.Tensor, inputs: FusedInputs, masks: torch.Tensor | None) -> torch.Tensor:
        """Sampler.draw."""
        edits = inputs.edits
        rows, stands_at = self._tensor([inputs.table_rows, inputs.positions]).unbind(0)
        if edits is None:
            return self.draw_rows(logits, rows, stands_at)
        edited = edit_rows(logits, edits.changed, *self._history.tables, self._biases.values, masks)
        if edits.changes is not None:
            positions, tokens, values = edits.changes
            edited.index_put_((positions, tokens), values, accumulate=True)
        ids = draw_rows(logits, rows, stands_at, self._parameters, edited, edits.edited_rows)
        if edits.penalised is not None:
            positions, history_rows = edits.penalised
            self._history.count(history_rows, ids[positions].clamp(min=0))
        return ids

    def draw_rows(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Ids [rows] int64 for rows without edits; a row of -1 is padding, and draws -1. A CUDA graph can hold it."""
        return draw_rows(logits, rows, positions, self._parameters)

    def _edits(
        self, edited: list[int], requests: Sequence[Drawer], positions: Sequence[int], controls: Sequence[Controls]
    ) -> FusedEdits:
        which, masked = [-1] * len(requests), 0
        histories, biases, mask_rows, penalties = [], [], [], []
        places, tokens, values = [], [], []
        for place, row in enumerate(edited):
            params, known = requests[row].sampling, controls[row]
            which[row] = place
            histories.append(-1 if known.penalty_row is None else known.penalty_row)
            biases.append(-1 if known.bias_row is None else known.bias_row)
            mask_rows.append(-1 if params.grammar is None else masked)
            masked += params.grammar is not None
            penalties.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
            added, amounts = known.changes(requests[row], positions[row])
            places += [place] * len(added)
            tokens += added
            values += amounts
        penalised = [(row, history) for row, history in zip(edited, histories, strict=True) if history >= 0]
        return FusedEdits(
            EditedRows(
                self._tensor(edited),
                self._tensor(histories),
                self._tensor(biases),
                self._tensor(mask_rows),
                self._tensor(penalties, torch.float32),
            ),
            self._tensor(which, torch.int32),
            tuple(self._tensor(column) for column in zip(*penalised, strict=True)) if penalised else None,
            (self._tensor(places), self._tensor(tokens), self._tensor(values, torch.float32)) if tokens else None,
        )

    def _tensor(self, values: Sequence, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return self._sent(torch.tensor(values, dtype=dtype))

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return tensor
        # From pinned memory, or the host would wait for the step that the device is at.
        return tensor.pin_memory().to(self._device, non_blocking=True)
