"""Waiting requests in an order that no step has to loop over."""

import heapq
from collections.abc import Callable

from engine.request.request import Request


class RankedLine:
    """Waiting requests by a key that is read once, when a request joins; the smallest is the head.

    Requests that leave from the middle stay in the heap until they come up, or until they are its larger part.
    """

    def __init__(self, key: Callable[[Request], tuple]):
        self._key = key  # must be unique: it ends with the request's order
        self._heap: list[tuple[tuple, Request]] = []
        self._members: dict[int, tuple] = {}  # order → key

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.order in self._members

    def push(self, request: Request) -> None:
        key = self._members[request.order] = self._key(request)
        heapq.heappush(self._heap, (key, request))

    def remove(self, request: Request) -> None:
        del self._members[request.order]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if self._is_member(entry)]
            heapq.heapify(self._heap)

    def head(self) -> Request | None:
        while self._heap and not self._is_member(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def _is_member(self, entry: tuple[tuple, Request]) -> bool:
        return self._members.get(entry[1].order) is entry[0]
