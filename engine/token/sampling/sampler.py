"""Logits → ids: penalties → bias and masks → temperature → truncation → softmax → draw.

Truncation goes top-n-sigma → min-p → top-k → top-p. The first two are floors below the most probable token and do not
depend on what the others keep; top-p adds up what is left, as vLLM does. (transformers adds up before min-p.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from engine.compute.greedy import argmax
from engine.sampling import SamplingParams
from engine.token.sampling.controls import Controls, Drawer
from engine.token.sampling.penalties import TokenHistory
from engine.token.sampling.row_table import RowTable

if TYPE_CHECKING:
    from engine.token.sampling.fused_draws import FusedDraws, FusedEdits, FusedInputs

NOTHING = -1  # drawn by a row whose masks leave no token

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) made of a request's seed and a position alone (SplitMix64, Steele et al., 2014)."""
    state = ((seed & _MASK) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class Truncation:
    """How some rows cut their distribution."""

    min_p: torch.Tensor | None  # [rows, 1] float64; None where no row has a floor
    top_n_sigma: torch.Tensor | None  # [rows, 1] float64, inf keeps all
    top_k: torch.Tensor | None  # [rows, 1] int64; None where no row is sorted
    top_p: torch.Tensor | None  # [rows, 1] float64


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a step that draw at random, with their controls as tensors on the device."""

    index: torch.Tensor  # [rows] int64: which rows of the logits
    edited: (
        tuple[torch.Tensor, torch.Tensor] | None
    )  # positions here, and among the edited rows, of those that are both
    temperature: torch.Tensor  # [rows, 1] float64
    draw: torch.Tensor  # [rows, 1] float64: the uniform number of each
    truncation: Truncation


@dataclass(frozen=True, slots=True)
class Edits:
    """Rows whose logits are changed before they are drawn from. Positions count within `index`."""

    index: torch.Tensor  # [edited] int64: which rows of the logits
    penalised: tuple[torch.Tensor, ...] | None  # positions, history rows [n]; repetition, frequency, presence [n, 1]
    biased: tuple[torch.Tensor, torch.Tensor] | None  # positions, bias rows [n]
    changes: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # positions, tokens int64, what to add [n]
    constrained: torch.Tensor | None  # [n] int64 positions of the rows that a grammar masks, in the masks' order


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How the rows of one step draw. Greedy rows without edits need nothing here, unless the draws are fused."""

    direct: Rows | None  # that need no sorting
    sorted: Rows | None
    edits: "Edits | FusedEdits | None"
    fused: "FusedInputs | None" = None


class Sampler:
    """Draws for live requests, and remembers for each what its controls need. `forget` at the end of each.

    `prepare` runs before the forward pass, so that `draw` copies nothing to the device. A request draws the same tokens
    in any company, because each row is computed from its own logits, seed and position.

    `fused` draws by kernels, of which a CUDA graph can hold `fused.draw_rows` for up to `max_rows` live requests; it is
    None where torch operations draw, as on a CPU.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, fused: bool | None = None, max_rows: int = 4):
        self.vocab_size = vocab_size
        self.device = device
        self.history = TokenHistory(vocab_size, device)
        self.biases = RowTable(vocab_size, torch.float32, device)
        if fused is None:
            fused = device.type == "cuda" and find_spec("triton") is not None
        self.fused = _fused_draws(vocab_size, device, self.history, self.biases, max_rows) if fused else None
        self._controls: dict[str, Controls] = {}

    def forget(self, request_id: str) -> None:
        """The request ended, or lost its place: its rows go to others. It may come back."""
        controls = self._controls.pop(request_id, None)
        if controls is None:
            return
        if controls.penalty_row is not None:
            self.history.leave(controls.penalty_row)
        if controls.bias_row is not None:
            self.biases.give_back(controls.bias_row)
        if controls.draw_row is not None:
            self.fused.leave(controls.draw_row)

    def prepare(self, requests: Sequence[Drawer], positions: Sequence[int] | None = None) -> SamplingInputs:
        """`requests` draw their next tokens, in the order of the logits' rows.

        `positions` say where those will stand: behind the known ones, or behind one that is drawn and not known yet.
        """
        positions = [len(request.token_ids) for request in requests] if positions is None else positions
        controls = [self._known(request, at) for request, at in zip(requests, positions, strict=True)]
        if self.fused is not None:
            inputs = self.fused.prepare(requests, positions, controls)
            return SamplingInputs(None, None, inputs.edits, inputs)
        direct = [row for row, c in enumerate(controls) if c.random and not c.sorts]
        cut = [row for row, c in enumerate(controls) if c.random and c.sorts]
        edited = [row for row, c in enumerate(controls) if c.edits]
        return SamplingInputs(
            self._rows(direct, edited, requests, positions, controls) if direct else None,
            self._rows(cut, edited, requests, positions, controls) if cut else None,
            self._edits(edited, requests, positions, controls) if edited else None,
        )

    def draw(self, logits: torch.Tensor, inputs: SamplingInputs, masks: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, vocab_size] float32 → ids [rows] int64, NOTHING where no token is allowed. `logits` stay as they are.

        `masks` [constrained, words] int32: 32 tokens a word, a bit for each that the row's grammar allows.
        """
        if inputs.fused is not None:
            return self.fused.draw(logits, inputs.fused, masks)
        edits, edited, dead = inputs.edits, None, None
        ids = argmax(logits)
        if edits is not None:  # a copy of its rows alone: the whole batch, with a large vocabulary, is far more
            edited = self._edit(logits[edits.index], edits, masks)
            dead = edited.amax(dim=-1) == -torch.inf
            edited.masked_fill_(dead[:, None], 0.0)
            ids[edits.index] = argmax(edited)
        for rows in (inputs.direct, inputs.sorted):
            if rows is not None:
                ids[rows.index] = _draw_rows(logits, edited, rows)
        if edits is None:
            return ids
        if edits.penalised is not None:
            positions, history_rows, *_ = edits.penalised
            self.history.count(history_rows, ids[edits.index[positions]])
        ids[edits.index] = ids[edits.index].masked_fill(dead, NOTHING)
        return ids

    def knows(self, request_id: str) -> bool:
        """Whether `prepare` makes no row for it in the device's tables."""
        return request_id in self._controls

    def edits(self, request_id: str) -> bool:
        """Whether the request that was prepared changes its logits before it draws from them."""
        return self._controls[request_id].edits

    def _known(self, request: Drawer, position: int) -> Controls:
        controls = self._controls.get(request.id)
        if controls is not None and controls.edits:
            added = position - controls.num_tokens
            if added == 1:  # the token of its last draw, which the history counted itself
                if controls.lz is not None:
                    controls.lz.follow(request.token_ids[-1:])
                controls.num_tokens += 1
            else:  # it did not go on from its last draw: what is known of it is made again
                self.forget(request.id)
                controls = None
        if controls is None:
            controls = Controls(request, self.vocab_size, self.history, self.biases)
            if self.fused is not None:
                controls.draw_row = self.fused.enter(request.sampling)
            self._controls[request.id] = controls
        return controls

    def _rows(
        self, chosen: list[int], edited: list[int], requests: Sequence[Drawer], positions: Sequence[int],
        controls: list[Controls],
    ) -> Rows:  # fmt: skip
        params: list[SamplingParams] = [requests[row].sampling for row in chosen]
        floors = any(controls[row].floors for row in chosen)
        sorts = controls[chosen[0]].sorts
        size = self.vocab_size
        among_edited = {row: position for position, row in enumerate(edited)}
        both = [(position, among_edited[row]) for position, row in enumerate(chosen) if row in among_edited]
        draws = [uniform(requests[row].sampling.seed, positions[row]) for row in chosen]
        return Rows(
            self._tensor(chosen, torch.int64),
            tuple(self._tensor(positions, torch.int64) for positions in zip(*both, strict=True)) if both else None,
            self._column([p.temperature for p in params]),
            self._column(draws),
            Truncation(
                self._column([p.min_p for p in params]) if floors else None,
                self._column([p.top_n_sigma or torch.inf for p in params]) if floors else None,
                self._column([min(p.top_k or size, size) for p in params], torch.int64) if sorts else None,
                self._column([p.top_p for p in params]) if sorts else None,
            ),
        )

    def _edits(
        self, chosen: list[int], requests: Sequence[Drawer], stands_at: Sequence[int], controls: list[Controls]
    ) -> Edits:
        rows = [(position, requests[row], controls[row]) for position, row in enumerate(chosen)]
        penalised = [(i, c.penalty_row, r.sampling) for i, r, c in rows if c.penalty_row is not None]
        biased = [(i, c.bias_row) for i, _, c in rows if c.bias_row is not None]
        constrained = [i for i, r, _ in rows if r.sampling.grammar is not None]
        positions, tokens, values = [], [], []
        for position, request, known in rows:
            added, amounts = known.changes(request, stands_at[chosen[position]])
            positions += [position] * len(added)
            tokens += added
            values += amounts
        penalties = biases = None
        if penalised:
            indices, history_rows, params = zip(*penalised, strict=True)
            penalties = (
                self._tensor(indices, torch.int64),
                self._tensor(history_rows, torch.int64),
                self._column([p.repetition_penalty for p in params], torch.float32),
                self._column([p.frequency_penalty for p in params], torch.float32),
                self._column([p.presence_penalty for p in params], torch.float32),
            )
        if biased:
            indices, bias_rows = zip(*biased, strict=True)
            biases = (self._tensor(indices, torch.int64), self._tensor(bias_rows, torch.int64))
        changes = None
        if tokens:
            changes = (
                self._tensor(positions, torch.int64),
                self._tensor(tokens, torch.int64),
                self._tensor(values, torch.float32),
            )
        return Edits(
            self._tensor(chosen, torch.int64),
            penalties,
            biases,
            changes,
            self._tensor(constrained, torch.int64) if constrained else None,
        )

    def _edit(self, logits: torch.Tensor, edits: Edits, masks: torch.Tensor | None) -> torch.Tensor:
        """[edited, vocab_size] logits of the edited rows → what they draw from. May change `logits`."""
        if edits.penalised is not None:
            positions, history_rows, repetition, frequency, presence = edits.penalised
            logits[positions] = self.history.penalise(logits[positions], history_rows, repetition, frequency, presence)
        if edits.biased is not None:
            positions, bias_rows = edits.biased
            logits[positions] += self.biases.values[bias_rows]
        if edits.changes is not None:
            positions, tokens, values = edits.changes
            logits.index_put_((positions, tokens), values, accumulate=True)
        if edits.constrained is not None:
            logits[edits.constrained] = logits[edits.constrained].masked_fill(
                ~unpacked(masks, self.vocab_size), -torch.inf
            )
        return logits

    def _tensor(self, values: Sequence, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _column(self, values: Sequence, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return self._tensor(values, dtype)[:, None]


def _fused_draws(*arguments) -> "FusedDraws":
    from engine.token.sampling.fused_draws import FusedDraws  # Triton takes its time to import, and is not everywhere

    return FusedDraws(*arguments)


def unpacked(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[rows, words] int32, 32 tokens a word → [rows, vocab_size] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size].bool()


def _draw_rows(logits: torch.Tensor, edited: torch.Tensor | None, rows: Rows) -> torch.Tensor:
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
        return _draw(scaled.softmax(dim=-1), rows)
    # Stable, so that tokens of equal logits stand in the same order whatever the rest of the batch is.
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    drawn = _draw(truncate(scaled.softmax(dim=-1), truncation), rows)
    return order.gather(-1, drawn[:, None])[:, 0]


def above_floors(scaled: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Drops what is less than n standard deviations or than min_p of the probability below the best token.

    Top-n-sigma is by Tang et al., 2024 ("Not All Logits Are You Need"): the deviation is that of the logits, here of
    those that no mask forbids. It keeps the same tokens at any temperature.
    """
    best = scaled.amax(dim=-1, keepdim=True)
    allowed = scaled > -torch.inf
    count = allowed.sum(dim=-1, keepdim=True)
    finite = scaled.masked_fill(~allowed, 0.0)
    mean = finite.sum(dim=-1, keepdim=True) / count
    variance = ((finite - mean) ** 2 * allowed).sum(dim=-1, keepdim=True) / count
    # A row without the control has n = inf; where all its logits are equal, inf * 0 is nan, and no floor either.
    sigma_floor = (best - truncation.top_n_sigma * variance.sqrt()).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    floor = torch.maximum(sigma_floor, best + truncation.min_p.log())
    return scaled.masked_fill(scaled < floor, -torch.inf)


def truncate(probabilities: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Zeroes what top-k and top-p cut, in rows sorted from the most to the least probable."""
    rank = torch.arange(probabilities.shape[-1], device=probabilities.device)
    kept = probabilities * (rank < truncation.top_k)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept
    # The smallest set that reaches top_p: whoever begins below it. The first always does.
    return kept * ((before < truncation.top_p) | (rank == 0))


def _draw(weights: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Inverse transform sampling with one uniform number a row."""
    cumulative = weights.cumsum(dim=-1)
    # The last possible target lies below the total, so that rounding never ends at a token of weight 0.
    targets = torch.minimum(rows.draw * cumulative[:, -1:], cumulative[:, -1:].nextafter(weights.new_zeros(())))
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
