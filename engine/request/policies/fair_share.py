"""Fair share by tenant: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024, algorithm 2)."""

import heapq

from engine.request.plan import StepPlan
from engine.request.policies.line import RankedLine
from engine.request.policies.policy import Policy
from engine.request.request import Request

MAX_TENANTS = 10_000  # whose counters are kept


class FairShare(Policy):
    """The tenant that was served least is next, in order of arrival within a tenant. Nobody idles for fairness' sake.

    Served is `input_weight` for each prompt token that was computed, charged at admission and once, and `output_weight`
    for each drawn token. A tenant that comes back without anybody in the line is lifted to the least served one there:
    nobody saves up by staying away. Requests that a long-prefill slot or a leader holds back do not stand in the line.

    Fairness: while two tenants have requests in the line, what they were served differs by at most 2 * max(input_weight
    * longest prompt, output_weight * tokens of the running batch) (theorem 4.4 there), however many each has sent.
    Starvation: of the request that has waited longest at most `max_passed_over` others go ahead in a row; so no number
    of new tenants, each with a claim to be served next, can hold it back for ever. If a long-prefill slot is what it
    lacks then, it is next as soon as there is one.
    """

    def __init__(self, input_weight: int = 1, output_weight: int = 2, max_passed_over: int = 1024) -> None:
        self._input_weight = input_weight
        self._output_weight = output_weight
        self.line = TenantLines(max_passed_over)

    def admitted(self, request: Request) -> None:
        self.line.settle(request)
        if request.preemptions == 0:
            computed = request.prompt_tokens - request.num_computed_tokens
            self.line.charge(request.tenant, self._input_weight * computed)

    def computed(self, plan: StepPlan) -> None:
        for item in plan.scheduled:
            if item.samples:
                self.line.charge(item.request.tenant, self._output_weight)


class TenantLines:
    """A line for each tenant, and a counter of what it was served. The head is the first of the least served tenant."""

    def __init__(self, max_passed_over: int) -> None:
        self._max_passed_over = max_passed_over
        self._passed_over = 0  # requests that went ahead of the oldest since one was the oldest
        self._counters: dict[str, int] = {}
        self._lines: dict[str, RankedLine] = {}  # of tenants with somebody in the line
        self._entries: dict[str, tuple[int, int, str]] = {}  # tenant → its valid entry in the heap
        self._heap: list[tuple[int, int, str]] = []  # (counter, order of its first request, tenant)
        self._by_age = RankedLine(lambda request: (request.order,))
        self._claims: dict[int, None] = {}  # orders of those whose turn came by age, until they are admitted
        self._due = RankedLine(lambda request: (request.order,))  # ... who stand in the line
        self._left_last = 0  # counter of the tenant that left the line last

    def push(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._lines:
            head = self._least_served()
            level = self._left_last if head is None else self._counters[head.tenant]
            self._forget(level)
            self._counters[tenant] = max(self._counters.get(tenant, 0), level)
            self._lines[tenant] = RankedLine(lambda request: (request.order,))
        self._lines[tenant].push(request)
        self._by_age.push(request)
        if request.order in self._claims:
            self._due.push(request)
        self._enter(tenant)

    def remove(self, request: Request) -> None:
        oldest = self._by_age.head()
        if oldest is request and self._passed_over >= self._max_passed_over:
            self._claims[request.order] = None
            if len(self._claims) > MAX_TENANTS:  # of requests that ended without a place
                del self._claims[next(iter(self._claims))]
        self._passed_over = 0 if oldest is request else self._passed_over + 1
        if request in self._due:
            self._due.remove(request)
        tenant = request.tenant
        self._by_age.remove(request)
        self._lines[tenant].remove(request)
        if not self._lines[tenant]:
            del self._lines[tenant], self._entries[tenant]
            self._left_last = self._counters[tenant]
            if len(self._heap) > 2 * len(self._entries) + 64:  # mostly of tenants that left
                self._heap = sorted(self._entries.values())

    def head(self) -> Request | None:
        if self._due:
            return self._due.head()
        return self._by_age.head() if self._passed_over >= self._max_passed_over else self._least_served()

    def settle(self, request: Request) -> None:
        """It got its place."""
        self._claims.pop(request.order, None)

    def charge(self, tenant: str, tokens: int) -> None:
        self._counters[tenant] = self._counters.get(tenant, 0) + tokens

    def _least_served(self) -> Request | None:
        while self._heap:
            entry = self._heap[0]
            tenant = entry[2]
            if self._entries.get(tenant) is entry:
                self._enter(tenant)  # its counter may have grown since
                if self._entries[tenant] is entry:
                    return self._lines[tenant].head()
            heapq.heappop(self._heap)
        return None

    def _enter(self, tenant: str) -> None:
        entry = (self._counters[tenant], self._lines[tenant].head().order, tenant)
        if self._entries.get(tenant) != entry:
            self._entries[tenant] = entry
            heapq.heappush(self._heap, entry)

    def _forget(self, level: int) -> None:
        """Tenants below the level would be lifted to it anyway. If too many are above it, their debt is waived."""
        if len(self._counters) > MAX_TENANTS:
            kept = {tenant: c for tenant, c in self._counters.items() if c > level or tenant in self._lines}
            if len(kept) > MAX_TENANTS // 2:
                kept = {tenant: self._counters[tenant] for tenant in self._lines}
            self._counters = kept
