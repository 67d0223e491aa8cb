"""Drafts by one layer that reads the target's hidden states: the chain that EAGLE-3 and MTP share.

The layer's entry at position j is made of the target's state at j and the token at j + 1, and predicts the token at
j + 2. So it lags one position behind the target, in slots of the same numbers. From the second draft on the layer reads
its own output in place of the target's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.kv_cache import KVCache, KVLayout, copy_blocks
from sojourn.engine.compute.operations.backend import Operations, Rope, Step
from sojourn.engine.techniques.speculation.proposers.draft_inputs import DraftTables
from sojourn.engine.techniques.speculation.proposers.greedy_chain import greedy_chain
from sojourn.engine.techniques.speculation.proposers.pass_costs import PassCosts
from sojourn.engine.techniques.speculation.proposers.proposer import ComputedStep, Proposal, SequenceStep
from sojourn.metrics.compute.cost_model import ModelShape


class DraftLayer(Protocol):
    """The layer and what stands around it."""

    reads_hidden: bool
    reads_layers: tuple[int, ...]
    kv_layout: KVLayout

    def states(self, step: ComputedStep, rows: torch.Tensor | None) -> torch.Tensor:
        """The target's states that the layer reads, [num_rows, hidden_size], in memory of their own: of the step's
        `rows`, or of all."""
        ...

    def compute(self, ids: torch.Tensor, states: torch.Tensor, step: Step, kv_cache: KVCache) -> torch.Tensor:
        """The residual stream behind the layer [num_tokens, hidden_size], which is the state of the next draft."""
        ...

    def drafts(self, stream: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Its most probable tokens [rows], ids of the target."""
        ...

    def rope(self, positions: torch.Tensor) -> Rope | None: ...

    def shape(self, kv_dtype: torch.dtype) -> ModelShape: ...

    @property
    def state_flops(self) -> int:
        """That `states` takes for one row."""
        ...


@dataclass(slots=True)
class Lag:
    """Positions of a request whose entries are not computed yet, and the target's states there."""

    sequence: SequenceStep  # of the last step
    begin: int
    end: int
    states: list[torch.Tensor]  # [rows, hidden_size] each


