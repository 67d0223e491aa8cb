"""Weights rounded to few bits."""

import torch

from engine.compute.quantisation.matrix import QuantisedMatrix

GROUP = 32  # inputs that share a scale: as in GGUF's Q4_0
LEAST = -8  # of the codes of four bits, and 7 is the largest


def round_to_nearest(weight: torch.Tensor, group: int = GROUP) -> QuantisedMatrix:
    """weight [out, in] → signed codes of four bits with float16 scales. The number furthest from 0 in a group is a code
    of -8, which the scale's sign allows: the error is a tenth less than with -7 to 7. Where `group` does not divide the
    inputs, the largest half, quarter, … of it that does is taken, down to 4, or else the whole channel."""
    while weight.shape[1] % group and group > 4:
        group //= 2
    if weight.shape[1] % group:
        group = weight.shape[1]
    groups = weight.float().unflatten(1, (-1, group))
    furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = (furthest / LEAST).half().float()
    # Of a group that is 0, or that float16 takes for it, all codes are 0.
    inverse = torch.where(scales != 0, 1 / scales, 0.0)
    codes = (groups * inverse).round_().clamp_(LEAST, -LEAST - 1).to(torch.int8)
    return QuantisedMatrix(codes.flatten(1), scales[:, :, 0].contiguous(), None, group, 4)
