"""Due times: the schedule's own, and those that depend on replies (sessions with their sub-agents, slots of a closed
loop).

Nothing here waits or reads a clock. The socket loop reports each end, in its thread, and gets the requests that follow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sojourn.loadgen.client.outgoing import STOPPED, Ended, Outgoing
from sojourn.loadgen.prompts.conversation import Conversation, PiecedBody, TurnParts, Wire
from sojourn.loadgen.replies.answer_text import answer_of
from sojourn.loadgen.scenario.arrivals import ClosedLoop
from sojourn.loadgen.scenario.scenario import Target
from sojourn.loadgen.schedule.draws import NS_PER_S
from sojourn.loadgen.schedule.request import SESSION_BEGIN, ScheduledRequest, chains_of, waits_of

Wires = Mapping[int, Wire]  # by index of the request


@dataclass(slots=True)
class _Chain:
    """A session in progress, or one request of a slot."""

    requests: dict[int, ScheduledRequest]  # by index
    waits: dict[int, set[int]]  # of each that was not sent yet: what has not ended of what it waits for
    free_ns: dict[int, int] = field(default_factory=dict)  # of each of those: the last end so far
    in_flight: int = 0
    conversations: dict[str, Conversation] = field(default_factory=dict)  # by session, sub-agents apart
    answers: dict[str, bytes] = field(default_factory=dict)  # the last one of each


class Pacer:
    """Owns the conversations in progress and the slots of a closed loop.

    `cancel` receives requests that will never be sent, because one of their session failed, with the reason. `ran_out`
    is called once, with the time since which a slot is free, if a closed loop has no requests left before its time is
    over.
    """

    def __init__(
        self, schedule: Sequence[ScheduledRequest], wire: Wires, target: Target, loop: ClosedLoop | None,
        cancel: Callable[[list[ScheduledRequest], Ended, str], None], ran_out: Callable[[int], None],
    ):  # fmt: skip
        self._chains = chains_of([request for request in schedule if not request.prelude])
        self._wire, self._target, self._loop, self._cancel, self._ran_out = wire, target, loop, cancel, ran_out
        self._has_run_out = False
        self._waiting = iter(self._chains)
        self._under_way: dict[int, _Chain] = {}
        self._until_ns: int | None = None

    def begin(self, start_ns: int) -> Iterator[Outgoing]:
        """Requests that depend on no reply, in order: all arrivals of an open loop, the first request of each slot."""
        if self._loop is None:
            for requests in self._chains:
                yield from self._first(requests, start_ns + requests[0].due_offset_ns)
            return
        if self._loop.duration_s is not None:
            self._until_ns = start_ns + round(self._loop.duration_s * NS_PER_S)
        # All at once: a slot that is free again before another one begins must not take what is meant for that one.
        firsts = [self._fill_slot(start_ns) for _ in range(self._loop.slots)]
        yield from (outgoing for first in firsts for outgoing in first)

    def follow(self, outgoing: Outgoing, ended: Ended) -> list[Outgoing]:
        """The requests that follow this end; none after the time of a closed loop is over.

        They are built during their think time; if that takes longer, the difference is client lag.
        """
        chain = self._under_way.pop(outgoing.index, None)
        if chain is None or ended.reason == STOPPED:
            return []
        chain.in_flight -= 1
        following: list[Outgoing] = []
        if chain.waits:
            request = chain.requests[outgoing.index]
            if fault := self._take_answer(chain, request, ended):
                lost = [chain.requests[index] for index in chain.waits]
                chain.waits.clear()
                self._cancel(lost, ended, f"turn {request.turn} of its session failed: {fault}")
            else:
                following = self._release(chain, outgoing.index, ended.last_ns)
        if self._loop is not None and not chain.in_flight and not chain.waits:
            following += self._fill_slot(ended.last_ns)
        return following

    def _take_answer(self, chain: _Chain, request: ScheduledRequest, ended: Ended) -> str:
        """Keeps the answer for the next turn of its conversation. Returns why there is none, "" where there is."""
        parts = self._wire[request.index]
        if ended.reason or not isinstance(parts, TurnParts) or not self._goes_on(chain, request):
            return ended.reason
        chain.answers[request.session_id], fault = answer_of(ended.reply, parts.api)
        return fault

    def _goes_on(self, chain: _Chain, request: ScheduledRequest) -> bool:
        """Whether a later request has the answer in its prompt."""
        return any(chain.requests[index].session_id == request.session_id for index in chain.waits)

    def _release(self, chain: _Chain, ended_index: int, free_ns: int) -> list[Outgoing]:
        """The requests that waited for this one alone, or for it as the last."""
        found = []
        for index, missing in list(chain.waits.items()):
            if ended_index not in missing:
                continue
            missing.discard(ended_index)
            chain.free_ns[index] = max(free_ns, chain.free_ns.get(index, free_ns))
            due_ns = chain.free_ns[index] + chain.requests[index].pause_ns
            if not missing and not self._is_over(due_ns):
                del chain.waits[index]
                found.append(self._outgoing(chain, chain.requests[index], due_ns))
        return found

    def _fill_slot(self, free_ns: int) -> list[Outgoing]:
        """What begins the next request or session of a slot that is free since `free_ns`."""
        for requests in self._waiting:
            due_ns = free_ns + requests[0].pause_ns
            return [] if self._is_over(due_ns) else self._first(requests, due_ns)
        if not self._has_run_out and not self._is_over(free_ns):
            self._has_run_out = True
            self._ran_out(free_ns)
        return []

    def _is_over(self, due_ns: int) -> bool:
        return self._until_ns is not None and due_ns >= self._until_ns

    def _first(self, requests: list[ScheduledRequest], due_ns: int) -> list[Outgoing]:
        first = requests[0]
        waits = {index: set(missing) for index, missing in waits_of(requests).items() if index != first.index}
        chain = _Chain({request.index: request for request in requests}, waits)
        return [self._outgoing(chain, first, due_ns), *self._release(chain, SESSION_BEGIN, due_ns)]

    def _outgoing(self, chain: _Chain, request: ScheduledRequest, due_ns: int) -> Outgoing:
        goes_on = self._goes_on(chain, request)
        if chain.waits or self._loop is not None:
            self._under_way[request.index] = chain
        chain.in_flight += 1
        wire = self._wire[request.index]
        if isinstance(wire, TurnParts):
            conversation = chain.conversations.setdefault(request.session_id, Conversation())
            wire, keeps = conversation.next_wire(wire, chain.answers.get(request.session_id, b"")), goes_on
        else:
            wire, keeps = wire.wire() if isinstance(wire, PiecedBody) else wire, False
        return Outgoing(
            request.index, due_ns, wire, self._target, keep_reply=keeps, logs_due=request.due_offset_ns is None,
            patience_ns=request.patience_ns, patience_for=request.patience_for,
        )  # fmt: skip