class LayerChainProposer:
    """Needs an entry for every position that the target computes, so it sees every step. While nobody wants drafts it
    only keeps the states, and computes MOST_LAGGING entries at once: as many as fill a pass.

    A prefix that was found in the pool has its entries from the request that computed it. The last one of them read
    another next token where the two requests part: one draft in many is a little worse for it.
    """

    MOST_LAGGING = 128  # entries, of all requests

    def __init__(
        self,
        layer: DraftLayer,
        kv_cache: KVCache,
        block_size: int,
        attention: AttentionBackend,
        operations: Operations,
    ):
        self.reads_hidden, self.reads_layers = layer.reads_hidden, layer.reads_layers
        self.shape = layer.shape(kv_cache.values.dtype)
        self._layer, self._kv_cache, self._block_size = layer, kv_cache, block_size
        self._attention, self._operations = attention, operations
        self._device = kv_cache.values.device
        self._lags: dict[str, Lag] = {}

    def forget(self, request_id: str) -> None:
        self._lags.pop(request_id, None)

    @torch.inference_mode()
    def propose(self, step: ComputedStep) -> Proposal:
        costs = PassCosts(self.shape, self._keep_flops(step))
        if step.copies:
            self._catch_up((), costs)  # what is copied has its entries
            sources, targets = (torch.tensor(blocks, device=self._device) for blocks in zip(*step.copies, strict=True))
            copy_blocks(self._kv_cache, sources, targets)
        self._keep(step)
        drafting = [sequence for sequence in step.sequences if sequence.wanted and sequence.sampled]
        if not drafting and sum(lag.end - lag.begin for lag in self._lags.values()) < self.MOST_LAGGING:
            return Proposal({}, *costs.total())
        found = self._catch_up([sequence.request.id for sequence in drafting], costs)
        return Proposal(found, *costs.total())

    def _keep_flops(self, step: ComputedStep) -> int:
        rows = sum(max(0, _end(sequence) - sequence.past_tokens) for sequence in step.sequences)
        return rows * self._layer.state_flops

    def _keep(self, step: ComputedStep) -> None:
        """Takes in the states of a step."""
        sequences = [sequence for sequence in step.sequences if _end(sequence) > sequence.past_tokens]
        if not sequences:
            return
        counts = [_end(sequence) - sequence.past_tokens for sequence in sequences]
        states = self._layer.states(step, self._rows(sequences, step)).split(counts)
        for sequence, part in zip(sequences, states, strict=True):
            begin, end, known = sequence.past_tokens, _end(sequence), self._lags.get(sequence.request.id)
            if known is None or known.end != begin:
                self._lags[sequence.request.id] = Lag(sequence, begin, end, [part])
            else:
                known.sequence, known.end = sequence, end
                known.states.append(part)

    def _catch_up(self, drafting: Sequence[str], costs: PassCosts) -> dict[str, list[int]]:
        """Computes all entries that lag; the drafts behind those of the requests `drafting`."""
        lags = sorted(self._lags.values(), key=lambda lag: lag.end - lag.begin > 1)
        if not lags:
            return {}
        self._lags = {}
        begins, ends = (np.array([getattr(lag, name) for lag in lags]) for name in ("begin", "end"))
        wanted = np.array([lag.sequence.wanted if lag.sequence.request.id in drafting else 0 for lag in lags])
        blocks = [lag.sequence.request.blocks for lag in lags]
        tables = DraftTables(blocks, (ends + np.maximum(0, wanted - 1)).tolist(), self._block_size, self._device)
        states = torch.cat([part for lag in lags for part in lag.states])
        ids = torch.tensor([*chain.from_iterable(lag.sequence.tokens(lag.begin + 1, lag.end + 1) for lag in lags)])
        stream = self._computed(to_device(ids, self._device), states, *tables.inputs(begins, ends - begins))
        rows = np.flatnonzero(wanted)
        costs.add(ends - begins, begins, len(rows))
        if not len(rows):
            return {}
        last = torch.from_numpy(np.cumsum(ends - begins)[rows] - 1).to(self._device)
        found = self._chains(stream[last], wanted[rows], ends[rows], rows, tables, costs)
        return dict(zip([lags[row].sequence.request.id for row in rows], found, strict=True))

    def _rows(self, sequences: Sequence[SequenceStep], step: ComputedStep) -> torch.Tensor | None:
        """Of the step: those of the known tokens; None where they are all."""
        if sum(_end(each) - each.past_tokens for each in sequences) == sum(each.new_tokens for each in step.sequences):
            return None
        rows = np.concatenate([np.arange(s.first_row, s.first_row + _end(s) - s.past_tokens) for s in sequences])
        return to_device(torch.from_numpy(rows), self._device)

    def _computed(self, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, inputs) -> torch.Tensor:
        self._attention.begin(inputs)
        step = Step(self._operations, self._attention, inputs.slots, self._layer.rope(positions))
        return self._layer.compute(ids, states, step, self._kv_cache)

    def _chains(
        self,
        stream: torch.Tensor,
        wanted: np.ndarray,
        begins: np.ndarray,
        rows: np.ndarray,
        tables: DraftTables,
        costs: PassCosts,
    ) -> list[list[int]]:
        """Drafts of each sequence. `begins` are the positions behind the
        entries that are computed."""

        def following(ids: torch.Tensor, active: np.ndarray, kept: torch.Tensor | None, depth: int) -> torch.Tensor:
            nonlocal stream
            past = begins[active] + depth - 1
            costs.add(np.ones_like(past), past, len(past))
            states = stream if kept is None else stream[kept]
            stream = self._computed(ids, states, *tables.inputs(past, np.ones_like(past), rows[active]))
            return self._layer.drafts(stream, self._operations)

        return greedy_chain(self._layer.drafts(stream, self._operations), wanted, following)


def _end(sequence: SequenceStep) -> int:
    """The position behind the last computed one whose next token is known. Of a request that ended with an error, the
    last ones are not."""
    return min(sequence.num_computed, sequence.num_known - 1)
