"""How long the device should take for a step, learnt from the steps that it took.

Time is a sum of terms that cannot be negative: a constant, one for being launched kernel by kernel, a piecewise linear
function of the rows that the matrix products have, and what sequences, their attention, their rows of logits and their
LoRA adapters cost. Expanded latents count as the pairs of a query and a key that they spare. Copies of KV tiers are no
part of it: they have readings of the clock of their own.
That holds for a GPU, whose graphs have padded rows, and for a CPU, whose threads and tiles bend the line at few rows.

The coefficients are the non-negative least squares of the relative errors, forgetting slowly, with errors far beyond
the usual clipped (Huber, 1964): one stall teaches nothing, and a device that has become slower is believed slowly. A
step that is far too short weighs no more than others, and a step of no time at all is no reading. Slopes that the steps
do not tell apart are alike, so that sizes between those of the run are interpolated. Of steps far smaller than all that
were seen, as of those with something new, it says nothing.

It tells unexpected time from expected time, not a slow device from a slow kernel, and it does not know what the draws
ask for: penalties and sorting show as residual.
"""

import math
from operator import mul

import numpy as np

from sojourn.metrics.compute.cost_model import Count, StepWork
from sojourn.metrics.statistics.non_negative import NEGLIGIBLE_WEIGHT, Alike, non_negative
from sojourn.metrics.statistics.relative_fit import fitted

KNOTS = (1, 4, 16, 64, 256, 1024)  # rows at which the slope may change
FEWEST_OF_A_SIZE = 8  # steps that tell what a size costs
FAR_BEYOND = 1.5  # times the largest size that was seen, or a part of the smallest: up to there its own line goes on
NUM_FEATURES = len(KNOTS) + 8
CHUNKS = 4  # of the features: sequences with more than one new token
SLOPES = slice(7, 7 + len(KNOTS))  # of the features


def features(
    work: StepWork, padding_tokens: Count = 0, *, eager: bool | np.ndarray = True, adapter_flops: Count = 0
) -> np.ndarray:
    """What the time of a step is linear in: [NUM_FEATURES] of one, [steps, NUM_FEATURES] of several. Rows of padding
    are computed like others."""
    rows = work.tokens + padding_tokens
    segments = [np.clip(rows - begin, 0, end - begin) for begin, end in _SEGMENTS]
    found = (
        1, eager, work.decodes, work.decode_pairs, work.chunks, work.chunk_pairs - work.saved_pairs, work.logit_rows,
        *segments, adapter_flops,
    )  # fmt: skip
    return np.stack(np.broadcast_arrays(*found), axis=-1).astype(float)


def reached(sizes: np.ndarray) -> float:
    """The size that enough steps have, or exceed, to know it; 0 of too few steps."""
    return float(np.sort(sizes)[-FEWEST_OF_A_SIZE]) if len(sizes) >= FEWEST_OF_A_SIZE else 0.0


def smallest(sizes: np.ndarray) -> float:
    """The size that enough steps have, or stay below; infinite of too few steps."""
    return float(np.sort(sizes)[FEWEST_OF_A_SIZE - 1]) if len(sizes) >= FEWEST_OF_A_SIZE else math.inf


