"""How long a turn of the loop takes, fitted on the turns of one run.

A turn has host stages before the device begins and after it ends, and the device's own time. Each is linear in what
the step computed, with coefficients that cannot be negative. They are the non-negative least squares of the relative
errors. Errors far beyond the usual are clipped (Huber, 1964), so that one stall teaches nothing. The rows of the matrix
products have a piecewise linear cost, with knots only where the run has steps on both sides. Beyond the largest step
the last slope goes on, unless other runs of this model tell the time of larger ones (known_sizes.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from metrics.compute.step_time import FEWEST_OF_A_SIZE, KNOTS, reached
from metrics.statistics.non_negative import NEGLIGIBLE_WEIGHT, non_negative

FAR_BEYOND = 1.5  # times the largest size of the run: up to there its own line goes on
FEWEST_DECODES = 100  # steps: fewer do not tell what a row costs
SHORT_CHUNKS = (2, 4, 8, 16)  # tokens
SHORT_CHUNKS_COUNT = 3  # steps that each of them counts as
FEWEST_BETWEEN_KNOTS = 20  # steps, or the slope there would be noise
BASE_FEATURES = 7
FITTED_STEPS = 6_000  # more would not move the coefficients
FOLDS = 5
USUAL_ERROR = (0.02, 0.3)  # bounds of the relative error that counts as usual; thrice that is clipped
RIDGE = 1e-6  # of a feature's own weight: decides between features that always occur together


@dataclass(frozen=True, slots=True)
class StepColumns:
    """What the model reads of a run's steps, in order; float64 [steps]. Times are nanoseconds."""

    begin_ns: np.ndarray  # from the first step
    tokens: np.ndarray
    decodes: np.ndarray  # sequences with one new token
    decode_pairs: np.ndarray  # of a query and a key, in those
    chunks: np.ndarray  # sequences with more
    chunk_pairs: np.ndarray
    rows: np.ndarray  # of logits
    eager_prompts: np.ndarray  # 1 of a step with prompts where steps without them replay a graph; else 0
    device_ns: np.ndarray
    sampling_ns: np.ndarray  # the last part of it
    receive_ns: np.ndarray
    before_ns: np.ndarray  # what was received → the device begins
    after_ns: np.ndarray  # the device is done → committed
    publish_ns: np.ndarray
    has_graphs: bool = False  # steps of decodes alone replay CUDA graphs
    verifies: np.ndarray | float = 0.0  # of the chunks: sequences that verify drafts
    verified_rows: np.ndarray | float = 0.0  # of logits, of those

    def __len__(self) -> int:
        return len(self.begin_ns)

    def features(self, knots: tuple[int, ...]) -> np.ndarray:
        """[steps, BASE_FEATURES + len(knots)]"""
        segments = [
            np.clip(self.tokens - begin, 0, end - begin)
            for begin, end in zip(knots, (*knots[1:], 2**62), strict=True)
        ]  # fmt: skip
        base = (
            np.ones(len(self)), self.eager_prompts, self.decodes, self.decode_pairs, self.chunks,
            self.chunk_pairs, self.rows,
        )  # fmt: skip
        return np.stack([*base, *segments], axis=1)

    def host_features(self) -> np.ndarray:
        """[steps, 4]: the third are prompts that end in the step. A request is received, prepared and published once,
        however many chunks its prompt has."""
        prompt_rows = self.rows - self.decodes - self.verified_rows
        ended = np.clip(prompt_rows, 0, self.chunks - self.verifies)
        return np.stack([np.ones(len(self)), self.decodes + self.chunks, ended, self.tokens], axis=1)

    def host_stages(self) -> tuple[np.ndarray, ...]:
        return self.receive_ns, self.before_ns, self.after_ns, self.publish_ns


