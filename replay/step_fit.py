"""How long a turn of the loop takes, fitted on the turns of one run.

A turn has host stages before the device begins and after it ends, and the device's own time. Each is linear in what
the step computed, with coefficients that cannot be negative: metrics/statistics/relative_fit.py. The rows of the
matrix products have a piecewise linear cost, with knots only where the run has steps on both sides, and slopes as alike
as left_out.py says. Beyond the largest and the smallest step the slope there goes on, unless other runs of this model
tell the time of such sizes (known_sizes.py).
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from sojourn.metrics.compute.step_time import FAR_BEYOND, FEWEST_OF_A_SIZE, KNOTS, reached, smallest
from sojourn.metrics.statistics.non_negative import Alike
from sojourn.metrics.statistics.relative_fit import fitted
from sojourn.replay.left_out import LARGEST_RATIO, LeftOut, left_out, size_classes

FEWEST_DECODES = 100  # steps: fewer do not tell what a row costs
SHORT_CHUNKS = (2, 4, 8, 16)  # tokens
SHORT_CHUNKS_COUNT = 3  # steps that each of them counts as
FEWEST_BETWEEN_KNOTS = 20  # steps, or the slope there would be noise
BASE_FEATURES = 7
LOOSE, STIFF = 1e-4, 0.2  # weight of the difference of neighbouring slopes


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

    def part(self, chosen: np.ndarray) -> "StepColumns":
        """Some of the steps: bool [steps]."""
        arrays = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{n: values[chosen] for n, values in arrays.items() if isinstance(values, np.ndarray)})

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


class StepRatios(NamedTuple):
    """Of steps, what they took against what a model expects of them; float64 [steps]."""

    predicted_ns: np.ndarray  # of the device
    device_ratio: np.ndarray
    host_ns: np.ndarray
    host_ratio: np.ndarray


class StepTimes:
    """The fitted coefficients. `device_ns` and `host_ns` predict one step; the loop calls them for each turn."""

    def __init__(self, steps: StepColumns, beyond: StepColumns | None = None) -> None:
        """`beyond` are sizes that the run never had, with the time to expect; each counts like one step."""
        steps_reach = reached(steps.tokens)
        self.knots = _knots(steps.tokens) if beyond is None else _knots_until(max(steps_reach, beyond.tokens.max()))
        features = steps.features(self.knots)
        self.alike, found = _slopes(steps, features, follows=beyond is not None)
        self.error = found.error  # relative, of sizes left out of the fit; infinite where nothing tells
        self.sizes = int((np.bincount(size_classes(steps.tokens)) >= FEWEST_OF_A_SIZE).sum())
        guessed = [each for each in (beyond, short_chunks(steps)) if each is not None]
        self.device = fitted(
            features, steps.device_ns, [(each.features(self.knots), each.device_ns) for each in guessed], self.alike
        )
        self.sampling = fitted(np.stack([np.ones(len(steps)), steps.rows], axis=1), steps.sampling_ns)
        host, stages = steps.host_features(), steps.host_stages()
        told = None if beyond is None else beyond.publish_ns > 0
        self.host = [
            fitted(host, stage, [] if told is None else [(beyond.host_features()[told], guess[told])])
            for stage, guess in zip(stages, stages if beyond is None else beyond.host_stages(), strict=True)
        ]
        self.predicted_ns, self.device_ratio, self.host_ns, self.host_ratio = self.ratios(steps)
        self.mean_ratio = _mean_ratio(self.predicted_ns, self.device_ratio)  # the fit clips what stalled
        # A plan does not tell which rows have logits, and which prompts end.
        plans = self.ratios(replace(steps, rows=steps.decodes + steps.chunks, verifies=0.0, verified_rows=0.0))
        # of the device and of the host
        self.plan_ratios = (
            _mean_ratio(plans.predicted_ns, plans.device_ratio), _mean_ratio(plans.host_ns, plans.host_ratio),
        )  # fmt: skip
        self.fewest_tokens, self.largest_tokens = smallest(steps.tokens), steps_reach  # of the steps of the run
        self.most_decodes = max(reached(steps.decodes), 1.0)
        # Of steps further away than these nothing tells.
        self.told_fewest, self.told_tokens = self.fewest_tokens / FAR_BEYOND, FAR_BEYOND * self.largest_tokens
        self.told_decodes = FAR_BEYOND * self.most_decodes
        if beyond is not None:
            self.told_fewest = min(self.told_fewest, float(beyond.tokens.min()))
            self.told_tokens = max(self.told_tokens, float(beyond.tokens.max()))
            self.told_decodes = max(self.told_decodes, float(beyond.decodes.max()))
        self.known_error = _known_error(steps.tokens, self.predicted_ns, self.device_ratio)
        self._device = self.device.tolist()
        self._segments = list(zip(self.knots, (*self.knots[1:], 2**62), self._device[BASE_FEATURES:], strict=True))

    def ratios(self, steps: StepColumns) -> StepRatios:
        """Of the steps of the run, or of another one."""
        predicted_ns, host = self.expected_ns(steps), steps.host_features()
        timed = (steps.device_ns >= 0) & np.isfinite(steps.device_ns)
        measured_ns = np.where(timed, steps.device_ns, predicted_ns)
        host_ns = sum((host @ coefficients for coefficients in self.host), np.zeros(len(steps)))
        host_ratio = sum(steps.host_stages()) / np.maximum(host_ns, 1.0)
        return StepRatios(predicted_ns, measured_ns / np.maximum(predicted_ns, 1.0), host_ns, host_ratio)

    def expected_ns(self, steps: StepColumns) -> np.ndarray:
        """Of the device, for many steps [steps]."""
        return steps.features(self.knots) @ self.device

    def is_beyond(self, tokens: np.ndarray, decodes: np.ndarray) -> np.ndarray:
        """Which steps are larger or smaller than those of the run, so that their time is extrapolated: bool [steps]."""
        return (tokens > self.largest_tokens) | (decodes > self.most_decodes) | (tokens < self.fewest_tokens)

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
    device = fitted(steps.features(knots)[alone], steps.device_ns[alone], alike=_alike(LOOSE))
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


def _alike(weight: float) -> Alike:
    return Alike(slice(BASE_FEATURES, None), weight)


def _slopes(steps: StepColumns, features: np.ndarray, *, follows: bool) -> tuple[Alike, LeftOut]:
    """How alike the slopes are, and the errors of sizes left out of such a fit. Of a run with few sizes nothing speaks
    against a straight line, unless the fit `follows` what other runs tell."""

    def errors(alike: Alike) -> LeftOut:
        return left_out(
            steps.tokens,
            steps.device_ns,
            lambda seen, out: features[out] @ fitted(features[seen], steps.device_ns[seen], alike=alike),
        )

    loose = errors(_alike(LOOSE))
    stiff = loose if follows else errors(_alike(STIFF))
    if follows or stiff.error > loose.error + loose.standard_error:
        return _alike(LOOSE), loose
    return _alike(STIFF), stiff


def _mean_ratio(predicted_ns: np.ndarray, ratio: np.ndarray) -> float:
    known = np.isfinite(ratio)
    return float((predicted_ns * ratio)[known].sum() / max(predicted_ns[known].sum(), 1.0))


def _known_error(tokens: np.ndarray, predicted_ns: np.ndarray, ratio: np.ndarray) -> float:
    """How wrong the sizes of the run are to each other: the mean, by device time, of each one's relative error against
    that of all. That the machine was slower there is no error: a replay takes its level from the run."""
    sizes = size_classes(tokens)
    measured_ns = np.bincount(sizes, predicted_ns * np.minimum(ratio, LARGEST_RATIO))
    expected_ns = np.maximum(np.bincount(sizes, predicted_ns), 1.0)
    errors = np.abs(measured_ns / expected_ns / (measured_ns.sum() / expected_ns.sum()) - 1)
    return float((errors * expected_ns).sum() / expected_ns.sum())


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
