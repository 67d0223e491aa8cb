"""Which tokens of a distribution may be sampled.

Truncation goes top-n-sigma → min-p → top-k → top-p. The first two are floors below the most probable token and do not
depend on what the others leave; top-p adds up what is left, as vLLM does. (transformers adds up before min-p.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sojourn.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Truncation:
    """How some rows cut their distribution."""

    min_p: torch.Tensor | None  # [rows, 1] float64; None where no row has a floor
    top_n_sigma: torch.Tensor | None  # [rows, 1] float64, inf keeps all
    top_k: torch.Tensor | None  # [rows, 1] float64; None where no row is sorted
    top_p: torch.Tensor | None  # [rows, 1] float64


def truncation_of(
    params: Sequence[SamplingParams], vocab_size: int, column: Callable[[list[float]], torch.Tensor]
) -> Truncation:
    """The truncation of rows with these parameters. `column` makes [rows, 1] float64 of numbers."""
    floors = any(p.min_p > 0 or p.top_n_sigma > 0 for p in params)
    sorts = any(p.top_k > 0 or p.top_p < 1 for p in params)
    return Truncation(
        column([p.min_p for p in params]) if floors else None,
        column([p.top_n_sigma or torch.inf for p in params]) if floors else None,
        column([min(p.top_k or vocab_size, vocab_size) for p in params]) if sorts else None,
        column([p.top_p for p in params]) if sorts else None,
    )


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
    cut = probabilities * (rank < truncation.top_k)
    cut = cut / cut.sum(dim=-1, keepdim=True)
    before = cut.cumsum(dim=-1) - cut
    # The smallest set that reaches top_p: every token that begins below it. The first always does.
    return cut * ((before < truncation.top_p) | (rank == 0))
