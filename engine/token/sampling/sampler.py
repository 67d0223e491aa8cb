"""Logits → ids: penalties → bias and masks → temperature → truncation → softmax → sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.logits import NOTHING, LogitEdits, argmax, edit_rows
from sojourn.engine.token.sampling.state import (
    DraftedState,
    RowTable,
    SamplingRequest,
    SamplingState,
    TokenHistory,
    logit_edits,
)
from sojourn.engine.token.sampling.truncation import Truncation, above_floors, truncate, truncation_of

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) made of a request's seed and a position alone (SplitMix64, Steele et al., 2014)."""
    state = ((seed & _MASK) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Some rows of a step that are sampled at random, with their parameters as tensors on the device."""

    index: torch.Tensor  # [rows] int64: which rows of the logits
    edited: tuple[torch.Tensor, torch.Tensor] | None  # of rows with edits: places here, and among the edited rows
    temperature: torch.Tensor  # [rows, 1] float64
    uniform: torch.Tensor  # [rows, 1] float64: the random number of each
    truncation: Truncation


@dataclass(frozen=True, slots=True)
class FusedInputs:
    """How the fused sampler samples the rows of one step."""

    table_rows: list[int]  # of the table of parameters
    positions: list[int]  # where the sampled tokens will stand
    edited_rows: torch.Tensor | None  # [rows] int32: which edited row each is; -1: none


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How the rows of one step are sampled. Greedy rows without edits need nothing here, unless a kernel samples."""

    direct: SampledRows | None  # that need no sorting
    sorted: SampledRows | None
    edits: LogitEdits | None
    fused: FusedInputs | None = None
    branches: Sequence[int] = ()  # rows of the history for its drafts, which are free once it is sampled

    @property
    def graph_can_sample(self) -> bool:
        """Whether the ids of a CUDA graph are those of the requests: edits need more than a graph does."""
        return self.edits is None and (self.fused is not None or (self.direct is None and self.sorted is None))


class Sampler:
    """Samples for live requests, and owns what their controls need on the device. `forget` at the end of each.

    `prepare` runs before the forward pass, so that `sample` copies nothing to the device. A request gets the same
    tokens in any batch, because each row is computed from its own logits, seed and position.

    `fused` samples by kernels, of which a CUDA graph can hold `fused.draw_rows` for up to `max_rows` live requests. It
    is None where torch operations sample, as on a CPU.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, fused: bool | None = None, max_rows: int = 4):
        self.vocab_size = vocab_size
        self.device = device
        self.history = TokenHistory(vocab_size, device)
        self.biases = RowTable(vocab_size, torch.float32, device)
        if fused is None:
            fused = device.type == "cuda" and find_spec("triton") is not None
        self.fused = None
        if fused:  # Triton takes its time to import, and is not everywhere
            from sojourn.engine.token.sampling.fused_sampler import FusedSampler

            self.fused = FusedSampler(device, self.history, self.biases, max_rows)
        self._states: dict[str, SamplingState] = {}

    def forget(self, request_id: str) -> None:
        """The request ended or was preempted: its rows go to others. It may come back."""
        state = self._states.pop(request_id, None)
        if state is None:
            return
        if state.penalty_row is not None:
            self.history.leave(state.penalty_row)
        if state.bias_row is not None:
            self.biases.give_back(state.bias_row)
        if state.parameter_row is not None:
            self.fused.leave(state.parameter_row)

    def prepare(
        self,
        requests: Sequence[SamplingRequest],
        positions: Sequence[int] | None = None,
        drafts: Sequence[tuple[int, ...]] | None = None,
    ) -> SamplingInputs:
        """`requests` sample their next tokens, in the order of the logits' rows.

        `positions` say where those will stand: behind the known tokens, or behind one that is sampled and not yet read.
        With `drafts` a request may have several rows: that of its next token, and then those behind its first draft,
        its first two … `drafts` has what each row sees behind the known tokens; all of these are known then.
        """
        positions = [len(request.token_ids) for request in requests] if positions is None else positions
        if drafts is None:
            states = [self._state(request, at) for request, at in zip(requests, positions, strict=True)]
        else:
            states = self._drafted_states(requests, positions, drafts)
        branches = _branches(states)
        edited = [row for row, state in enumerate(states) if state.edits]
        edits = logit_edits(edited, requests, positions, states, self._tensor) if edited else None
        if self.fused is not None:
            rows = [state.parameter_row for state in states]
            edited_rows = self._edited_rows(edited, len(requests)) if edited else None
            return SamplingInputs(None, None, edits, FusedInputs(rows, list(positions), edited_rows), branches)
        direct = [row for row, state in enumerate(states) if state.random and not state.sorts]
        cut = [row for row, state in enumerate(states) if state.random and state.sorts]
        return SamplingInputs(
            self._rows(direct, edited, requests, positions) if direct else None,
            self._rows(cut, edited, requests, positions) if cut else None,
            edits,
            branches=branches,
        )

    def sample(
        self,
        logits: torch.Tensor,
        inputs: SamplingInputs,
        masks: torch.Tensor | None = None,
        remember: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[rows, vocab_size] float32 → ids [rows] int64, NOTHING where no token is allowed. `logits` stay as they are.

        `masks` [constrained, words] int32: 32 tokens a word, a bit for each that the row's grammar allows. Kernels
        (`fused`) take logits of 16 bits too, give OVERFLOWED for logits that are no numbers, and `remember` the ids:
        see engine.compute.triton.sampling.draw_rows.
        """
        assert remember is None or self.fused is not None, "torch operations remember nothing"
        edits, edited, dead = inputs.edits, None, None
        if (fused := inputs.fused) is not None:
            rows = (fused.table_rows, fused.positions)
            ids = self.fused.sample(logits, *rows, edits, fused.edited_rows, masks, remember)
        else:
            ids = argmax(logits)
            if edits is not None:  # a copy of its rows alone: the whole batch, with a large vocabulary, is far more
                edited = edit_rows(logits, edits, *self.history.tables, self.biases.values, masks)
                edits.add(edited)
                dead = edited.amax(dim=-1) == -torch.inf
                edited.masked_fill_(dead[:, None], 0.0)
                ids[edits.rows] = argmax(edited)
            for rows in (inputs.direct, inputs.sorted):
                if rows is not None:
                    ids[rows.index] = _sample_rows(logits, edited, rows)
            if edits is not None:
                ids[edits.rows] = ids[edits.rows].masked_fill(dead, NOTHING)
        if edits is not None and edits.counted is not None:
            rows, history_rows = edits.counted
            self.history.count(history_rows, ids[rows].clamp(min=0))
        for row in inputs.branches:
            self.history.leave(row)
        return ids

    def knows(self, request_id: str) -> bool:
        """Whether `prepare` makes no row for it in the device's tables."""
        return request_id in self._states

    def edits(self, request_id: str) -> bool:
        """Whether the request that was prepared changes its logits before they are sampled."""
        return self._states[request_id].edits

    def _state(self, request: SamplingRequest, position: int) -> SamplingState:
        state = self._states.get(request.id)
        if state is not None and state.edits:
            added = position - state.num_tokens
            if state.is_uncounted and added > 0:
                state.follow(request.token_ids[state.num_tokens :], self.history)
            elif added == 1:  # the token that was sampled last, which the history counted itself
                if state.lz is not None:
                    state.lz.follow(request.token_ids[-1:])
                state.num_tokens += 1
            else:  # it did not go on from its last sample: its state is made again
                self.forget(request.id)
                state = None
        if state is None:
            state = SamplingState(request, self.vocab_size, self.history, self.biases)
            if self.fused is not None:
                state.parameter_row = self.fused.enter(request.sampling)
            self._states[request.id] = state
        return state

    def _drafted_states(
        self,
        requests: Sequence[SamplingRequest],
        positions: Sequence[int],
        drafts: Sequence[tuple[int, ...]],
    ) -> list[SamplingState | DraftedState]:
        states: list[SamplingState | DraftedState] = []
        for request, position, ahead in zip(requests, positions, drafts, strict=True):
            if not ahead:
                states.append(self._state(request, position))
                continue
            state = self._states[request.id]
            if not state.edits:
                states.append(state)
                continue
            state.is_uncounted = True  # only what is accepted will be counted
            states.append(DraftedState(state, ahead, self.history))
        return states

    def _edited_rows(self, edited: list[int], num_rows: int) -> torch.Tensor:
        place_of = {row: place for place, row in enumerate(edited)}
        return self._tensor([place_of.get(row, -1) for row in range(num_rows)], torch.int32)

    def _rows(
        self,
        chosen: list[int],
        edited: list[int],
        requests: Sequence[SamplingRequest],
        positions: Sequence[int],
    ) -> SampledRows:
        params = [requests[row].sampling for row in chosen]
        among_edited = {row: place for place, row in enumerate(edited)}
        both = [(place, among_edited[row]) for place, row in enumerate(chosen) if row in among_edited]
        return SampledRows(
            self._tensor(chosen, torch.int64),
            tuple(self._tensor(places, torch.int64) for places in zip(*both, strict=True)) if both else None,
            self._column([p.temperature for p in params]),
            self._column([uniform(p.seed, positions[row]) for p, row in zip(params, chosen, strict=True)]),
            truncation_of(params, self.vocab_size, self._column),
        )

    def _tensor(self, values: Sequence, dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self.device)

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return self._tensor(values, torch.float64)[:, None]


def _branches(states: Sequence[SamplingState | DraftedState]) -> list[int]:
    rows = (state.penalty_row for state in states if isinstance(state, DraftedState))
    return [row for row in rows if row is not None]


def _sample_rows(logits: torch.Tensor, edited: torch.Tensor | None, rows: SampledRows) -> torch.Tensor:
    """float64, because a cumulative sum over a large vocabulary loses small tokens in float32."""
    scaled = logits[rows.index].double()
    if rows.edited is not None:
        here, there = rows.edited
        scaled[here] = edited[there].double()
    scaled /= rows.temperature
    truncation = rows.truncation
    if truncation.min_p is not None:
        scaled = above_floors(scaled, truncation)
    if truncation.top_k is None:
        return _sample(scaled.softmax(dim=-1), rows)
    # Stable, so that tokens of equal logits stand in the same order whatever the rest of the batch is.
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    sampled = _sample(truncate(scaled.softmax(dim=-1), truncation), rows)
    return order.gather(-1, sampled[:, None])[:, 0]


def _sample(weights: torch.Tensor, rows: SampledRows) -> torch.Tensor:
    """Inverse transform sampling with one uniform number a row."""
    cumulative = weights.cumsum(dim=-1)
    # The last possible target lies below the total, so that rounding never ends at a token of weight 0.
    targets = torch.minimum(rows.uniform * cumulative[:, -1:], cumulative[:, -1:].nextafter(weights.new_zeros(())))
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