class StepTimes:
    """The fitted coefficients. `device_ns` and `host_ns` predict one step; the loop calls them for each turn."""

    def __init__(self, steps: StepColumns, beyond: StepColumns | None = None) -> None:
        """`beyond` are sizes that the run never had, with the time to expect; each counts like one step."""
        steps_reach = reached(steps.tokens)
        self.knots = _knots(steps.tokens) if beyond is None else _knots_until(max(steps_reach, beyond.tokens.max()))
        features = steps.features(self.knots)
        guessed = [each for each in (beyond, short_chunks(steps)) if each is not None]
        self.device = fitted(
            features, steps.device_ns, [(each.features(self.knots), each.device_ns) for each in guessed]
        )
        self.sampling = fitted(np.stack([np.ones(len(steps)), steps.rows], axis=1), steps.sampling_ns)
        host, stages = steps.host_features(), steps.host_stages()
        told = None if beyond is None else beyond.publish_ns > 0
        self.host = [
            fitted(host, stage, [] if told is None else [(beyond.host_features()[told], guess[told])])
            for stage, guess in zip(stages, stages if beyond is None else beyond.host_stages(), strict=True)
        ]
        self.device_ratio = steps.device_ns / np.maximum(features @ self.device, 1.0)
        self.host_ns = sum(host @ coefficients for coefficients in self.host)
        self.host_ratio = sum(stages) / np.maximum(self.host_ns, 1.0)
        self.predicted_ns = features @ self.device
        self.largest_tokens = FAR_BEYOND * steps_reach  # a step with more is beyond those of the run
        self.most_decodes = FAR_BEYOND * max(reached(steps.decodes), 1.0)
        self.told_tokens, self.told_decodes = self.largest_tokens, self.most_decodes  # of larger ones nothing tells
        if beyond is not None:
            self.told_tokens = max(self.told_tokens, float(beyond.tokens.max()))
            self.told_decodes = max(self.told_decodes, float(beyond.decodes.max()))
        self.error = held_out_error(steps)
        self._device = self.device.tolist()
        self._segments = list(zip(self.knots, (*self.knots[1:], 2**62), self._device[BASE_FEATURES:], strict=True))

    def expected_ns(self, steps: StepColumns) -> np.ndarray:
        """Of the device, for many steps [steps]."""
        return steps.features(self.knots) @ self.device

    def is_beyond(self, tokens: np.ndarray, decodes: np.ndarray) -> np.ndarray:
        """Which steps are far larger than those of the run, bool [steps]."""
        return (tokens > self.largest_tokens) | (decodes > self.most_decodes)

    def device_ns(
        self, tokens: int, decodes: int, decode_pairs: int, chunks: int, chunk_pairs: int, rows: int
    ) -> float:  # fmt: skip
        """Of one step, as it usually is."""
        c = self._device
        total = c[0] + c[2] * decodes + c[3] * decode_pairs + c[6] * rows
        if chunks:
            total += c[1] + c[4] * chunks + c[5] * chunk_pairs
        for begin, end, slope in self._segments:
            if tokens <= begin:
                break
            total += slope * ((tokens if tokens < end else end) - begin)
        return total


def short_chunks(steps: StepColumns) -> StepColumns | None:
    """Steps with chunks shorter than those of the run, with the time that its decodes tell.

    A chunk of few tokens has the rows of as many decodes, and reads its context once. Without such steps the fit would
    book what long chunks cost beside their rows on each chunk. None where the run has short chunks, no prompts, or too
    few decodes to tell.
    """
    alone = steps.chunks == 0
    per_chunk = (steps.tokens - steps.decodes)[~alone] / steps.chunks[~alone]
    if alone.sum() < FEWEST_DECODES or not (~alone).any() or steps.has_graphs:
        return None
    shortest = np.sort(per_chunk)[min(FEWEST_OF_A_SIZE, len(per_chunk)) - 1]
    lengths = [length for length in SHORT_CHUNKS if length < shortest]
    if not lengths:
        return None
    knots = _knots(steps.tokens[alone])
    device = fitted(steps.features(knots)[alone], steps.device_ns[alone])
    context = steps.decode_pairs[alone].sum() / steps.decodes[alone].sum()
    most = FAR_BEYOND * reached(steps.tokens[alone])
    sizes = [
        (float(decodes), float(count), float(length))
        for length in lengths for count in (1, 4) for decodes in (0, 2, 6) if decodes + count * length <= most
    ]  # fmt: skip
    if not sizes:
        return None
    decodes, chunks, length = np.array(sizes * SHORT_CHUNKS_COUNT).T
    tokens, nothing = decodes + chunks * length, np.zeros(len(decodes))
    as_decodes = StepColumns(
        begin_ns=nothing, tokens=tokens, decodes=tokens, decode_pairs=(decodes + chunks) * context, chunks=nothing,
        chunk_pairs=nothing, rows=tokens, eager_prompts=nothing, device_ns=nothing, sampling_ns=nothing,
        receive_ns=nothing, before_ns=nothing, after_ns=nothing, publish_ns=nothing,
    )  # fmt: skip
    pairs = chunks * (length * context + length * (length + 1) / 2)
    return replace(
        as_decodes, decodes=decodes, rows=decodes + chunks, decode_pairs=decodes * context, chunks=chunks,
        chunk_pairs=pairs, device_ns=as_decodes.features(knots) @ device,
    )  # fmt: skip


