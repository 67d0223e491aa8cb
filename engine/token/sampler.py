"""Logits → ids: temperature → truncation (top-k, then top-p) → softmax → draw."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling import SamplingParams

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) made of a request's seed and a position alone (SplitMix64, Steele et al., 2014)."""
    state = ((seed & _MASK) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a step that draw at random, with their controls as tensors on the device."""

    index: torch.Tensor  # [rows] int64: which rows of the logits
    temperature: torch.Tensor  # [rows, 1] float64
    draw: torch.Tensor  # [rows, 1] float64: the uniform number of each
    top_k: torch.Tensor  # [rows, 1] int64
    top_p: torch.Tensor  # [rows, 1] float64


class SamplingInputs:
    """How the rows of one step draw. Made before the forward pass, so that sampling copies nothing to the device.

    `positions` are where the new tokens will stand. Greedy rows need nothing here.
    """

    def __init__(
        self, params: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int, device: torch.device
    ):
        random = [row for row, p in enumerate(params) if p.temperature > 0]
        cut = {row for row in random if params[row].top_k or params[row].top_p < 1}

        def rows(chosen: list[int]) -> _Rows | None:
            def column(values: list, dtype: torch.dtype) -> torch.Tensor:
                return torch.tensor(values, dtype=dtype, device=device)[:, None]

            if not chosen:
                return None
            return _Rows(
                torch.tensor(chosen, device=device),
                column([params[row].temperature for row in chosen], torch.float64),
                column([uniform(params[row].seed, positions[row]) for row in chosen], torch.float64),
                column([min(params[row].top_k or vocab_size, vocab_size) for row in chosen], torch.int64),
                column([params[row].top_p for row in chosen], torch.float64),
            )

        self.plain = rows([row for row in random if row not in cut])
        self.truncated = rows([row for row in random if row in cut])


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """[rows, vocab_size] float32 → ids [rows] int64. A row's draw does not depend on the other rows."""
    ids = logits.argmax(dim=-1)
    if inputs.plain is not None:
        ids[inputs.plain.index] = _draw(_softmax(logits, inputs.plain), inputs.plain)
    if inputs.truncated is not None:
        probabilities, order = _softmax(logits, inputs.truncated).sort(dim=-1, descending=True)
        drawn = _draw(_truncate(probabilities, inputs.truncated), inputs.truncated)
        ids[inputs.truncated.index] = order.gather(-1, drawn[:, None])[:, 0]
    return ids


def _softmax(logits: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """float64, because a cumulative sum over a large vocabulary loses small tokens in float32."""
    return (logits[rows.index].double() / rows.temperature).softmax(dim=-1)


def _truncate(probabilities: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Zeroes what top-k and top-p cut, in rows sorted from the most to the least probable."""
    rank = torch.arange(probabilities.shape[-1], device=probabilities.device)
    kept = probabilities * (rank < rows.top_k)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept
    # The smallest set that reaches top_p: whoever begins below it. The first always does.
    return kept * ((before < rows.top_p) | (rank == 0))


def _draw(weights: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Inverse transform sampling with one uniform number a row."""
    cumulative = weights.cumsum(dim=-1)
    targets = rows.draw * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
