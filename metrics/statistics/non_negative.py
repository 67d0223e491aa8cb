"""Least squares with coefficients that cannot be negative, for a few of them.

By block pivoting: Portugal, Júdice and Vicente, "A comparison of block pivoting and interior-point algorithms for
linear least squares problems with nonnegative variables", Mathematics of Computation 63 (1994).
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

NEGLIGIBLE_WEIGHT = 1e-280  # of a feature, near the smallest number that floats have: it was not seen


class Alike(NamedTuple):
    """Neighbouring features whose coefficients should be alike unless the readings say otherwise."""

    places: slice
    weight: float  # of their difference, a share of the smaller of the two features' own weights


def non_negative(
    gram: np.ndarray, moment: np.ndarray, usable: np.ndarray, *, ridge: float, passive: np.ndarray | None = None,
    alike: Alike | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """argmin x·gram·x/2 - moment·x for x >= 0: the coefficients, and which of them are free, both [features].

    Features that are not `usable` have the coefficient nought. `ridge`, a share of each feature's own weight, decides
    between features that always occur together. `passive` are those that were free in a problem much like this one.
    `alike` lets a feature that the readings do not tell apart from its neighbours have their coefficient.
    """
    count = len(gram)
    scale = np.where(usable, np.sqrt(np.diagonal(gram)), 1.0)
    scaled, target = gram / np.outer(scale, scale) + ridge * np.eye(count), moment / scale
    if alike is not None:
        scaled += _differences(scale, usable, alike)
    passive = usable.copy() if passive is None else passive & usable
    found = np.zeros(count)
    for attempt in range(4 * count):
        found = np.zeros(count)
        chosen = np.flatnonzero(passive)
        found[chosen] = np.linalg.solve(scaled[np.ix_(chosen, chosen)], target[chosen])
        wrong = np.where(passive, found < 0, usable & (scaled @ found - target < -1e-9))
        if not wrong.any():
            break
        if attempt < count:
            passive ^= wrong
        else:  # one at a time, so that it never goes round in circles (Murty, 1974)
            passive[np.flatnonzero(wrong)[-1]] ^= True
    return np.maximum(found, 0) / scale, passive


def _differences(scale: np.ndarray, usable: np.ndarray, alike: Alike) -> np.ndarray:
    """The quadratic form of the differences of neighbours, in the scaled coefficients."""
    form = np.zeros((len(scale), len(scale)))
    places = [place for place in range(len(scale))[alike.places] if usable[place]]
    for pair in pairwise(places):
        difference = np.array([1.0, -1.0]) * scale[list(pair)].min() / scale[list(pair)]
        form[np.ix_(pair, pair)] += alike.weight * np.outer(difference, difference)
    return form
