"""Due times: the schedule's own, and those that depend on replies (later turns of a session, slots of a closed loop).

Nothing here waits or reads a clock. The socket loop reports each end, in its thread, and gets the next request.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sojourn.loadgen.client.outgoing import STOPPED, Ended, Outgoing
from sojourn.loadgen.prompts.conversation import Conversation, TurnParts
from sojourn.loadgen.replies.answer_text import answer_of
from sojourn.loadgen.scenario.arrivals import ClosedLoop
from sojourn.loadgen.scenario.scenario import Target
from sojourn.loadgen.schedule.draws import NS_PER_S
from sojourn.loadgen.schedule.request import ScheduledRequest, chains_of

Wire = Mapping[int, bytes | TurnParts]  # by index of the request


@dataclass(slots=True)
class _Chain:
    """A session in progress, or one request of a slot."""

    requests: list[ScheduledRequest]
    conversation: Conversation | None
    turn: int = 0


class Pacer:
    """Owns the conversations in progress and the slots of a closed loop.

    `cancel` receives requests that will never be sent, because a turn before them failed, with the reason. `ran_out` is
    called once, with the time since which a slot is free, if a closed loop has no requests left before its time is
    over.
    """

    def __init__(
        self, schedule: Sequence[ScheduledRequest], wire: Wire, target: Target, loop: ClosedLoop | None,
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
                yield self._first(requests, start_ns + requests[0].due_offset_ns)
            return
        if self._loop.duration_s is not None:
            self._until_ns = start_ns + round(self._loop.duration_s * NS_PER_S)
        # All at once: a slot that is free again before another one begins must not take what is meant for that one.
        firsts = [self._fill_slot(start_ns) for _ in range(self._loop.slots)]
        yield from (outgoing for outgoing in firsts if outgoing is not None)

    def follow(self, outgoing: Outgoing, ended: Ended) -> Outgoing | None:
        """The request that follows this end; None if none does, or the time of a closed loop is over."""
        chain = self._under_way.pop(outgoing.index, None)
        if chain is None or ended.reason == STOPPED:
            return None
        chain.turn += 1
        if chain.turn < len(chain.requests):
            turn, fault = self._next_turn(chain, ended)
            if turn is not None or not fault:
                return turn
            self._cancel(chain.requests[chain.turn :], ended, f"turn {chain.turn - 1} of its session failed: {fault}")
        return self._fill_slot(ended.last_ns) if self._loop is not None else None

    def _next_turn(self, chain: _Chain, ended: Ended) -> tuple[Outgoing | None, str]:
        """The next turn of a session, or why there is none: "" after the end of the loop's time. It is built during the
        think time; if that takes longer, the difference is client lag."""
        request = chain.requests[chain.turn]
        parts: TurnParts = self._wire[request.index]
        answer, fault = (b"", ended.reason) if ended.reason else answer_of(ended.reply, parts.api)
        due_ns = ended.last_ns + request.pause_ns
        if fault or self._is_over(due_ns):
            return None, fault
        return self._outgoing(chain, due_ns, chain.conversation.next_wire(parts, answer)), ""

    def _fill_slot(self, free_ns: int) -> Outgoing | None:
        """The next request or session for a slot that is free since `free_ns`."""
        for requests in self._waiting:
            due_ns = free_ns + requests[0].pause_ns
            return None if self._is_over(due_ns) else self._first(requests, due_ns)
        if not self._has_run_out and not self._is_over(free_ns):
            self._has_run_out = True
            self._ran_out(free_ns)
        return None

    def _is_over(self, due_ns: int) -> bool:
        return self._until_ns is not None and due_ns >= self._until_ns

    def _first(self, requests: list[ScheduledRequest], due_ns: int) -> Outgoing:
        wire = self._wire[requests[0].index]
        if not isinstance(wire, TurnParts):
            return self._outgoing(_Chain(requests, None), due_ns, wire)
        conversation = Conversation()
        return self._outgoing(_Chain(requests, conversation), due_ns, conversation.next_wire(wire))

    def _outgoing(self, chain: _Chain, due_ns: int, wire: bytes) -> Outgoing:
        request = chain.requests[chain.turn]
        goes_on = chain.turn + 1 < len(chain.requests)
        if goes_on or self._loop is not None:
            self._under_way[request.index] = chain
        return Outgoing(
            request.index, due_ns, wire, self._target, keep_reply=goes_on, logs_due=request.due_offset_ns is None,
            patience_ns=request.patience_ns, patience_for=request.patience_for,
        )  # fmt: skip
