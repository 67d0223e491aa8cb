"""One HTTP call in the front: its sequences followed together, its disconnect, and its one record."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from heapq import merge

import msgspec

from engine.server.core.client import CoreClient
from engine.server.core.sequence import DecodeSpans, Lost, Piece, Sequence, Write
from engine.server.errors import ApiError, Rejection, core_died, shutting_down
from metrics.ledger import new_ledger
from metrics.memory.prefix_outcomes import combined
from metrics.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Origin:
    """Who sent a call, and when it arrived."""

    request_id: str
    arrived_ns: int
    tenant: str
    klass: str
    traceparent: str | None = None  # of W3C Trace Context, if it has the form


class Call:
    """Follows all sequences of a call to its record. `pieces` is consumed once, and `written` after each.

    Its ledger is that of the critical path: of the sequence whose piece was written last, and for the first text of the
    one that was written first.
    """

    def __init__(
        self,
        core: CoreClient,
        origin: Origin,
        encoded_ns: int,
        submit: Callable[[asyncio.Event, DecodeSpans], list[Sequence]],
    ):
        """`submit` hands the sequences to the core, by prompt and then by choice; they share what is given."""
        self.origin = origin
        self._core = core
        self.encoded_ns = encoded_ns
        self._news = asyncio.Event()
        self._finish_reason: str | None = None
        self._error: str | None = None
        self._delivered = False
        self._has_text = False
        self._first: Write | None = None  # with text
        self._last: Write | None = None
        self._latest: Sequence | None = None  # whose news were read last
        self.sequences = submit(self._news, DecodeSpans())
        self.output_tokens = 0  # of all sequences so far, as the client counts them
        self._output_characters = 0  # of the pieces so far
        self._open = self.sequences
        self._leaders = [sequence for sequence in self.sequences if sequence.choice == 0]
        self.prompt_tokens = sum(len(sequence.prompt.token_ids) for sequence in self._leaders)  # each prompt once

    @property
    def is_booked(self) -> bool:
        """The core keeps ledgers."""
        return self._core.config.telemetry == "full"

    @property
    def cached_tokens(self) -> int:
        return sum(sequence.work.cached_tokens for sequence in self._leaders)

    def leader(self, sequence: Sequence) -> Sequence:
        """The first choice of the same prompt, which computed it for all."""
        return self._leaders[sequence.prompt_index]

    async def pieces(self) -> AsyncIterator[Piece]:
        """The text of all sequences as it becomes ready; tokens that pile up behind a slow reader come together.

        Raises ApiError if the core dies, if it cannot go on, or if the call is aborted from elsewhere.
        """
        while self._open:
            await self._news.wait()
            self._news.clear()
            for sequence in self._open:
                known, self._latest = sequence.shown_tokens, sequence
                try:
                    piece = sequence.take()
                except Lost:
                    self._fail(shutting_down() if self._core.state == "draining" else core_died())
                except ApiError as error:
                    self._fail(error)
                self.output_tokens += sequence.shown_tokens - known
                if piece is not None:
                    if piece.finish_reason is not None:
                        self._open = [other for other in self._open if other is not sequence]
                        self._finish_reason = piece.finish_reason
                    self._has_text = self._has_text or bool(piece.text)
                    self._output_characters += len(piece.text)
                    yield piece

    def written(self, piece: Piece, *, ends: bool) -> None:
        """The piece, or what sums up the call behind it, was handed to the socket: everything up to now is on its way
        to the client. `ends`: that is all."""
        self._book(piece.sequence)
        if self._first is None and self._has_text:
            self._first = self._last
        self._delivered = ends

    def failure_written(self) -> None:
        """The client was told that the call failed, and that is the end of its books, too."""
        if self._latest is not None:
            self._book(self._latest)

    def abort(self) -> None:
        """The client is gone, or the call failed: whatever was not delivered counts for nothing."""
        if not self._delivered and self._error is None:
            self._finish_reason = "abort"
        for sequence in self.sequences:
            sequence.abort()

    def fault(self) -> None:
        """We failed on it; the log says why."""
        self._error = self._error or "the server failed on this request"

    def ledger_now(self, sequence: Sequence) -> list[int]:
        """The ledger as it would be if the piece of this sequence that was taken last were written now."""
        return sequence.write(time.monotonic_ns()).ledger()

    async def record(self) -> RequestRecord:
        """Waits for the core's part and closes the books."""
        for sequence in self.sequences:
            await sequence.work.over.wait()
        ends = [sequence.work.ended for sequence in self.sequences]
        first, last = self._first, self._last
        if last is None:  # nothing was ever written: the sequence that ended last is the one that was waited for
            ended = max(ends, key=lambda ended: ended.booked_ns)
            last = Write(ended, 0, self.encoded_ns - self.origin.arrived_ns, time.monotonic_ns())
        return RequestRecord(
            request_id=self.origin.request_id,
            arrived_ns=self.origin.arrived_ns,
            finished_ns=last.ns,
            tenant=self.origin.tenant,
            klass=self.origin.klass,
            finish_reason=None if self._error else self._finish_reason,
            error=self._error,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=sum(ended.computed_tokens for ended in ends),
            recomputed_tokens=sum(ended.recomputed_tokens for ended in ends),
            output_tokens=sum(sequence.output_tokens for sequence in self.sequences),
            prompt_characters=sum(len(leader.prompt.text or "") for leader in self._leaders),
            output_characters=self._output_characters,
            preemptions=sum(ended.preemptions for ended in ends),
            **msgspec.structs.asdict(combined(ended.prefix for ended in ends if ended.prefix is not None)),
            first_step=min((ended.first_step for ended in ends if ended.first_step is not None), default=None),
            last_step=max((ended.last_step for ended in ends if ended.last_step is not None), default=None),
            token_ns=self._token_ns(),
            written_ns=self._last and self._last.ns,
            first_written_ns=first and first.ns,
            encoded_ns=self.encoded_ns,
            queued_ns=min((ended.queued_ns for ended in ends if ended.queued_ns is not None), default=None),
            scheduled_ns=min((ended.scheduled_ns for ended in ends if ended.scheduled_ns is not None), default=None),
            longest_output_tokens=max((sequence.output_tokens for sequence in self.sequences), default=0),
            traceparent=self.origin.traceparent,
            ledger=last.ledger(),
            ttft=new_ledger() if first is None else first.ledger(),
            waits=last.waits(),
        )

    def _book(self, sequence: Sequence) -> None:
        """Closes the books at a write, with those of the sequence that it was waiting for."""
        self._last = sequence.write(time.monotonic_ns())

    def _fail(self, error: ApiError) -> None:
        self._error = error.message
        raise error

    def _token_ns(self) -> list[int]:
        """When each token left the core, of all sequences in order; none that a stop string made void."""
        times = [sequence.work.token_ns[: sequence.output_tokens] for sequence in self.sequences]
        return times[0] if len(times) == 1 else list(merge(*times))


def admit(core: CoreClient, max_waiting: int, num_sequences: int) -> None:
    """Raises ApiError unless the core is up and its queue has room: 503 while it is not, 429 when it is full."""
    if core.state != "ready":
        raise Rejection(503, f"the engine is {core.state}", code=f"engine_{core.state}", retry_after_seconds=2)
    waiting = core.num_waiting
    if waiting + num_sequences > max_waiting + core.free_places:
        wait = "wait already" if num_sequences == 1 else f"may wait, {waiting} do, and this call has {num_sequences}"
        raise Rejection(
            429,
            f"max_waiting, {max_waiting} requests, {wait}; try again after the given time",
            code="queue_full",
            retry_after_seconds=core.queue_speed.seconds_to_clear(waiting),
        )
