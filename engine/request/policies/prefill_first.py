"""Waiting prompts before running decodes, and never in one step: vLLM did so before it mixed them."""

from collections.abc import Sequence

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.policies.policy import PROMPTS_FIRST, Phases, Policy
from sojourn.engine.request.request import Request


class PrefillFirst(Policy):
    """First come, first served. A request that computes its prompt stalls all that decode.

    Starvation: after `patience` steps without a decode, one step belongs to the decodes if there are any.
    """

    name = "prefill-first"
    setting = "prefill_patience"

    def __init__(self, pool: BlockPool, max_num_seqs: int, patience: int = 64) -> None:
        super().__init__(pool, max_num_seqs)
        self._patience = patience
        self._without_decode = 0

    def phases(self, running: Sequence[Request]) -> Phases:
        return PROMPTS_FIRST if self._without_decode < self._patience else PROMPTS_FIRST[::-1]

    def computed(self, plan: StepPlan) -> None:
        prompts_only = all(item.is_prompt for item in plan.scheduled)
        self._without_decode = self._without_decode + 1 if prompts_only else 0
