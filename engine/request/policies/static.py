"""Static batching: what serving was before batches became continuous (Orca, OSDI 2022, measures the difference)."""

from collections.abc import Sequence

from engine.request.plan import StepPlan
from engine.request.policies.line import RankedLine
from engine.request.policies.policy import PROMPTS_FIRST, Courses, Part, Policy
from engine.request.request import Request

CLOSED: Courses = ((Part.PROMPTS,), (Part.DECODES,))


class StaticBatching(Policy):
    """A batch is filled in order of arrival and computes all its prompts; then it decodes, and until all of it has
    finished nobody else is admitted. One that is preempted comes back with the next batch.

    Starvation: a batch has at most `batch_size` requests, those counted that end with their prompt. Who has n requests
    before it is in a batch after at most n others; between prompt and first decode of a request stand at most
    `batch_size` - 1 prompts.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._admitted = 0
        self._decoding = False
        self.line = RankedLine(self.rank)

    def courses(self, running: Sequence[Request]) -> Courses:
        if not running:
            self._admitted, self._decoding = 0, False
        return CLOSED if self._decoding or self._admitted >= self._batch_size else PROMPTS_FIRST

    def admitted(self, request: Request) -> None:
        self._admitted += 1

    def computed(self, plan: StepPlan) -> None:
        self._decoding = self._decoding or any(item.kind == "decode" for item in plan.scheduled)
