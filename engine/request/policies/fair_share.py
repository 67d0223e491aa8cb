"""Fair share by tenant: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024, algorithm 2)."""

import heapq

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.policies.policy import Policy, RankedQueue
from sojourn.engine.request.request import Request

MAX_TENANTS = 10_000  # that have a counter
MAX_OVERTAKES = 1024  # requests in a row that may go ahead of the oldest


class FairShare(Policy):
    """The tenant with the least service is next, in order of arrival within a tenant. No capacity idles for fairness.

    Service is 1 for each computed prompt token, charged once at admission, and `output_weight` for each sampled token.
    Both are divided by the weight of the tenant: a tenant of weight 2 gets twice the service of one of weight 1.
    A tenant that comes back without a request in the queue is lifted to the least served one there: absence saves
    nothing up. Requests in a side queue (for a long-prefill slot, or a leader) are not in the queue.

    Fairness: while two tenants have requests in the queue, their service differs by at most 2 * max(longest prompt,
    output_weight * tokens of the running batch) (theorem 4.4 there), however many requests each has sent.
    Starvation: of the request that has waited longest at most MAX_OVERTAKES others go ahead in a row; so no number of
    new tenants, each with a claim to be served next, can block it for ever. If it then lacks a long-prefill slot, it is
    next as soon as there is one.
    """

    name = "fair-share"
    setting = "fair_output_weight"

    def __init__(self, pool: BlockPool, max_num_seqs: int, output_weight: int = 2) -> None:
        super().__init__(pool, max_num_seqs)
        self._output_weight = output_weight
        self.queue = TenantQueues(MAX_OVERTAKES)

    def admitted(self, request: Request) -> None:
        self.queue.claims.pop(request.arrival_index, None)
        if request.counts.preemptions == 0:
            computed = request.prompt_tokens - request.num_computed_tokens
            self.queue.charge(request.tenant, computed / request.weight)

    def computed(self, plan: StepPlan) -> None:
        for item in plan.scheduled:
            if item.samples:
                self.queue.charge(item.request.tenant, self._output_weight / item.request.weight)

    def accepted(self, request: Request, num_drafts: int) -> None:
        self.queue.charge(request.tenant, num_drafts * self._output_weight / request.weight)


class TenantQueues:
    """A queue and a counter of its service for each tenant. The head is the first of the least served tenant."""

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._overtakes = 0  # requests that went ahead of the oldest since one was the oldest
        self._counters: dict[str, float] = {}
        self._queues: dict[str, RankedQueue] = {}  # of tenants with a request in the queue
        self._entries: dict[str, tuple[float, int, str]] = {}  # tenant → its valid entry in the heap
        self._heap: list[tuple[float, int, str]] = []  # (counter, arrival index of its first request, tenant)
        self._by_age = RankedQueue(lambda request: (request.arrival_index,))
        self.claims: dict[int, None] = {}  # arrival indices of requests that are due by age, until they are admitted
        self._due = RankedQueue(
            lambda request: (request.arrival_index,)
        )  # of the requests that are due, those in the queue
        self._left_last = 0  # counter of the tenant that left the queue last

    def push(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._queues:
            head = self._least_served()
            level = self._left_last if head is None else self._counters[head.tenant]
            self._forget(level)
            self._counters[tenant] = max(self._counters.get(tenant, 0), level)
            self._queues[tenant] = RankedQueue(lambda request: (request.arrival_index,))
        self._queues[tenant].push(request)
        self._by_age.push(request)
        if request.arrival_index in self.claims:
            self._due.push(request)
        self._enter(tenant)

    def remove(self, request: Request) -> None:
        oldest = self._by_age.head()
        if oldest is request and self._overtakes >= self._max_overtakes:
            self.claims[request.arrival_index] = None
            if len(self.claims) > MAX_TENANTS:  # of requests that ended without admission
                del self.claims[next(iter(self.claims))]
        self._overtakes = 0 if oldest is request else self._overtakes + 1
        if request in self._due:
            self._due.remove(request)
        tenant = request.tenant
        self._by_age.remove(request)
        self._queues[tenant].remove(request)
        if not self._queues[tenant]:
            del self._queues[tenant], self._entries[tenant]
            self._left_last = self._counters[tenant]
            if len(self._heap) > 2 * len(self._entries) + 64:  # mostly of tenants that left
                self._heap = sorted(self._entries.values())

    def head(self) -> Request | None:
        if self._due:
            return self._due.head()
        return self._by_age.head() if self._overtakes >= self._max_overtakes else self._least_served()

    def charge(self, tenant: str, tokens: float) -> None:
        self._counters[tenant] = self._counters.get(tenant, 0) + tokens

    def _least_served(self) -> Request | None:
        while self._heap:
            entry = self._heap[0]
            tenant = entry[2]
            if self._entries.get(tenant) is entry:
                self._enter(tenant)  # its counter may have grown since
                if self._entries[tenant] is entry:
                    return self._queues[tenant].head()
            heapq.heappop(self._heap)
        return None

    def _enter(self, tenant: str) -> None:
        entry = (self._counters[tenant], self._queues[tenant].head().arrival_index, tenant)
        if self._entries.get(tenant) != entry:
            self._entries[tenant] = entry
            heapq.heappush(self._heap, entry)

    def _forget(self, level: float) -> None:
        """Tenants below the level would be lifted to it anyway. If too many are above it, their debt is waived."""
        if len(self._counters) > MAX_TENANTS:
            owing = {tenant: c for tenant, c in self._counters.items() if c > level or tenant in self._queues}
            if len(owing) > MAX_TENANTS // 2:
                owing = {tenant: self._counters[tenant] for tenant in self._queues}
            self._counters = owing
