"""One publisher's messages, in their order: what was missed is asked for once, and what nobody has any more is lost.

A publisher numbers its messages from 0. A gap in the numbers is a message that was missed; numbers that begin anew are
a publisher that began anew, whose blocks are all gone. Where the publisher answers questions, messages wait for the
answer. No sockets here, and no clock but the caller's.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator

import msgspec

from sojourn.metrics.memory.kv_event_wire import MalformedBatch, decode_batch
from sojourn.metrics.records import KvEventRecord

MOST_WAITING_BYTES = 256 << 20  # of messages that wait for an answer; those beyond are lost


class MessageSequence:
    """Owns the numbers. Each call returns the events that became due."""

    def __init__(self, server: str, to_ns: Callable[[float], int], can_ask: bool):
        """`to_ns`: seconds since 1970 → ns of this host's monotonic clock."""
        self.ask_from: int | None = 0 if can_ask else None  # the first number that is to be asked for; the caller asks
        self.begin: int | None = None  # the first number that was seen: above 0, the beginning is missing
        self.messages = self.lost = self.malformed = self.restarts = 0
        self.last_fault = ""
        self.unknown: Counter[str] = Counter()  # events of other types
        self.unanswered = False  # the last question got no answer
        self._server, self._to_ns, self._can_ask = server, to_ns, can_ask
        self._expected: int | None = None
        self._asking = can_ask
        self._waiting: deque[tuple[int, bytes, int]] = deque()
        self._waiting_bytes = 0

    @property
    def is_asking(self) -> bool:
        return self._asking

    @property
    def is_whole(self) -> bool:
        """Whether every message of the publisher was read, from its first one on."""
        return self.begin == 0 and not self.lost and not self._asking

    def message(self, number: int, payload: bytes, now_ns: int) -> list[KvEventRecord]:
        """A message that was published now."""
        if self._asking:
            if self._waiting_bytes + len(payload) <= MOST_WAITING_BYTES:
                self._waiting.append((number, payload, now_ns))
                self._waiting_bytes += len(payload)
            return []
        return list(self._take(number, payload, now_ns, may_ask=self._can_ask))

    def answer(self, number: int, payload: bytes, now_ns: int) -> list[KvEventRecord]:
        """A message that was asked for."""
        if not self._asking or (self._expected is not None and number < self._expected):
            return []
        self.unanswered = False
        return list(self._in_order(number, payload, now_ns))

    def answered(self, now_ns: int, *, in_time: bool = True) -> list[KvEventRecord]:
        """The answer is over, or did not come in time: what waited for it is due."""
        self._asking, self.ask_from, self.unanswered = False, None, not in_time
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        found, last = [], -1
        for number, payload, came_ns in waiting:
            is_answered = number > last and self._expected is not None and number < self._expected
            last = number
            if not is_answered:
                found += self._take(number, payload, came_ns, may_ask=False)
        return found

    def malformed_message(self, why: str) -> None:
        self.malformed += 1
        self.last_fault = why

    def _take(self, number: int, payload: bytes, now_ns: int, *, may_ask: bool) -> Iterator[KvEventRecord]:
        if self._expected is not None and number < self._expected:
            self.restarts += 1
            self._expected = 0
            yield KvEventRecord(now_ns, "cleared", server=self._server, batch=number)
        if may_ask and self._expected is not None and number > self._expected:
            self.ask_from, self._asking = self._expected, True
            self._waiting.append((number, payload, now_ns))
            self._waiting_bytes = len(payload)
            return
        yield from self._in_order(number, payload, now_ns)

    def _in_order(self, number: int, payload: bytes, now_ns: int) -> Iterator[KvEventRecord]:
        if self._expected is None:
            self.begin = number
        elif number > self._expected:
            yield self._lost(number - self._expected, self._expected, now_ns)
        self._expected = number + 1
        self.messages += 1
        try:
            batch = decode_batch(payload)
        except MalformedBatch as error:
            self.malformed_message(str(error))
            yield self._lost(1, number, now_ns)
            return
        self.unknown.update(batch.unknown)
        ns = now_ns if batch.seconds is None else self._to_ns(batch.seconds)
        for change in batch.changes:
            yield msgspec.structs.replace(change, ns=ns, server=self._server, batch=number)

    def _lost(self, count: int, first: int, now_ns: int) -> KvEventRecord:
        self.lost += count
        return KvEventRecord(now_ns, "lost", server=self._server, batch=first, lost=count)
