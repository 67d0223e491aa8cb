"""How Ray Serve chooses a replica for a request, and how many replicas there are.

Ray copies this file by value to its proxies and its controller, so that nothing here may hold what cannot be copied.
"""

from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.experimental.round_robin_router import RoundRobinRouter
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

READY = "ready"  # of a replica's routing stats: 1 while its server takes requests


class SkipsUnready(RequestRouter):
    """Leaves out replicas whose server drains or replaces its core, while another one is ready."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        ready = [replica for replica in replicas if replica.routing_stats.get(READY, 1)]
        super().update_replicas(ready or replicas)


class BySession(SkipsUnready, ConsistentHashRouter):
    """The replica whose point on a ring follows that of the header X-Session-ID; without the header any replica."""


class InTurn(SkipsUnready, RoundRobinRouter):
    """The next replica."""


class ByRequests(SkipsUnready, FIFOMixin, RequestRouter):
    """The replica with the fewest open requests. Ray asks the candidates where it does not know."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [candidate_replicas] if candidate_replicas else []


ROUTERS = {"consistent_hash": BySession, "least_requests": ByRequests, "round_robin": InTurn}


class GoodputPolicy:
    """One replica more while requests wait, or while many miss an objective; one less where the others have room.

    It reads the means of what the replicas record, over Ray's `look_back_period_s`. Ray then waits for
    `upscale_delay_s` or `downscale_delay_s`, in which the answer must stay the same, and keeps the bounds.
    """

    def __init__(self, waiting: float, missed: float, busy: float):
        """`waiting`: requests, mean of a replica; `missed`: share of the requests that ended; `busy`: share of the
        places in the batch that one replica less may need."""
        self.waiting, self.missed, self.busy = waiting, missed, busy

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        said = {name: list(of.values()) for name, of in (context.aggregated_metrics or {}).items()}
        replicas, places = context.target_num_replicas, said.get("places") or []
        if len(places) != replicas or context.current_num_replicas != replicas:
            return replicas, {}  # one starts or ends: what the others say is not yet what they will say with it
        waiting, running = sum(said.get("waiting", ())), sum(said.get("running", ()))
        ended, missed = sum(said.get("ended", ())), sum(said.get("missed", ()))
        missed_share = missed / ended if ended else 0.0
        if waiting > self.waiting * replicas or missed_share > self.missed:
            return replicas + 1, {}
        if missed_share == 0 and waiting + running <= self.busy * min(places) * (replicas - 1):
            return replicas - 1, {}
        return replicas, {}
