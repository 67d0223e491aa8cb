"""The least prompt work first."""

from engine.memory.block_pool import BlockPool
from engine.request.policies.line import RankedLine
from engine.request.policies.policy import Policy
from engine.request.request import Request


class ShortestPrefillFirst(Policy):
    """Ordered by the tokens that are to be computed before the next one is drawn: cached ones do not count.

    The cache is asked when a request begins to wait, so that the order is stable; what others cache meanwhile is
    reused but moves nobody forward.

    Starvation: each later arrival is charged `ageing` tokens more. A request with n tokens to compute is overtaken by
    fewer than n / ageing later ones.
    """

    def __init__(self, pool: BlockPool, ageing: int = 4) -> None:
        self._pool = pool
        self._ageing = ageing
        self.line = RankedLine(self._key)

    def _key(self, request: Request) -> tuple:
        return (self._work(request) + request.order * self._ageing, request.order)

    def _work(self, request: Request) -> int:
        if request.blocks:  # a fork that reads its leader's prompt
            return request.num_tokens - request.num_computed_tokens
        size = self._pool.block_size
        cached = self._pool.match(request.reusable_hashes(size))
        return request.num_tokens - len(cached) * size
