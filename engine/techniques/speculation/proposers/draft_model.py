"""Drafts by a smaller model with the same vocabulary (Leviathan et al., 2023; Chen et al., 2023).

The model has a KV cache of its own, with the block numbers of the pool: a position lies in the same slot of both. It
computes what the step computed, prompts too, and then its own greedy tokens one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.kv_cache import KVCache, copy_blocks
from sojourn.engine.compute.logits import argmax
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.techniques.speculation.proposers.draft_inputs import DraftTables
from sojourn.engine.techniques.speculation.proposers.greedy_chain import greedy_chain
from sojourn.engine.techniques.speculation.proposers.pass_costs import PassCosts
from sojourn.engine.techniques.speculation.proposers.proposer import (
    ComputedStep,
    DraftedRequest,
    Proposal,
    SequenceStep,
)
from sojourn.engine.token.models.decoder import Decoder
from sojourn.metrics.compute.cost_model import ModelShape


@dataclass(slots=True)
class LiveDraft:
    """What the cache holds of a request: positions below `computed`, and from there the first ones of `chain`."""

    computed: int
    chain: list[int] = field(default_factory=list)  # the drafts that were computed, as the last call drew them


class ComputedBlocks:
    """How many positions of each block the draft model has computed, so that a prompt whose prefix was found in the
    pool, and a request that comes back, computes what is missing and no more."""

    def __init__(self, num_blocks: int, block_size: int):
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._block_size = block_size

    def lost(self, blocks: Sequence[int]) -> None:
        """They hold other tokens now, of which nothing was computed."""
        self._counts[list(blocks)] = 0

    def copied(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*copies, strict=True)
        self._counts[list(targets)] = self._counts[list(sources)]

    def overwritten(self, blocks: Sequence[int], begin: int, end: int) -> None:
        """The target wrote these positions: what the draft model had there was of other tokens."""
        for index in range(begin // self._block_size, -(-end // self._block_size)):
            block = blocks[index]
            self._counts[block] = min(self._counts[block], max(0, begin - index * self._block_size))

    def computed(self, blocks: Sequence[int], begin: int, end: int) -> None:
        """All positions below `begin` were computed, and now these."""
        for index in range(begin // self._block_size, -(-end // self._block_size)):
            self._counts[blocks[index]] = min(self._block_size, end - index * self._block_size)

    def leading(self, blocks: Sequence[int], length: int) -> int:
        """How many of the first `length` positions were computed without a gap."""
        counts = self._counts[blocks[: -(-length // self._block_size)]]
        gaps = np.flatnonzero(counts < self._block_size)
        if not len(gaps):
            return length
        return min(length, int(gaps[0]) * self._block_size + int(counts[gaps[0]]))


@dataclass(slots=True)
class Span:
    """Positions of one sequence that a pass computes."""

    sequence: SequenceStep
    begin: int
    end: int

    @property
    def drafts(self) -> bool:
        """It reaches the last known token, and further ones are wanted."""
        return self.sequence.wanted > 0 and self.end == self.sequence.num_known

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.tokens(self.begin, self.end)


class DraftModelProposer:
    """`max_tokens` bounds a pass: memory is planned for it. A request that lags behind it drafts nothing yet."""

    reads_hidden = False
    reads_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        block_size: int,
        attention: AttentionBackend,
        operations: Operations,
        max_tokens: int,
    ):
        self.shape: ModelShape = model.shape(kv_cache.values.dtype)
        self._model, self._kv_cache, self._block_size = model, kv_cache, block_size
        self._attention, self._operations, self._max_tokens = attention, operations, max_tokens
        self._device = kv_cache.values.device
        self._blocks = ComputedBlocks(kv_cache.values.shape[2], block_size)
        self._live: dict[str, LiveDraft] = {}

    def forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    @torch.inference_mode()
    def propose(self, step: ComputedStep) -> Proposal:
        if step.copies:
            sources, targets = (torch.tensor(blocks, device=self._device) for blocks in zip(*step.copies, strict=True))
            copy_blocks(self._kv_cache, sources, targets)
            self._blocks.copied(step.copies)
        self._blocks.lost(step.loaded)  # one of them may be what was copied
        spans = self._spans(step.sequences)
        if not spans:
            return Proposal({})
        lengths = [span.end + max(0, span.sequence.wanted - 1) * span.drafts for span in spans]
        tables = DraftTables([span.sequence.request.blocks for span in spans], lengths, self._block_size, self._device)
        begins, ends = (np.array([getattr(span, name) for span in spans]) for name in ("begin", "end"))
        ids = torch.tensor([*chain.from_iterable(span.token_ids for span in spans)])
        hidden = self._computed(to_device(ids, self._device), *tables.inputs(begins, ends - begins))
        costs = PassCosts(self.shape)
        costs.add(ends - begins, begins, sum(span.drafts for span in spans))
        for span in spans:
            self._blocks.computed(span.sequence.request.blocks, span.begin, span.end)
            self._live[span.sequence.request.id] = LiveDraft(span.end)
        drafting = np.flatnonzero([span.drafts for span in spans])
        if not len(drafting):
            return Proposal({}, *costs.total())
        last = torch.from_numpy(np.cumsum(ends - begins)[drafting] - 1).to(self._device)
        drafts = self._chains([spans[row] for row in drafting], drafting, tables, hidden[last], costs)
        return Proposal(drafts, *costs.total())

    def _spans(self, sequences: Sequence[SequenceStep]) -> list[Span]:
        """What a pass computes, those with one token first. Where nobody wants drafts of a request, its decodes are
        left until somebody does; prompts are computed with the target's, which is where a long one costs least."""
        spans, room = [], self._max_tokens
        for sequence in sorted(sequences, key=lambda sequence: not sequence.wanted):
            request, past = sequence.request, sequence.past_tokens
            self._blocks.overwritten(request.blocks, past, past + sequence.new_tokens)
            begin = self._begin(request, sequence)
            end = sequence.num_known if sequence.wanted else min(sequence.num_computed, sequence.num_known)
            if sequence.wanted or past < request.prompt_tokens:
                end = min(end, begin + room)
                if end > begin:
                    spans.append(Span(sequence, begin, end))
                    room -= end - begin
        return sorted(spans, key=lambda span: span.end - span.begin > 1)

    def _begin(self, request: DraftedRequest, sequence: SequenceStep) -> int:
        """The first position that is not computed. Drafts that were accepted are, but the last token is always
        computed: its logits give the next draft."""
        live = self._live.get(request.id)
        if live is None:
            computed = self._blocks.leading(request.blocks, sequence.past_tokens)
            self._live[request.id] = LiveDraft(computed)
            return computed
        live.computed = min(live.computed + len(live.chain), sequence.num_known - 1)
        live.chain = []
        return live.computed

    def _computed(self, ids: torch.Tensor, positions: torch.Tensor, inputs) -> torch.Tensor:
        """Hidden states of a pass [num_tokens, hidden_size]. The target may know a few ids more: padding."""
        self._attention.begin(inputs)
        ids = ids.clamp(max=self.shape.vocab_size - 1)
        return self._model(ids, positions, inputs.slots, self._operations, self._attention, self._kv_cache)

    def _chains(
        self, spans: list[Span], rows: np.ndarray, tables: DraftTables, hidden: torch.Tensor, costs: PassCosts
    ) -> dict[str, list[int]]:
        """Drafts by request id."""
        wanted, begins = (np.array(values) for values in zip(*((s.sequence.wanted, s.end) for s in spans), strict=True))

        def following(ids: torch.Tensor, active: np.ndarray, kept: torch.Tensor | None, depth: int) -> torch.Tensor:
            past = begins[active] + depth - 1
            costs.add(np.ones_like(past), past, len(past))
            hidden = self._computed(ids, *tables.inputs(past, np.ones_like(past), rows[active]))
            return argmax(self._model.logits(hidden))

        drafts = greedy_chain(argmax(self._model.logits(hidden)), wanted, following)
        names = [span.sequence.request.id for span in spans]
        for name, chosen in zip(names, drafts, strict=True):
            self._live[name].chain = chosen[:-1]
        return dict(zip(names, drafts, strict=True))
