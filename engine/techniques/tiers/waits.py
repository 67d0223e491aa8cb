"""The requests that wait for reads into host memory, and how long each of them does."""

import heapq
import math
from collections.abc import Callable

from sojourn.engine.techniques.tiers.transfers import Prefetch


class Waits:
    """By arrival index. A request waits until its reads end, or until its time is over."""

    def __init__(self, clock: Callable[[], int]):
        self._clock = clock
        self._prefetches: dict[int, Prefetch] = {}
        self._until: list[tuple[int, int, Prefetch]] = []  # a heap: when a request stops to wait, its arrival index

    def __len__(self) -> int:
        return len(self._prefetches)

    @property
    def prefetches(self) -> list[Prefetch]:
        return list(self._prefetches.values())

    @property
    def next_end_ns(self) -> float:
        """When the next request may stop to wait; infinity: none waits."""
        return self._until[0][0] if self._until else math.inf

    def begin(self, arrival_index: int, prefetch: Prefetch, patience_ns: int) -> None:
        self._prefetches[arrival_index] = prefetch
        prefetch.patience_ns = patience_ns
        self._wait_until(self._clock() + patience_ns, arrival_index, prefetch)

    def of(self, arrival_index: int) -> Prefetch | None:
        return self._prefetches.get(arrival_index)

    def end(self, arrival_index: int) -> Prefetch | None:
        """The request was admitted, or ended."""
        return self._prefetches.pop(arrival_index, None)

    def take_late(self, heard_ns: Callable[[Prefetch], int]) -> list[Prefetch]:
        """Those whose time is over by now, and who wait no longer. `heard_ns`: when a server that computes what one of
        them waits for last said so; its time begins again there."""
        late: list[Prefetch] = []
        if not self._until:
            return late
        now_ns = self._clock()
        while self._until and self._until[0][0] <= now_ns:
            until_ns, arrival_index, prefetch = heapq.heappop(self._until)
            if until_ns != prefetch.until_ns or prefetch.is_done or prefetch.is_cancelled:
                continue
            if (next_ns := heard_ns(prefetch) + prefetch.patience_ns) > now_ns:
                self._wait_until(next_ns, arrival_index, prefetch)
                continue
            prefetch.give_up(now_ns)
            late.append(prefetch)
        return late

    def _wait_until(self, until_ns: int, arrival_index: int, prefetch: Prefetch) -> None:
        prefetch.until_ns = until_ns
        heapq.heappush(self._until, (until_ns, arrival_index, prefetch))
