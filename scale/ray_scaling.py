"""How many replicas Ray Serve runs, by what their servers say. Ray copies this file by value to its controller, so that
nothing here may hold what cannot be copied."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

GAUGE = re.compile(r"^sojourn_request_(waiting|running)\{[^}]*\} (\S+)$", re.MULTILINE)
OUTCOME = re.compile(
    r'^sojourn_request_objective_total\{[^}]*objective="all_objectives"[^}]*outcome="(\w+)"[^}]*\} (\S+)$',
    re.MULTILINE,
)


class Load:
    """What a server's /metrics say of its load: places in its batch, requests that wait and run, and those that ended
    since the last look, with those of them that missed an objective. `ended` is 0 without objectives. A server whose
    page did not come, or has no gauges, says nothing, so that no replica is taken away for it."""

    def __init__(self) -> None:
        self._counted: dict[str, float] | None = None  # at the last look

    def look(self, places: int, page: str) -> dict[str, float]:
        gauges = {name: float(value) for name, value in GAUGE.findall(page)}
        if len(gauges) < 2:
            return {}
        outcomes = [(outcome, float(value)) for outcome, value in OUTCOME.findall(page)]
        now = {
            "ended": sum(value for _, value in outcomes),
            "missed": sum(value for outcome, value in outcomes if outcome == "missed"),
        }
        before = self._counted or now
        self._counted = now
        since = {name: max(0.0, now[name] - before[name]) for name in now}
        return {"places": places} | gauges | since


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
