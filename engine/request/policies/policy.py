"""The decisions of a scheduling policy, with the defaults that most policies share."""

import heapq
from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar, Protocol

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.request import Request


class Phase(Enum):
    """A part of planning a step."""

    DECODES = "running requests with one token to compute"
    PROMPTS = "running requests with more"
    ADMISSIONS = "waiting requests that are admitted"


Phases = tuple[tuple[Phase, ...], ...]  # a step holds the first group in which there is anything to compute
MIXED: Phases = ((Phase.DECODES, Phase.PROMPTS, Phase.ADMISSIONS),)
PROMPTS_FIRST: Phases = ((Phase.PROMPTS, Phase.ADMISSIONS), (Phase.DECODES,))


class Queue(Protocol):
    """The waiting requests that could be admitted, in the policy's order."""

    def push(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None:
        """The request was admitted, moved to a side queue, or ended."""
        ...

    def head(self) -> Request | None:
        """The next request to admit. It stays in the queue."""
        ...


class RankedQueue:
    """Waiting requests by a key that is read once, when a request joins; the smallest is the head. No step loops over
    them.

    Requests that leave from the middle stay in the heap until they come up, or until they are its larger part.
    """

    def __init__(self, key: Callable[[Request], tuple]):
        self._key = key  # must be unique: it ends with the request's arrival index
        self._heap: list[tuple[tuple, Request]] = []
        self._members: dict[int, tuple] = {}  # arrival index → key

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.arrival_index in self._members

    def push(self, request: Request) -> None:
        key = self._members[request.arrival_index] = self._key(request)
        heapq.heappush(self._heap, (key, request))

    def remove(self, request: Request) -> None:
        del self._members[request.arrival_index]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if self._is_member(entry)]
            heapq.heapify(self._heap)

    def head(self) -> Request | None:
        while self._heap and not self._is_member(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def members(self) -> list[Request]:
        """All of them, in no order."""
        return [entry[1] for entry in self._heap if self._is_member(entry)]

    def _is_member(self, entry: tuple[tuple, Request]) -> bool:
        return self._members.get(entry[1].arrival_index) is entry[0]


class Policy:
    """First come, first served, unless a policy overrides it. One object serves one scheduler.

    A policy is a class in a file of `policies`, and a member of the registry there.
    """

    name: ClassVar[str]  # by which the setting `policy` chooses it
    setting: ClassVar[str | None] = None  # of EngineConfig: its third argument, which no other policy reads
    queue: Queue

    def __init__(self, pool: BlockPool, max_num_seqs: int) -> None:
        self._pool, self._max_num_seqs = pool, max_num_seqs
        self.queue = RankedQueue(self.rank)

    def rank(self, request: Request) -> tuple:
        """Unique, and the same for a request's whole life. When memory is short, the last in rank is preempted.

        The first in rank never is, so that one request always makes progress.
        """
        return (request.arrival_index,)

    def displaced_by(self, waiting: Request, running: Sequence[Request]) -> list[Request]:
        """Running requests that may be preempted for the head of the queue. All are after it in rank."""
        return []

    def phases(self, running: Sequence[Request]) -> Phases:
        return MIXED

    def admitted(self, request: Request) -> None:
        """A request was admitted: `num_computed_tokens` of it need no work."""

    def accepted(self, request: Request, num_drafts: int) -> None:
        """A step gave a request so many tokens more than the one that was planned."""

    def computed(self, plan: StepPlan) -> None:
        """A step was planned, and will be computed."""
