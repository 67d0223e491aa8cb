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

    Starvation: a batch is closed when it decodes, or when `batch_size` were admitted to it, those counted that ended
    with their prompt. So between a prompt and its first decode stand fewer than 2 * `batch_size` others, and a request
    waits for those that came before it and for those that share its batch.
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