class StepTimeModel:
    """Predicts a step before it learns from it, so that the residual is honest; learns from a block of steps at once,
    from a larger one when it has learnt."""

    BLOCK, LARGE_BLOCK = 64, 256
    LEARNT = 1024  # steps
    MIN_STEPS = BLOCK  # before that a residual would be the model's ignorance, not the device's fault
    MIN_SEEN = (
        FEWEST_OF_A_SIZE  # before that a step with something that fewer steps had would show the model's ignorance
    )
    FORGET = 0.9998  # a step: half of what is known is of the last 3,500 steps
    RIDGE = 1e-4  # of a feature's own weight: decides between features that always occur together
    ALIKE = Alike(SLOPES, 1e-2)  # costs nothing where steps tell the slopes apart
    USUAL = (0.02, 0.1)  # bounds of the relative error that counts as usual; thrice that is clipped

    def __init__(self) -> None:
        self.steps = 0
        self._coefficients = np.zeros(NUM_FEATURES)  # nanoseconds
        self._unknown = np.arange(NUM_FEATURES)
        self._coefficient_list, self._unknown_list = [0.0] * NUM_FEATURES, list(range(NUM_FEATURES))
        self._seen = np.zeros(NUM_FEATURES)
        self._gram = np.zeros((NUM_FEATURES, NUM_FEATURES))
        self._moment = np.zeros(NUM_FEATURES)
        self._passive = np.ones(NUM_FEATURES, dtype=bool)  # the coefficients above nought
        self._usual = self.USUAL[1]
        self._fewest_rows = np.full(FEWEST_OF_A_SIZE, math.inf)  # of the smallest steps that were learnt
        self._block: list[np.ndarray] = []  # of features
        self._measured_ns: list[int] = []

    def predict(self, found: np.ndarray) -> float | None:
        """Nanoseconds of a step, or None while it has seen too few steps, or too few like this one."""
        (predicted,) = self._predicted(found[None])
        return None if np.isnan(predicted) else float(predicted)

    def predict_work(self, work: StepWork, *, eager: bool = True) -> float | None:
        """What `predict` says of one step without padding, in a tenth of the time: for a scheduler's search. It goes on
        below the smallest steps, so that what is unknown is beyond all that is known."""
        rows = work.tokens
        pairs = work.chunk_pairs - work.saved_pairs
        counts = [1, eager, work.decodes, work.decode_pairs, work.chunks, pairs, work.logit_rows]
        for begin, end in _SEGMENTS:
            counts.append(min(max(rows - begin, 0), end - begin))
        counts.append(0)  # a scheduler does not ask for the adapters of its tokens
        if self.steps < self.MIN_STEPS or any([counts[index] for index in self._unknown_list]):
            return None
        return sum(map(mul, counts, self._coefficient_list))

    def coefficients(self) -> np.ndarray:
        """Nanoseconds of each feature [NUM_FEATURES]; NaN of those that too few steps had."""
        known = self._coefficients.copy()
        known[self._unknown] = np.nan
        return known

    def observe_all(self, found: np.ndarray, device_ns: np.ndarray) -> np.ndarray:
        """Predicts steps, [steps, NUM_FEATURES], and keeps them to learn from: whole nanoseconds [steps], NaN where
        `predict` says None. Steps without a time above nought are predicted only."""
        predicted, first = [], 0
        while first < len(found):
            block = self.BLOCK if self.steps - len(self._measured_ns) < self.LEARNT else self.LARGE_BLOCK
            last = first + block - len(self._measured_ns)
            predicted.append(self._predicted(found[first:last]))
            measured = (device_ns[first:last] > 0) & np.isfinite(device_ns[first:last])
            self._block.append(found[first:last][measured])
            self._measured_ns += device_ns[first:last][measured].tolist()
            self.steps += int(measured.sum())
            if len(self._measured_ns) == block:
                self._learn()
                self._block, self._measured_ns = [], []
            first = last
        return np.rint(np.concatenate(predicted))

    def _predicted(self, found: np.ndarray) -> np.ndarray:
        known = np.full(len(found), np.nan)
        if self.steps >= self.MIN_STEPS:
            usable = ~found[:, self._unknown].any(axis=1) & (_rows(found) >= self._fewest_rows[-1] / FAR_BEYOND)
            known[usable] = found[usable] @ self._coefficients
        return known

    def _learn(self) -> None:
        rows, measured_ns = np.concatenate(self._block), np.array(self._measured_ns, dtype=float)
        known = self._coefficients if self.steps > self.MIN_STEPS else fitted(rows, measured_ns, alike=self.ALIKE)
        expected = np.maximum(rows @ known, 1.0)
        errors = np.abs(measured_ns / expected - 1)
        trust = np.minimum(1.0, 3 * self._usual / np.maximum(errors, 1e-9))
        middle = float(np.sort(errors)[len(errors) // 2])
        self._usual += (min(max(middle, self.USUAL[0]), self.USUAL[1]) - self._usual) / 8
        # What is expected has no noise; but a guess that is far too high would make its own correction light.
        unit = np.where(_far_too_high(rows, expected / measured_ns), np.maximum(measured_ns, expected / 4), expected)
        weight = trust / unit**2
        decay = self.FORGET ** len(measured_ns)
        weighted = rows * weight[:, None]
        self._gram = decay * self._gram + weighted.T @ rows
        self._moment = decay * self._moment + weighted.T @ measured_ns
        self._seen += (rows > 0).sum(axis=0)
        self._fewest_rows = np.sort(np.concatenate([self._fewest_rows, _rows(rows)]))[:FEWEST_OF_A_SIZE]
        self._seen[np.diagonal(self._gram) < NEGLIGIBLE_WEIGHT] = 0
        self._unknown = np.flatnonzero(self._seen < self.MIN_SEEN)
        usable = self._seen > 0
        self._coefficients, passive = non_negative(
            self._gram, self._moment, usable, ridge=self.RIDGE, passive=self._passive, alike=self.ALIKE
        )
        self._passive = passive | ~usable
        self._coefficient_list, self._unknown_list = self._coefficients.tolist(), self._unknown.tolist()


def _far_too_high(found: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """[steps] where the guess is more than twice the time, for most steps of the block with prompts or without: one
    short step is no wrong guess."""
    has_prompts, is_high = found[:, CHUNKS] > 0, ratio > 2
    shares = [is_high[part].mean() if part.any() else 0.0 for part in (~has_prompts, has_prompts)]
    return is_high & (np.where(has_prompts, shares[1], shares[0]) > 0.5)


def _rows(found: np.ndarray) -> np.ndarray:
    """[steps] of the matrix products."""
    return 1 + found[:, SLOPES].sum(axis=1)


_SEGMENTS = tuple(zip(KNOTS, (*KNOTS[1:], 2**62), strict=True))
