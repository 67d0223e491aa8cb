"""Waiting prompts before running decodes, and never in one step: what vLLM did before it mixed them."""

from collections.abc import Sequence

from engine.request.plan import StepPlan
from engine.request.policies.line import RankedLine
from engine.request.policies.policy import PROMPTS_FIRST, Courses, Policy
from engine.request.request import Request


class PrefillFirst(Policy):
    """First come, first served; whoever computes its prompt stalls everyone who draws tokens.

    Starvation: after `patience` steps without a decode, one step belongs to the decodes if there are any.
    """

    def __init__(self, patience: int = 64) -> None:
        self._patience = patience
        self._without_decode = 0
        self.line = RankedLine(self.rank)

    def courses(self, running: Sequence[Request]) -> Courses:
        return PROMPTS_FIRST if self._without_decode < self._patience else PROMPTS_FIRST[::-1]

    def computed(self, plan: StepPlan) -> None:
        prompts_only = all(item.kind != "decode" for item in plan.scheduled)
        self._without_decode = self._without_decode + 1 if prompts_only else 0
