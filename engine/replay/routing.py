"""Which replica gets a request: what a router in front of several servers would choose."""

from collections.abc import Sequence
from typing import Literal

from engine.replay.loop import Replica

Routing = Literal["round-robin", "least-loaded", "prefix"]


class Router:
    """Round-robin; the fewest requests in hand; or the replica that was last sent the longest beginning of the prompt,
    unless its batch is full. The router knows what it sent where, and nothing of evictions, as real ones do."""

    def __init__(self, replicas: Sequence[Replica], routing: Routing) -> None:
        self._replicas, self._routing = replicas, routing
        self._turn = -1
        self._sent_to: dict[bytes, Replica] = {}

    def choose(self, hashes: Sequence[bytes]) -> Replica:
        if len(self._replicas) == 1:
            return self._replicas[0]
        if self._routing == "round-robin":
            self._turn = (self._turn + 1) % len(self._replicas)
            return self._replicas[self._turn]
        chosen = min(self._replicas, key=lambda replica: replica.live)
        if self._routing == "prefix":
            known = next((self._sent_to[key] for key in reversed(hashes) if key in self._sent_to), None)
            if known is not None and known.live < known.scheduler.max_num_seqs:
                chosen = known
            self._sent_to.update(dict.fromkeys(hashes, chosen))
        return chosen
