"""Who waits, and for what: for his turn, for the end of another long prompt, or for the prompt that he shares."""

from engine.request.policies.line import RankedLine
from engine.request.policies.policy import Policy
from engine.request.request import Request, State


class WaitingRoom:
    """Waiting requests stand in the policy's line. Two kinds are held aside, where they hold up nobody: forks until
    their leader's prompt is computed, and prompts of more than `long_prefill_tokens` that came up while
    `max_long_prefills` of them were being computed."""

    def __init__(self, policy: Policy, max_long_prefills: int | None = None, long_prefill_tokens: int | None = None):
        self.count = 0  # of all that wait
        self.moves: list[tuple[Request, str | None]] = []  # since the last plan: who went aside and why; None: back
        self._line = policy.line
        self._max_long = max_long_prefills
        self._long_tokens = long_prefill_tokens
        self._long = RankedLine(policy.rank)  # held aside
        self._long_admitted: list[Request] = []  # some may be done with their prompt
        self._forks: dict[str, list[Request]] = {}  # leader's id → who waits for it
        self._num_forks = 0

    @property
    def num_in_line(self) -> int:
        return self.count - len(self._long) - self._num_forks

    @property
    def has_followers(self) -> bool:
        """Somebody waits for a leader's prompt."""
        return self._num_forks > 0

    def join(self, request: Request, state: State = State.WAITING) -> None:
        """Begins to wait, in the line."""
        request.state = state
        self.count += 1
        self._line.push(request)

    def follow(self, request: Request, leader: Request) -> None:
        """Begins to wait, for its leader's prompt."""
        request.state = State.WAITING
        self.count += 1
        self._num_forks += 1
        request.fork_of = leader.id
        self._forks.setdefault(leader.id, []).append(request)
        self._hold(request, "leader")

    def release(self, leader: Request) -> list[Request]:
        """The forks that waited for this leader, who then wait no more: `join` or `follow` is next for each."""
        forks = self._forks.pop(leader.id, []) if self._forks else []
        for fork in forks:
            self.count -= 1
            self._num_forks -= 1
            self._hold(fork, None)
        return forks

    def next(self, free_long: float) -> Request | None:
        """The head of the line. Long prompts that come up while no more of them may be computed are set aside."""
        while (request := self._line.head()) is not None and free_long <= 0 and self._is_long(request):
            self._line.remove(request)
            self._long.push(request)
            self._hold(request, "policy")
        return request

    def admit(self, request: Request) -> bool:
        """The head has its blocks and leaves the line. Tells whether it is a long prompt."""
        self.leave(request)
        if long := self._is_long(request):
            self._long_admitted.append(request)
        return long

    def leave(self, request: Request) -> None:
        """Waits no more, wherever it did."""
        self.count -= 1
        if request.held_aside is None:
            self._line.remove(request)
        elif request.held_aside == "policy":
            self._long.remove(request)
        else:
            self._num_forks -= 1
            self._forks[request.fork_of].remove(request)

    def free_long(self) -> float:
        """Long prompts that may begin now. So many that were held aside come back to the line."""
        if self._max_long is None:
            return float("inf")
        self._long_admitted = [r for r in self._long_admitted if r.state is State.RUNNING and r.is_prefilling]
        free = self._max_long - len(self._long_admitted)
        for _ in range(min(free, len(self._long))):
            request = self._long.head()
            self._long.remove(request)
            self._hold(request, None)
            self._line.push(request)
        return free

    def refusals(self, reason: str | None) -> dict[str, int]:
        """Reason → waiting requests, first what the head of the line was refused for."""
        if not self.count:
            return {}
        line = self.num_in_line
        counts = {reason: 1, "behind_head": line - 1} if reason and line else {}
        for held, number in (("policy", len(self._long)), ("leader", self._num_forks)):
            counts[held] = counts.get(held, 0) + number
        return {why: number for why, number in counts.items() if number}

    def _is_long(self, request: Request) -> bool:
        return self._max_long is not None and request.num_tokens - request.num_computed_tokens > self._long_tokens

    def _hold(self, request: Request, why: str | None) -> None:
        request.held_aside = why
        self.moves.append((request, why))
