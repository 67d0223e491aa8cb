"""How Ray Serve chooses a replica for a request. Ray copies this file by value to its proxies, so that nothing here may
hold what cannot be copied."""

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
