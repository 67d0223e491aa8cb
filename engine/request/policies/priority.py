"""Lower numbers first, at the cost of running requests where there is no room."""

from collections.abc import Sequence

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.request.policies.policy import Policy
from sojourn.engine.request.request import Request


class Priority(Policy):
    """Ordered by priority, then by arrival. A waiting request preempts running ones of a higher number, if sequences or
    blocks are short. Of the step's tokens it takes nothing from them: `max_prefill_chunk_tokens` bounds their prompts.

    Starvation: one step of priority is worth `ageing` arrivals. A request of priority p yields to one of priority q < p
    only if that came at most (p - q) * ageing arrivals later, in the queue as well as in the batch; so at most so many
    of q go before it. The order is fixed at arrival: ageing costs nothing.
    """

    name = "priority"
    setting = "priority_ageing"

    def __init__(self, pool: BlockPool, max_num_seqs: int, ageing: int = 256) -> None:
        super().__init__(pool, max_num_seqs)
        self._ageing = ageing

    def rank(self, request: Request) -> tuple:
        aged = request.arrival_index + request.priority * self._ageing
        return (aged, request.priority, request.arrival_index)

    def displaced_by(self, waiting: Request, running: Sequence[Request]) -> list[Request]:
        rank, priority = self.rank(waiting), waiting.priority
        return [request for request in running if request.priority > priority and self.rank(request) > rank]
