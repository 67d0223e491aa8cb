"""Tables on the device with the blocks and the last sampled id of each row. A step's inputs are made from them, so that
it need not wait until the host has read the tokens of the step before."""

from dataclasses import dataclass

import numpy as np
import torch

from sojourn.engine.compute.buffers import to_device
from sojourn.engine.runner.rows import PADDING_ROW, PackedStep, empty_step, split


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step on the device."""

    ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slots: torch.Tensor  # [num_tokens] int64
    query_start: torch.Tensor  # [num_sequences + 1] int32
    contexts: torch.Tensor  # [num_sequences] int32
    block_tables: torch.Tensor  # [num_sequences, columns] int32, or all rows where there are table_rows
    sample_tokens: torch.Tensor  # [num_sampling] int64, or int32 on a GPU, as the next three
    sample_rows: torch.Tensor  # [num_sampling]
    blocks_to_zero: torch.Tensor  # [n]
    copies: torch.Tensor  # [2, n]
    table_rows: torch.Tensor | None = None  # [num_sequences] int32: see AttentionInputs


class HostTables:
    """For a CPU: in numpy, because its steps are too short for the overhead of small tensors.

    All calls take effect in the order of the device's work.
    """

    def __init__(self, max_rows: int, max_blocks: int, block_size: int):
        self._block_size = block_size
        self._blocks = np.zeros((max_rows + 1, max_blocks), dtype=np.int32)
        self._last_ids = np.zeros(max_rows + 1, dtype=np.int64)

    def update(self, step: PackedStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Applies the block table updates; returns `sample_rows`, `blocks_to_zero` and `copies` of the step."""
        if step.block_table_updates.size:
            if step.row_fills.size:
                self._blocks[step.row_fills[0]] = step.row_fills[1][:, None]
            rows, columns, blocks = step.block_table_updates
            self._blocks[rows, columns] = blocks
        parts = (step.sample_rows, step.blocks_to_zero, step.copies)
        return tuple(torch.from_numpy(part.astype(np.int64)) for part in parts)

    def inputs(self, step: PackedStep, width: int) -> StepTensors:
        """Applies the block table updates, and makes the step's tensors; block tables have `width` columns at least."""
        sample_rows, blocks_to_zero, copies = self.update(step)
        rows, past, starts = step.rows, step.past, step.query_start
        new = starts[1:] - starts[:-1]
        ids = step.known_ids.astype(np.int64)
        if len(ids) == len(rows):
            token_rows, positions = rows, past.astype(np.int64)
        else:
            token_rows = np.repeat(rows, new)
            positions = np.arange(len(ids)) + np.repeat(past - starts[:-1], new)
        if ids.size and ids.min() < 0:
            unknown = ids < 0
            ids[unknown] = self._last_ids[token_rows[unknown]]
        blocks = self._blocks[token_rows, positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        contexts = past + new
        if rows.size and rows.min() < 0:
            slots[token_rows < 0] = -1
            contexts[rows < 0] = 0
        arrays = (ids, positions, slots, starts, contexts, self._blocks[rows, :width])
        sample_tokens = torch.from_numpy(step.sample_tokens.astype(np.int64))
        return StepTensors(*map(torch.from_numpy, arrays), sample_tokens, sample_rows, blocks_to_zero, copies)

    def remember(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """These rows sampled `ids`. Ids below 0 are no tokens: what follows them is dropped, but must be valid."""
        self._last_ids[rows.numpy()] = ids.numpy().clip(min=0)

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        """What these rows sampled last [num_rows], as a copy."""
        return torch.from_numpy(self._last_ids[rows.numpy()])

    def static(self, size: int) -> "HostStatic":
        return HostStatic(self, size, self._blocks.shape[1])


class HostStatic:
    """The inputs of decode steps of one size, in memory that does not move: a graph reads them.

    `draw_rows` [size] int32 are the rows of the sampler's table; -1: none.
    """

    def __init__(self, tables: HostTables, size: int, width: int):
        self._tables, self._size, self._width = tables, size, width
        self._step = padded(empty_step(), size)
        self.draw_rows = torch.full((size,), PADDING_ROW, dtype=torch.int32)

    def load(self, step: PackedStep, draw_rows: list[int]) -> None:
        """A step of decodes, of this size or smaller. The rest is padding, with slot -1 and an empty context."""
        self._step = padded(step, self._size)
        self.draw_rows.fill_(PADDING_ROW)[: len(draw_rows)] = torch.tensor(draw_rows, dtype=torch.int32)

    def tensors(self) -> StepTensors:
        """Computed again, in the same memory, at each replay."""
        return self._tables.inputs(self._step, self._width)


class DeviceTables:
    """HostTables for a GPU: one asynchronous copy a step, and one kernel that makes its inputs. `gathers` is for an
    attention that cannot index the tables itself."""

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device, gathers: bool):
        from sojourn.engine.compute.triton import step_inputs  # Triton is slow to import, and not everywhere

        self._kernel = step_inputs
        self._block_size = block_size
        self._device = device
        self.blocks = torch.zeros((max_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self.last_ids = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.gathers = gathers

    def inputs(self, step: PackedStep, width: int) -> StepTensors:
        sent = self._send(step)
        built = self.kernel_inputs(sent.rows, sent.query_start, sent.past, sent.known_ids)
        return StepTensors(
            built.ids, built.positions, built.slots, sent.query_start, built.contexts,
            self.blocks[sent.rows.long()] if self.gathers else self.blocks,
            sent.sample_tokens, sent.sample_rows, sent.blocks_to_zero, sent.copies,
            None if self.gathers else sent.rows,
        )  # fmt: skip

    def update(self, step: PackedStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sent = self._send(step)
        return sent.sample_rows, sent.blocks_to_zero, sent.copies

    def remember(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        self.last_ids[rows.long()] = ids.clamp(min=0).int()

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last_ids[rows]

    def static(self, size: int) -> "DeviceStatic":
        return DeviceStatic(self, size, self._kernel.empty_step_inputs(size, size, self._device))

    def kernel_inputs(
        self, rows: torch.Tensor, starts: torch.Tensor, past: torch.Tensor, known: torch.Tensor, room=None
    ):
        """The kernel's StepInputs, in `room` if given."""
        step = self._kernel.StepRows(rows, starts, past, known, self.blocks, self.last_ids)
        return self._kernel.step_inputs(step, self._block_size, room)

    def _send(self, step: PackedStep) -> PackedStep:
        """The step on the device, after the block table updates."""
        sent = split(to_device(torch.from_numpy(step.whole), self._device), step.lengths)
        if step.block_table_updates.size:
            places = split(sent.whole.long(), step.lengths)  # torch converts what is no int64 part by part
            if step.row_fills.size:
                self.blocks[places.row_fills[0]] = sent.row_fills[1][:, None]
            rows, columns, _ = places.block_table_updates
            self.blocks[rows, columns] = sent.block_table_updates[2]
        return sent


class DeviceStatic:
    """HostStatic for a GPU. `room` is memory for the inputs of `size` decodes."""

    def __init__(self, tables: DeviceTables, size: int, room):
        self._tables, self._size, self._room = tables, size, room
        self._sent = torch.zeros(4 * size, dtype=torch.int32, device=room.ids.device)
        self._sent[:size] = PADDING_ROW
        self.draw_rows = self._sent[3 * size :].fill_(PADDING_ROW)
        self._starts = torch.arange(size + 1, dtype=torch.int32, device=room.ids.device)
        self._none = self._starts[:0]

    def load(self, step: PackedStep, draw_rows: list[int]) -> None:
        step, rows = padded(step, self._size), np.full(self._size, PADDING_ROW, dtype=np.int32)
        rows[: len(draw_rows)] = draw_rows
        sent = np.concatenate((step.rows, step.past, step.known_ids, rows))
        self._sent.copy_(torch.from_numpy(sent).pin_memory(), non_blocking=True)

    def tensors(self) -> StepTensors:
        rows, past, known, _ = self._sent.view(4, -1)
        tables = self._tables
        built = tables.kernel_inputs(rows, self._starts, past, known, self._room)
        return StepTensors(
            built.ids, built.positions, built.slots, self._starts, built.contexts,
            tables.blocks[rows.long()] if tables.gathers else tables.blocks,
            self._starts[:-1], rows, self._none, self._none.view(2, 0), None if tables.gathers else rows,
        )  # fmt: skip


Tables = HostTables | DeviceTables


def make_tables(max_rows: int, max_blocks: int, block_size: int, device: torch.device, *, gathers: bool) -> Tables:
    if device.type == "cuda":
        return DeviceTables(max_rows, max_blocks, block_size, device, gathers)
    return HostTables(max_rows, max_blocks, block_size)


StaticInputs = HostStatic | DeviceStatic


def padded(step: PackedStep, size: int) -> PackedStep:
    """A step of decodes as one of `size`, without its block table updates."""
    missing = size - len(step.rows)
    rows = np.pad(step.rows, (0, missing), constant_values=PADDING_ROW)
    starts = np.arange(size + 1, dtype=np.int32)
    past, known = (np.pad(part, (0, missing)) for part in (step.past, step.known_ids))
    none = np.empty(0, dtype=np.int32)
    return PackedStep(
        none, rows, starts, past, known, starts[:-1], rows, none.reshape(2, 0), none.reshape(3, 0), none,
        none.reshape(2, 0),
    )  # fmt: skip
