"""Lower numbers first, at the cost of running requests where there is no room."""

from collections.abc import Sequence

from engine.request.policies.line import RankedLine
from engine.request.policies.policy import Policy
from engine.request.request import Request


class Priority(Policy):
    """Ordered by priority, then by arrival; a waiting request throws out running ones of a higher number, if places or
    blocks are short. Of the step's tokens it takes nothing from them: `max_prefill_chunk_tokens` bounds their prompts.

    Starvation: one step of priority is worth `ageing` arrivals. A request of priority p gives way to one of priority
    q < p only if that came at most (p - q) * ageing arrivals later, in the line as well as in the batch; so at most so
    many of q go before it. The order is fixed at arrival: ageing costs nothing.
    """

    def __init__(self, ageing: int = 256) -> None:
        self._ageing = ageing
        self.line = RankedLine(self.rank)

    def rank(self, request: Request) -> tuple:
        return (request.order + request.priority * self._ageing, request.priority, request.order)

    def displaced_by(self, waiting: Request, running: Sequence[Request]) -> list[Request]:
        rank, priority = self.rank(waiting), waiting.priority
        return [request for request in running if request.priority > priority and self.rank(request) > rank]
