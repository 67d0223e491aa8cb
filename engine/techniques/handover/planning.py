"""A prefill server around the loop: what it computed is held until a decode server has read it."""

from collections.abc import Callable, Iterator
from typing import Any

from sojourn.engine.request.request import Request
from sojourn.engine.request.technique import Technique
from sojourn.engine.techniques.handover.handoffs import Handoffs
from sojourn.engine.techniques.tiers.planning import TierPlanning


class HandoverPlanning(Technique):
    """Stands before the tiers that it stores to: it wants the blocks of a prompt before these look for its prefix."""

    name = "handover"

    def __init__(self, handoffs: Handoffs, tiers: TierPlanning, clock: Callable[[], int]):
        self.handoffs = handoffs
        self._tiers, self._clock = tiers, clock

    @property
    def is_waiting(self) -> bool:
        return self.handoffs.is_waiting

    def arrived(self, request: Request, message: Any) -> None:
        if message.hands_over:
            request.parts[self.name] = None  # until its blocks are there
            self.handoffs.begin(request, message.transfer_id)

    def cancelled(self, request: Request) -> None:
        if self.name in request.parts:
            self.handoffs.cancel(request)

    def keeps(self, request: Request, now_ns: int) -> bool:
        return self.name in request.parts and self.handoffs.finish(request, now_ns)

    def report(self, request: Request) -> dict[str, Any]:
        return {"kv_source": request.parts.get(self.name)}

    def ended(self, is_idle: bool) -> Iterator[tuple[Request, int, int]]:
        """The requests whose prompt a decode server can read from now on. Leases that are over end, too.

        A decode server waits for blocks. Where they can be stored at once, they wait for no step.
        """
        at_once = self._tiers.mover.stores_beside_steps and not self._tiers.tiers.has_loads
        if self.handoffs.wants_blocks_now and (at_once or is_idle):
            self._tiers.transfer()
        self.handoffs.announce()
        now_ns = self._clock()
        self.handoffs.end_leases(now_ns)
        for request, since_ns in self.handoffs.take_ready(now_ns):
            yield request, since_ns, now_ns

    def close(self) -> None:
        self.handoffs.close()
