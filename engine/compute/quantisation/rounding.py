"""Weights rounded to few bits."""

import torch

from engine.compute.quantisation.matrix import QuantisedMatrix

GROUP = 32  # inputs that share a scale: as in GGUF's Q4_0


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
