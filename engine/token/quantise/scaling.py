"""Activation-aware scaling (Lin et al., 2023, AWQ): inputs with large activations get finer weights.

A layer's input channel i is divided by s[i] where it is made, in a norm or in the layer before, and its weights are
multiplied by s[i]. The model computes the same, but rounding has other errors. s is |activation|^a, with the a of a
grid that changes the layer's outputs least.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.operations.reference import gemma_rms_norm
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.grouped import GroupedAttention
from sojourn.engine.token.models.layer import Layer
from sojourn.engine.token.models.mlp import GatedMLP, PlainMLP
from sojourn.engine.token.quantise.passes import hidden_states

GRID = 20  # steps of the exponent between 0 and 1
SAMPLE_ROWS = 128  # of activations that outputs are compared on

Rounded = Callable[[torch.Tensor], torch.Tensor]  # a weight [out, in] → the same as a checkpoint will give it back


@dataclass(frozen=True, slots=True)
class Scaled:
    """A layer that is scaled, and how what makes its inputs is divided."""

    linear: Linear
    divide: Callable[[torch.Tensor], None]  # s [in]


@torch.inference_mode()
def scale_by_activations(model: Decoder, ids: list[int], rounded: Rounded) -> int:
    """Scales the dense model in place, for a text's activations. Returns how many layers got another scale than 1."""
    places = [place for layer in model.layers for place in _places(model, layer)]
    inputs = _inputs(model, [place.linear for place in places], ids)
    changed = 0
    for place in places:
        weight = place.linear.weight
        scales = _best_scales(inputs.pop(place.linear), weight, rounded)
        if scales is not None:
            weight.mul_(scales)
            place.divide(scales)
            changed += 1
    return changed


def _places(model: Decoder, layer: Layer) -> Iterator[Scaled]:
    """The layers whose inputs are linear in the weight of a norm, or in the outputs of another layer."""
    attention, mlp, shift = layer.attention, layer.mlp, 1.0 if model.config.norm is gemma_rms_norm else 0.0
    if isinstance(attention, GroupedAttention):
        yield Scaled(attention.qkv, _norm(layer.input_norm, shift))
        query, key, value = attention.sizes
        if value == query and attention.config.clip is None:  # one head of values for each of queries
            yield Scaled(attention.o, _outputs(attention.qkv, slice(query + key, None)))
    if isinstance(mlp, GatedMLP):
        yield Scaled(mlp.gate_up, _norm(layer.post_norm, shift))
        yield Scaled(mlp.down, _outputs(mlp.gate_up, slice(mlp.down.in_features, None)))
    elif isinstance(mlp, PlainMLP):
        yield Scaled(mlp.up, _norm(layer.post_norm, shift))


def _norm(weight: nn.Parameter, shift: float) -> Callable[[torch.Tensor], None]:
    """Gemma stores the weights of its norms less one."""
    return lambda scales: weight.add_(shift).div_(scales).sub_(shift)


def _outputs(linear: Linear, rows: slice) -> Callable[[torch.Tensor], None]:
    def divide(scales: torch.Tensor) -> None:
        linear.weight[rows].div_(scales[:, None])
        if linear.bias is not None:
            linear.bias[rows].div_(scales)

    return divide


def _inputs(model: Decoder, linears: list[Linear], ids: list[int]) -> dict[Linear, tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer: the mean magnitude of each input [in], and some rows of inputs [rows, in]."""
    found = {}

    def keep(linear: Linear, arguments: tuple[torch.Tensor]) -> None:
        (x,) = arguments
        found[linear] = x.abs().mean(0), x[:: max(1, len(x) // SAMPLE_ROWS)].clone()

    hooks = [linear.register_forward_pre_hook(keep) for linear in linears]
    try:
        hidden_states(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _best_scales(
    inputs: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, rounded: Rounded
) -> torch.Tensor | None:
    """[in]; None where no scales are better than none."""
    magnitudes, rows = inputs
    exact = rows @ weight.T

    def error(scales: torch.Tensor) -> float:
        return (rows @ (rounded(weight * scales) / scales).T - exact).square().sum().item()

    best, least = None, error(torch.ones_like(magnitudes))
    for step in range(1, GRID + 1):
        scales = magnitudes.clamp(min=1e-4) ** (step / GRID)
        scales = scales / (scales.max() * scales.min()).sqrt()
        if (found := error(scales)) < least:
            best, least = scales, found
    return best