def fitted(
    features: np.ndarray, measured_ns: np.ndarray, guessed: Sequence[tuple[np.ndarray, np.ndarray]] = ()
) -> np.ndarray:
    """Coefficients, none below nought, of the least squares of the relative errors. `guessed` are further features and
    times, each as good as one that was measured."""
    if len(features) > FITTED_STEPS:  # evenly chosen over the run
        chosen = np.linspace(0, len(features) - 1, FITTED_STEPS).astype(int)
        rare = np.flatnonzero(features[:, 1] > np.median(features[:, 1]))
        if len(rare) > FITTED_STEPS:
            rare = rare[np.linspace(0, len(rare) - 1, FITTED_STEPS).astype(int)]
        chosen = np.union1d(chosen, rare)
        features, measured_ns = features[chosen], measured_ns[chosen]
    for more, ns in guessed:
        features, measured_ns = np.concatenate([features, more]), np.concatenate([measured_ns, ns])
    target = np.maximum(measured_ns, 0.0)
    unit = np.maximum(target, max(float(np.median(target)) / 4, 1.0))
    trust = np.ones(len(target))
    coefficients = np.zeros(features.shape[1])
    for _ in range(6):
        weight = trust / unit**2
        weighted = features * weight[:, None]
        gram = weighted.T @ features
        usable = np.diagonal(gram) > NEGLIGIBLE_WEIGHT
        coefficients, _ = non_negative(gram, weighted.T @ target, usable, ridge=RIDGE)
        expected = np.maximum(features @ coefficients, 1.0)
        errors = np.abs(target - expected) / np.maximum(expected, unit / 2)
        usual = float(np.clip(np.median(errors), *USUAL_ERROR))
        trust = np.minimum(1.0, 3 * usual / np.maximum(errors, 1e-9))
        unit = np.maximum(expected, max(float(np.median(expected)) / 4, 1.0))
    return coefficients


def held_out_error(steps: StepColumns) -> float:
    """How wrong the sizes of steps are to each other, in stretches of the run that the fit did not see. The mean, by
    device time, of each size's relative error against that of all. That the machine was slower there is no error: a
    replay takes its level from the run."""
    count = len(steps)
    if count < 4 * FOLDS:
        return 1.0
    features, place = steps.features(_knots(steps.tokens)), np.arange(count) * 4 * FOLDS // count
    expected = np.zeros(count)
    for fold in range(FOLDS):
        out = place % FOLDS == fold
        expected[out] = features[out] @ fitted(features[~out], steps.device_ns[~out])
    expected = np.maximum(expected, 1.0)
    ratio = np.minimum(steps.device_ns / expected, 3.0)  # one stall is no error of a size
    sizes = np.floor(np.log2(expected)).astype(int)
    sizes -= sizes.min()
    time_ns, measured = np.bincount(sizes, expected), np.bincount(sizes, expected * ratio)
    used = time_ns > 0
    errors = np.abs(measured[used] / time_ns[used] / (measured.sum() / time_ns.sum()) - 1)
    return float((errors * time_ns[used]).sum() / time_ns.sum())


def _knots(tokens: np.ndarray) -> tuple[int, ...]:
    """Those of KNOTS with steps on both sides. The first three always: prompts tell what so many rows cost together,
    and a batch that the run never had is then between two knots, not beyond the last."""
    chosen = list(KNOTS[:1])
    for knot in KNOTS[1:]:
        between = ((tokens > chosen[-1]) & (tokens <= knot)).sum()
        above = (tokens > knot).sum()
        if above >= FEWEST_BETWEEN_KNOTS and (between >= FEWEST_BETWEEN_KNOTS or knot in KNOTS[:3]):
            chosen.append(knot)
    return tuple(chosen)


def _knots_until(largest_tokens: float) -> tuple[int, ...]:
    """Those of KNOTS with sizes well above them. Above the last one the line goes on as steep as it was."""
    return (KNOTS[0], *(knot for knot in KNOTS[1:] if FAR_BEYOND * knot <= largest_tokens))
