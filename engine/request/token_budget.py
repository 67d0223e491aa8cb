"""How many tokens a step may hold: a number, or as many as keep a step with prompts and decodes within its target.

Pure: no clock and no torch. What a step will take says a model of step times, which is learnt or given.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.metrics.compute.cost_model import (
    ModelShape,
    StepWork,
    Windows,
    chunk_pairs,
    decode_pairs,
    prompt_pairs,
    steps_work,
)
from sojourn.metrics.compute.step_time import StepTimeModel, features

OBJECTIVE_SHARE = 0.8  # of a time per output token: the rest is for the host's work and the spread of steps
DECODE_STEPS = 3.0  # without an objective: prompts get two thirds of the device, and tokens come a third as fast
UNNOTICED_MS = 25.0  # 40 tokens a second, several times what anybody reads: shorter steps only cost throughput
LEAST_PROMPT_TOKENS = 16  # of a step, so that prompts get on
LEAST_STRETCH = (
    1.5  # of a step's time: prompts get a third of it at least, where its fixed cost alone is near the target
)
START_PROMPT_TOKENS = 64  # while the model knows nothing


class StepTime(Protocol):
    """Predicts steps."""

    def predict_work(self, work: StepWork, *, eager: bool = True) -> float | None:
        """Nanoseconds of the device; None where it knows too little of such steps."""
        ...


@dataclass(frozen=True, slots=True)
class StepTarget:
    """How long a step may take in which prompts are computed beside decodes."""

    objective_tpot_ms: float | None = None

    def target_ns(self, decode_ns: float, least_ns: float) -> float:
        """From the step with the decodes alone, and from the one with LEAST_PROMPT_TOKENS beside them."""
        if self.objective_tpot_ms is not None:
            wanted_ns = OBJECTIVE_SHARE * self.objective_tpot_ms * 1e6
        else:
            wanted_ns = max(DECODE_STEPS * decode_ns, UNNOTICED_MS * 1e6)
        return max(wanted_ns, LEAST_STRETCH * least_ns)


class TokenBudget(Protocol):
    """Decides the budget of each step."""

    most: int  # tokens of the largest step

    def beside(self, decodes: Sequence[Request], prompts: Sequence[Request]) -> int:
        """Tokens of a step with all these decodes and the beginning of these prompts; prompts may be waiting, too."""
        ...

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """A step was computed."""
        ...


class FixedBudget:
    """The same for every step."""

    def __init__(self, most: int):
        self.most = most

    def beside(self, decodes: Sequence[Request], prompts: Sequence[Request]) -> int:
        return self.most

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None: ...


class TimedBudget:
    """The largest step that stays within its target, by the predictions of `step_time`.

    It holds all decodes and LEAST_PROMPT_TOKENS at least, and `most` tokens at most.
    """

    def __init__(self, most: int, windows: Windows, target: StepTarget, step_time: StepTime):
        self.most = most
        self._windows = windows
        self._target = target
        self._step_time = step_time

    def beside(self, decodes: Sequence[Request], prompts: Sequence[Request]) -> int:
        if not decodes:
            return self.most
        count = len(decodes)
        rows = count + sum([len(request.drafts) for request in decodes])
        pairs = decode_pairs(self._windows, [request.num_computed_tokens for request in decodes])
        past = prompts[0].num_computed_tokens if prompts else 0
        alone = StepWork(rows, count, pairs, 0, 0, 0, rows)
        decode_ns = self._step_time.predict_work(alone, eager=False) or self._step_time.predict_work(alone)

        def mixed_ns(tokens: int) -> float | None:
            others = self._chunk_pairs(tokens, past)
            return self._step_time.predict_work(StepWork(rows + tokens, count, pairs, 1, others, 0, rows + 1))

        least, most = LEAST_PROMPT_TOKENS, self.most - rows
        least_ns = mixed_ns(least)
        if decode_ns is None or least_ns is None:
            return min(rows + START_PROMPT_TOKENS, self.most)
        target_ns = self._target.target_ns(decode_ns, least_ns)

        def is_late(tokens: int) -> bool:
            predicted_ns = mixed_ns(tokens)  # what is not known is beyond all that was seen
            return predicted_ns is None or predicted_ns > target_ns

        least += bisect_left(range(least + 1, most + 1), True, key=is_late)  # the time grows with the tokens
        return min(rows + least, self.most)

    def _chunk_pairs(self, tokens: int, past: int) -> int:
        return prompt_pairs(self._windows, tokens, past)

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None: ...


class LearningBudget(TimedBudget):
    """Learns the times from the steps that are computed. `measured` are steps from before: their work, whether they
    were launched kernel by kernel, and their nanoseconds."""

    BLOCK = 64  # steps that are learnt at once
    STEPS_OF_MEASURED = 2 * BLOCK  # that those from before count for

    def __init__(
        self, most: int, shape: ModelShape, target: StepTarget, measured: Sequence[tuple[StepWork, bool, int]] = ()
    ):
        self._model = StepTimeModel()
        super().__init__(most, shape.windows, target, self._model)
        self._shape = shape
        self._steps: list[tuple[list[int], list[int], int, int, bool, int]] = []
        if measured:
            rounds = -(-self.STEPS_OF_MEASURED // len(measured))
            found = [features(work, eager=eager) for work, eager, _ in measured]
            self._model.observe_all(
                np.tile(found, (rounds, 1))[: self.STEPS_OF_MEASURED],
                np.tile([ns for *_, ns in measured], rounds)[: self.STEPS_OF_MEASURED],
            )

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None:
        items = plan.scheduled
        self._steps.append((
            [item.new_tokens for item in items], [item.past_tokens for item in items], outcome.logit_rows,
            outcome.padding_tokens, outcome.graph == "eager",
            outcome.device_ns - outcome.load_ns - outcome.store_ns,
        ))  # fmt: skip
        if len(self._steps) == self.BLOCK:
            self._learn()

    def _chunk_pairs(self, tokens: int, past: int) -> int:
        return chunk_pairs(self._shape, tokens, past)

    def _learn(self) -> None:
        news, pasts, rows, padding, eager, device_ns = zip(*self._steps, strict=True)
        self._steps = []
        new, past = (np.fromiter(chain.from_iterable(parts), np.int64) for parts in (news, pasts))
        work = steps_work(self._shape, new, past, np.array([len(each) for each in news]), np.array(rows))
        found = features(work, np.array(padding), eager=np.array(eager, dtype=float))
        self._model.observe_all(found, np.array(device_ns))
