"""Weights rounded to the nearest of a few values."""

import pytest
import torch

from sojourn.engine.compute.quantisation.rounding import round_to_nearest


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("inputs", "group", "found"), [(96, 32, 32), (80, 32, 16), (36, 32, 4), (37, 32, 37)])
def test_no_weight_is_further_away_than_one_step(inputs, group, found, bits):
    weight = torch.randn(20, inputs, generator=torch.Generator().manual_seed(inputs))
    matrix = round_to_nearest(weight, group, bits)
    matrix.check("weight")
    assert matrix.group == found and matrix.codes.min() == -(1 << bits - 1)
    steps = matrix.scales.abs().repeat_interleave(found, 1)
    errors = (matrix.dequantised() - weight).abs()
    # Half a step, but for what lies opposite the furthest number, where the codes end one step early.
    assert (errors <= steps * (1 + 2.0**-8)).all() and (errors <= steps / 2 * (1 + 2.0**-8)).float().mean() > 0.9


def test_a_group_of_zeros_is_zeros():
    weight = torch.randn(4, 64)
    weight[1, 32:], weight[2, :32] = 0.0, 1e-12
    rounded = round_to_nearest(weight).dequantised()
    assert rounded.isfinite().all() and not rounded[1, 32:].any() and not rounded[2, :32].any()
