"""The replica whose turn is next, of many: a heap, so that a turn costs the same in a large fleet."""

import heapq
from collections.abc import Sequence

from sojourn.replay.replica import Replica

NEVER = float("inf")


class NextTurn:
    """Owns the order of the replicas by their cutoff. Who changes a replica tells it by `changed`."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._heap = [(each.cutoff_ns, place) for place, each in enumerate(replicas) if each.cutoff_ns < NEVER]
        heapq.heapify(self._heap)

    def changed(self, place: int) -> None:
        if (cutoff_ns := self._replicas[place].cutoff_ns) < NEVER:
            heapq.heappush(self._heap, (cutoff_ns, place))

    def first(self) -> tuple[float, int]:
        """The earliest cutoff in ns, and the replica's number; infinite where all sleep."""
        heap = self._heap
        while heap:
            cutoff_ns, place = heap[0]
            if self._replicas[place].cutoff_ns == cutoff_ns:
                return cutoff_ns, place
            heapq.heappop(heap)
        return NEVER, 0
