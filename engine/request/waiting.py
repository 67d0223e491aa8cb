"""The waiting requests: in the policy's queue, behind other long prompts, behind the prompt that they share, or in the
side queue of a technique."""

from collections.abc import Sequence

from sojourn.engine.request.policies.policy import Policy, RankedQueue
from sojourn.engine.request.request import Request, State
from sojourn.engine.request.technique import SideQueue


class WaitingQueue:
    """Waiting requests are in the policy's queue, or in a side queue, where they block no other request. Those are
    forks until their leader's prompt is computed, prompts of more than `long_prefill_tokens` that came up while
    `max_long_prefills` of them were being computed, and what techniques hold back."""

    def __init__(
        self,
        policy: Policy,
        sides: Sequence[SideQueue] = (),
        max_long_prefills: int | None = None,
        long_prefill_tokens: int | None = None,
    ):
        self.count = 0  # in all queues
        self.moves: list[tuple[Request, str | None]] = []  # since the last plan: to which side queue; None: back
        self._queue = policy.queue
        self._sides = {side.name: side for side in sides}
        self._max_long = max_long_prefills
        self._long_tokens = long_prefill_tokens
        self._long = RankedQueue(policy.rank)  # a side queue
        self._long_admitted: list[Request] = []  # some may have computed their prompt
        self._forks: dict[str, list[Request]] = {}  # leader's id → its waiting forks, the other side queue
        self._num_forks = 0

    @property
    def num_in_queue(self) -> int:
        return self.count - len(self._long) - self._num_forks - sum(side.count for side in self._sides.values())

    @property
    def has_forks(self) -> bool:
        """A request waits for its leader's prompt."""
        return self._num_forks > 0

    def join(self, request: Request, state: State = State.WAITING) -> None:
        """Begins to wait, in the policy's queue."""
        request.state = state
        self.count += 1
        self._queue.push(request)

    def follow(self, request: Request, leader: Request) -> None:
        """Begins to wait for its leader's prompt."""
        request.state = State.WAITING
        self.count += 1
        self._num_forks += 1
        request.fork_of = leader.id
        self._forks.setdefault(leader.id, []).append(request)
        self._move(request, "leader")

    def release(self, leader: Request) -> list[Request]:
        """The forks that waited for this leader, and wait no more: `join` or `follow` is next for each."""
        forks = self._forks.pop(leader.id, []) if self._forks else []
        for fork in forks:
            self.count -= 1
            self._num_forks -= 1
            self._move(fork, None)
        return forks

    def next(self, free_long: float) -> Request | None:
        """The head of the queue. Long prompts that come up while `free_long` is 0 move to their side queue, and so do
        requests that may not enter for a technique's reason."""
        while (request := self._queue.head()) is not None:
            if free_long <= 0 and self._is_long(request):
                self._queue.remove(request)
                self._long.push(request)
                self._move(request, "policy")
            elif (side := self._obstacle(request)) is not None:
                self._queue.remove(request)
                side.wait(request)
                self._move(request, side.name)
            else:
                break
        return request

    def recall(self) -> None:
        """Requests that techniques held back, and may try again now, come back from their side queue."""
        for side in self._sides.values():
            for request in side.returning():
                side.leave(request)
                self._move(request, None)
                self._queue.push(request)

    def _obstacle(self, request: Request) -> SideQueue | None:
        return next((side for side in self._sides.values() if not side.may_enter(request)), None)

    def admit(self, request: Request) -> bool:
        """The head has its blocks and leaves the queue. Returns whether it is a long prompt."""
        self.leave(request)
        if long := self._is_long(request):
            self._long_admitted.append(request)
        return long

    def leave(self, request: Request) -> None:
        """Waits no more, in whichever queue it is."""
        self.count -= 1
        if request.side_queue is None:
            self._queue.remove(request)
        elif request.side_queue == "policy":
            self._long.remove(request)
        elif request.side_queue in self._sides:
            self._sides[request.side_queue].leave(request)
        else:
            self._num_forks -= 1
            self._forks[request.fork_of].remove(request)

    def free_long(self) -> float:
        """How many long prompts may begin now. As many come back from their side queue."""
        if self._max_long is None:
            return float("inf")
        self._long_admitted = [r for r in self._long_admitted if r.state is State.RUNNING and r.is_prefilling]
        free = self._max_long - len(self._long_admitted)
        for _ in range(min(free, len(self._long))):
            request = self._long.head()
            self._long.remove(request)
            self._move(request, None)
            self._queue.push(request)
        return free

    def refusals(self, reason: str | None) -> dict[str, int]:
        """Reason → waiting requests, with the reason of the queue's head first."""
        if not self.count:
            return {}
        size = self.num_in_queue
        counts = {reason: 1, "behind_head": size - 1} if reason and size else {}
        own = ("policy", len(self._long)), ("leader", self._num_forks)
        for side_queue, number in (*own, *((side.name, side.count) for side in self._sides.values())):
            counts[side_queue] = counts.get(side_queue, 0) + number
        return {why: number for why, number in counts.items() if number}

    def _is_long(self, request: Request) -> bool:
        return self._max_long is not None and request.num_tokens - request.num_computed_tokens > self._long_tokens

    def _move(self, request: Request, side_queue: str | None) -> None:
        request.side_queue = side_queue
        self.moves.append((request, side_queue))
