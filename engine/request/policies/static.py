"""Static batching: serving before batches became continuous (Orca, OSDI 2022, measures the difference)."""

from collections.abc import Sequence

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.policies.policy import PROMPTS_FIRST, Phase, Phases, Policy
from sojourn.engine.request.request import Request

CLOSED: Phases = ((Phase.PROMPTS,), (Phase.DECODES,))


class StaticBatching(Policy):
    """A batch is filled in order of arrival and computes all its prompts. Then it decodes, and no request is admitted
    until all of it has finished. A preempted request comes back with the next batch.

    Starvation: a batch is closed when it decodes, or after `max_num_seqs` admissions, with those counted that ended
    with their prompt. So between a prompt and its first decode stand fewer than 2 * `max_num_seqs` others, and a
    request waits for earlier ones and for those of its batch.
    """

    name = "static"

    def __init__(self, pool: BlockPool, max_num_seqs: int) -> None:
        super().__init__(pool, max_num_seqs)
        self._admitted = 0
        self._decoding = False

    def phases(self, running: Sequence[Request]) -> Phases:
        if not running:
            self._admitted, self._decoding = 0, False
        return CLOSED if self._decoding or self._admitted >= self._max_num_seqs else PROMPTS_FIRST

    def admitted(self, request: Request) -> None:
        self._admitted += 1

    def computed(self, plan: StepPlan) -> None:
        self._decoding = self._decoding or any(not item.is_prompt for item in plan.scheduled)
