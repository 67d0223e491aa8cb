"""Dense weights → quantised ones, rounded to the nearest code."""

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix

GROUP = 32  # inputs that share a scale: as in GGUF's Q4_0
LARGEST_E4M3 = 448.0
GROUPS = (128, 64, 32, 16, 8, 4)


def round_to_nearest(weight: torch.Tensor, group: int = GROUP, bits: int = 4) -> QuantisedMatrix:
    """weight [out, in] → signed codes of `bits` bits with float16 scales. The number furthest from 0 in a group has the
    least code, which the scale's sign allows: in four bits the error is a tenth less than with -7 to 7. Where `group`
    does not divide the inputs, the largest half, quarter, … of it that does is taken, down to 4, or else the whole
    channel."""
    least = -(1 << bits - 1)
    while weight.shape[1] % group and group > 4:
        group //= 2
    if weight.shape[1] % group:
        group = weight.shape[1]
    groups = weight.float().unflatten(1, (-1, group))
    furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = (furthest / least).half().float()
    # Of a group that is 0, or that float16 takes for it, all codes are 0.
    inverse = torch.where(scales != 0, 1 / scales, 0.0)
    codes = (groups * inverse).round_().clamp_(least, -least - 1).to(torch.int8)
    return QuantisedMatrix(codes.flatten(1), scales[:, :, 0].contiguous(), None, group, bits)


def rounded_integers(
    weight: torch.Tensor, bits: int, group: int | None, *, symmetric: bool = True, activations: str | None = None
) -> QuantisedMatrix:
    """weight [out, in] → codes of `bits`; `group` None is one scale an output. Scales are those that float16 holds.

    Symmetric codes reach one further below zero than above; their scale lets the largest weight be half a step beyond
    the last code, which makes the others' steps smaller.
    """
    group = weight.shape[1] if group is None else group
    grouped = weight.float().unflatten(1, (-1, group))
    if symmetric:
        scales = _storable(grouped.abs().amax(2) / ((1 << bits) - 1) * 2)
        middle = 1 << (bits - 1)
        codes = (grouped / _divisors(scales)).round_().clamp_(-middle, middle - 1).to(torch.int8)
        return QuantisedMatrix(codes.flatten(1), scales, None, group, bits, activations=activations)
    least, most = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    last = (1 << bits) - 1
    scales = _storable((most - least) / last)
    zeros = (-least / _divisors(scales)[..., 0]).round_().clamp_(0, last)
    codes = (grouped / _divisors(scales)).round_().add_(zeros[..., None]).clamp_(0, last).to(torch.uint8)
    return QuantisedMatrix(codes.flatten(1), scales, zeros, group, bits, activations=activations)


def rounded_fp8(weight: torch.Tensor) -> QuantisedMatrix:
    """weight [out, in] → e4m3 with one float32 scale an output, for activations that are rounded by token."""
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True) / LARGEST_E4M3
    codes = (weight / torch.where(scales > 0, scales, 1.0)).clamp_(-LARGEST_E4M3, LARGEST_E4M3)
    return QuantisedMatrix(codes.to(torch.float8_e4m3fn), scales, None, weight.shape[1], 8, activations="fp8")


def common_group(sizes: set[int], largest: int = GROUPS[0]) -> int | None:
    """The largest usual group that divides all numbers of inputs."""
    return next((group for group in GROUPS if group <= largest and all(size % group == 0 for size in sizes)), None)


def _storable(scales: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, but no scale to 0 that was not."""
    tiny = torch.finfo(torch.float16).smallest_normal
    return torch.where(scales > 0, scales.clamp(min=tiny), 0.0).half().float()


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales > 0, scales, 1.0)[..., None]
