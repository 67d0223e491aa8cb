"""How wrong a model of steps is at sizes that its fit did not see: whole sizes are left out, one after the other.

Only sizes that the others enclose: what is beyond them is an extrapolation, and is marked as one.

The same errors decide how alike neighbouring slopes are. Kernels take a jump at some sizes, and a slope that follows
each jump goes on wrongly beyond the run. So the slopes are as alike as the errors allow, by the rule of one standard
error (Breiman et al., "Classification and Regression Trees", 1984).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sojourn.metrics.compute.step_time import FEWEST_OF_A_SIZE

CLASSES_PER_OCTAVE = 4  # of tokens: up to 8 each size is one of its own
STEPS_OF_A_SIZE = 128  # evenly over the run; more do not move the error
MOST_FITS = 12  # with more sizes, some that are far apart are left out together
LARGEST_RATIO = 3.0  # one stall is no error of a size

Expect = Callable[[np.ndarray, np.ndarray], np.ndarray]  # steps to learn from and steps to predict, by place → ns


class LeftOut(NamedTuple):
    errors: np.ndarray  # relative, of each size that was left out and that the others enclose

    @property
    def error(self) -> float:
        """The mean of the sizes; infinite where none is enclosed by others, so that nothing tells."""
        return float(self.errors.mean()) if len(self.errors) else math.inf

    @property
    def standard_error(self) -> float:
        return float(self.errors.std() / math.sqrt(len(self.errors))) if len(self.errors) else math.inf


def size_classes(tokens: np.ndarray) -> np.ndarray:
    """[steps] the class of each step's size, whole numbers from 0."""
    return np.unique(np.round(CLASSES_PER_OCTAVE * np.log2(np.maximum(tokens, 1.0))), return_inverse=True)[1]


def left_out(tokens: np.ndarray, measured_ns: np.ndarray, expect: Expect) -> LeftOut:
    places = _sample(tokens, measured_ns)
    sizes = size_classes(tokens[places])
    counts = np.bincount(sizes)
    means = np.bincount(sizes, tokens[places]) / counts
    expected = np.ones(len(places))
    enclosed = np.zeros(len(counts), dtype=bool)
    for part in range(min(MOST_FITS, len(counts))):
        out = np.arange(len(counts)) % MOST_FITS == part
        others = means[~out & (counts >= FEWEST_OF_A_SIZE)]
        if not len(others):
            continue
        between = (means > others.min()) & (means < others.max())
        enclosed |= out & between & (counts >= FEWEST_OF_A_SIZE)
        if (enclosed & out).any():
            expected[out[sizes]] = np.maximum(expect(places[~out[sizes]], places[out[sizes]]), 1.0)
    ratio = np.minimum(measured_ns[places] / expected, LARGEST_RATIO)
    errors = np.abs(np.bincount(sizes, expected * ratio) / np.bincount(sizes, expected) - 1)
    return LeftOut(errors[enclosed])


def _sample(tokens: np.ndarray, measured_ns: np.ndarray) -> np.ndarray:
    """Places of steps with a time, of each size not too many."""
    timed = np.flatnonzero((measured_ns > 0) & np.isfinite(measured_ns))
    sizes = size_classes(tokens[timed])
    chosen = []
    for size in range(int(sizes.max(initial=-1)) + 1):
        of_size = timed[sizes == size]
        chosen.append(of_size[np.unique(np.linspace(0, len(of_size) - 1, STEPS_OF_A_SIZE).astype(int))])
    return np.sort(np.concatenate([np.zeros(0, dtype=int), *chosen]))
