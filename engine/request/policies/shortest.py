"""The least prompt work first."""

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.request.policies.policy import Policy, RankedQueue
from sojourn.engine.request.request import Request


class ShortestPrefillFirst(Policy):
    """Ordered by the tokens to compute before the next one is sampled: cached ones do not count.

    The cache is read when a request begins to wait, so that the order is stable. Blocks that are cached later are
    reused, but do not move a request forward.

    Starvation: each later arrival is charged `ageing` tokens more. A request with n tokens to compute is overtaken by
    fewer than n / ageing later ones.
    """

    name = "shortest-prefill-first"
    setting = "shortest_ageing"

    def __init__(self, pool: BlockPool, max_num_seqs: int, ageing: int = 4) -> None:
        super().__init__(pool, max_num_seqs)
        self._ageing = ageing
        self.queue = RankedQueue(self._key)

    def _key(self, request: Request) -> tuple:
        return (self._work(request) + request.arrival_index * self._ageing, request.arrival_index)

    def _work(self, request: Request) -> int:
        if request.blocks:  # a fork that reads its leader's prompt
            return request.num_tokens - request.num_computed_tokens
        size = self._pool.block_size
        cached = self._pool.match(request.reusable_hashes(size))
        return request.num_tokens - len(cached) * size
