"""How many replicas Ray Serve runs. Ray copies this file by value to its controller, so that nothing here may hold what
cannot be copied."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class GoodputPolicy:
    """One replica more while requests wait, or while many miss an objective; one less where the others have room.

    It reads the means of what the replicas record, over Ray's `look_back_period_s`. Ray then waits for
    `upscale_delay_s` or `downscale_delay_s`, in which the answer must stay the same, and keeps the bounds.
    """

    def __init__(self, waiting: float, missed: float, busy: float):
        """`waiting`: requests, mean of a replica; `missed`: share of the requests that ended; `busy`: share of the
        places in the batch that one replica less may need."""
        self.waiting, self.missed, self.busy = waiting, missed, busy

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        said = {name: list(of.values()) for name, of in (context.aggregated_metrics or {}).items()}
        replicas, places = context.target_num_replicas, said.get("places") or []
        if len(places) != replicas or context.current_num_replicas != replicas:
            return replicas, {}  # one starts or ends: what the others say is not yet what they will say with it
        waiting, running = sum(said.get("waiting", ())), sum(said.get("running", ()))
        ended, missed = sum(said.get("ended", ())), sum(said.get("missed", ()))
        missed_share = missed / ended if ended else 0.0
        if waiting > self.waiting * replicas or missed_share > self.missed:
            return replicas + 1, {}
        room = self.busy * min(places) * (replicas - 1)
        if missed_share == 0 and waiting + running <= room and replicas > 1:
            return replicas - 1, {}
        return replicas, {}
