"""Quantiles of resampled windows."""

import numpy as np
import pytest

from sojourn.metrics.compare.verdict import _places


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50, 1000])
def test_quantile_of_resampled_windows_is_that_of_all_their_values(count):
    """Oracle: the weight of all values in their order, summed one by one."""
    random = np.random.default_rng(count)
    for windows in (1, 3, 20):
        window, weights = random.integers(0, windows, count), random.multinomial(windows, [1 / windows] * windows, 50)
        for share in (0.5, 0.9, 0.99):
            summed = np.cumsum(weights[:, window], axis=1)
            place = np.minimum((summed < share * summed[:, -1:]).sum(axis=1), count - 1)
            assert (_places(window, windows, weights, share) == place).all()
