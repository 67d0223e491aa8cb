"""One HTTP call in the front: its sequences, its disconnect, and its one record."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain
from typing import Any, NoReturn

import msgspec

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.kv_source import KVSource
from sojourn.engine.messages import Ended
from sojourn.engine.server.core.client import FAREWELL_SECONDS, CoreClient
from sojourn.engine.server.core.sequence import CoreLost, FrontTimes, SequenceStream, TextPiece, Write
from sojourn.engine.server.errors import ApiError, core_lost
from sojourn.metrics.ledger import new_ledger
from sojourn.metrics.memory.kv_load import combined_loads
from sojourn.metrics.memory.prefix_outcomes import combined
from sojourn.metrics.records import RequestRecord

SERVER_FAULT = (500, "server_fault")
CANCELLED = (499, "cancelled")  # the client left; the status is nginx's, and nobody receives it
# Of a record: what it takes from its caller, and what the ends of its sequences make together.
OF_CALLER = ("request_id", "arrived_ns", "tenant", "klass", "traceparent", "encoding_ns", "session")
SUMMED = (
    "computed_tokens", "recomputed_tokens", "drafted_tokens", "accepted_tokens", "preemptions", "adapter_loads",
)  # fmt: skip
EARLIEST = ("first_step", "queued_ns", "scheduled_ns")
JOINED = ("prompt_block_hashes", "output_block_hashes")


@dataclass(slots=True)
class Caller:
    """Who sent a call, and its time in the front before its prompt was encoded. It exists before the body is read."""

    request_id: str
    arrived_ns: int  # the last byte of the body; the head, until the body is read
    tenant: str = ""
    klass: str = ""
    route: str = ""  # the path of the endpoint
    key_id: str | None = None  # names the API key that it came with
    traceparent: str | None = None  # of W3C Trace Context, if it has the form
    quota_ns: int = 0  # it waited for its tenant's limits, after `arrived_ns`
    cold_start_ns: int = 0  # it waited for its model to be loaded or woken, before it was encoded
    moderation_ns: int = 0  # its input was checked, before `encoded_ns`
    encoding_ns: int = 0  # template and tokenizer worked for it, without any wait
    attributes: dict[str, Any] = field(default_factory=dict)  # of its trace
    adapter: AdapterReference | None = None  # that its body names
    priority: int = 0  # lower goes first, where the policy asks
    weight: int = 1  # of its tenant, under policy fair-share
    session: str | None = None  # the header x-session-id: routers hold the calls of one session together

    def front_times(self, encoded_ns: int) -> FrontTimes:
        """What is neither quota nor cold start nor moderation is encoding."""
        encoding_ns = encoded_ns - self.arrived_ns - self.quota_ns - self.cold_start_ns - self.moderation_ns
        return FrontTimes(encoding_ns, self.quota_ns, self.moderation_ns, self.cold_start_ns)


class Call:
    """Follows all sequences of a call to its record. `pieces` is consumed once, and `note_write` after each.

    Its ledger is that of the critical path: of the sequence whose piece was written last. The ledger of the first text
    is that of the sequence whose text was written first.
    """

    def __init__(self, core: CoreClient, caller: Caller, sequences: list[SequenceStream]):
        """`sequences` stand by prompt and then by choice."""
        self.caller = caller
        self.sequences = sequences
        self.encoded_ns = sequences[0].request.encoded_ns
        self._core = core
        self._updated = sequences[0].updated  # they share it
        self._finish_reason: str | None = None
        self.failure: ApiError | None = None  # that ended it
        self._error: str | None = None
        self._delivered = False
        self._has_text = False
        self._first: Write | None = None  # with text
        self._last: Write | None = None
        self._latest: SequenceStream | None = None  # the one that was read last
        self._output_characters = 0  # of the pieces so far
        self.writing_ns = 0  # its chunks were handed to the socket, with waits for its reader
        self._open = sequences
        self._leaders = [sequence for sequence in sequences if sequence.choice == 0]
        self.prompt_tokens = sum(len(leader.request.prompt_token_ids) for leader in self._leaders)  # each prompt once

    @property
    def has_ledgers(self) -> bool:
        return self._core.config.telemetry == "full"

    @property
    def cached_tokens(self) -> int:
        return sum(leader.cached_tokens for leader in self._leaders)

    @property
    def handed_over(self) -> KVSource | None:
        """What a decode server is told, once `pieces` are over; None where the prompt was not handed over."""
        ended = self._leaders[0].ended
        return None if ended is None else ended.kv_source

    @property
    def finish_reason(self) -> str | None:
        """Of the sequence that ended last, as the client sees it; None before the first end."""
        return self._finish_reason

    @property
    def generated_tokens(self) -> int:
        """Of all sequences so far, as its record counts them: with those that no client sees."""
        return sum(sequence.output_tokens for sequence in self.sequences)

    @property
    def output_tokens(self) -> int:
        """Of all sequences so far, as the client counts them."""
        return sum(sequence.shown_tokens for sequence in self.sequences)

    def leader(self, sequence: SequenceStream) -> SequenceStream:
        """The first choice of the same prompt, which computed it for all."""
        return self._leaders[sequence.prompt_index]

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """The text of all sequences as it becomes ready; tokens that pile up behind a slow reader come together.

        Raises ApiError if the core dies, if no output can go on, or if the call is aborted from elsewhere. An output
        that fails beside others ends with "error", and its `failure` says why.
        """
        while self._open:
            await self._updated.wait()
            self._updated.clear()
            for sequence in self._open:
                self._latest = sequence
                try:
                    piece = sequence.take() if sequence.moderated is None else self._take_moderated(sequence)
                except CoreLost:
                    self._fail(core_lost(self._core.state))
                except ApiError as error:
                    piece = self._fail_one(sequence, error)
                except Exception:
                    if len(self.sequences) == 1:
                        raise
                    logging.getLogger(__name__).exception("output %s failed", sequence.request.request_id)
                    sentence = "the server failed on this output; its log says why"
                    piece = self._fail_one(sequence, ApiError(500, sentence, code="output_failed"))
                if piece is not None:
                    if piece.finish_reason is not None and sequence.request.hands_over:
                        await self._wait_for_blocks(sequence)
                    if piece.finish_reason is not None:
                        self._core.abort(sequence)  # which a stop string ends before the core does
                        self._open = [other for other in self._open if other is not sequence]
                        if sequence.failure is None:
                            self._finish_reason = piece.finish_reason
                    self._has_text = self._has_text or bool(piece.text)
                    self._output_characters += len(piece.text)
                    yield piece

    def note_write(self, piece: TextPiece, *, ends: bool) -> None:
        """The piece, or the summary of the call behind it, was handed to the socket. `ends`: nothing follows."""
        self._close_ledger(piece.sequence)
        if self._first is None and self._has_text:
            self._first = self._last
        self._delivered = ends

    def note_failure_write(self) -> None:
        """The error of the call was handed to the socket."""
        if self._latest is not None:
            self._close_ledger(self._latest)

    @property
    def outcome(self) -> tuple[int, str | None]:
        """Status and code of its end, for `Front.end`: of a failure behind the first byte, too."""
        if self.failure is not None:
            return self.failure.status, self.failure.code
        if self._error is not None:
            return SERVER_FAULT
        return (200, None) if self._delivered else CANCELLED

    def abort(self) -> None:
        """The client is gone, or the call failed: without full delivery the call counts as aborted."""
        if not self._delivered and self._error is None:
            self._finish_reason = "abort"
        for sequence in self.sequences:
            self._core.abort(sequence)
            if sequence.moderated is not None:
                sequence.moderated.close()

    def fault(self) -> None:
        """The server failed on it; its log says why."""
        self._error = self._error or "the server failed on this request"

    async def record(self) -> RequestRecord:
        """Waits for the core's part of the record; for no longer than a core may be silent."""
        try:
            async with asyncio.timeout(self._core.longest_silence_seconds + FAREWELL_SECONDS):
                for sequence in self.sequences:
                    await sequence.done.wait()
        except TimeoutError:  # the core forgot them
            self._core.lose(self.sequences)
        ends = [sequence.ended for sequence in self.sequences]
        caller, first, last = self.caller, self._first, self._last
        if last is None:  # nothing was written: the client waited for the sequence that ended last
            ended = max(ends, key=lambda ended: ended.booked_ns)
            last = Write(ended, 0, self.sequences[0].front, time.monotonic_ns())
        return RequestRecord(
            **{name: getattr(caller, name) for name in OF_CALLER},
            **_together(ends),
            finished_ns=last.ns,
            finish_reason=None if self._error else self._finish_reason,
            error=self._error,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.generated_tokens,
            prompt_characters=sum(len(leader.prompt_text or "") for leader in self._leaders),
            output_characters=self._output_characters,
            # When each token left the core, in order, without those behind a stop string.
            token_ns=list(merge(*(sequence.token_ns[: sequence.output_tokens] for sequence in self.sequences))),
            written_ns=self._last and self._last.ns,
            first_written_ns=first and first.ns,
            encoded_ns=self.encoded_ns,
            longest_output_tokens=max((sequence.output_tokens for sequence in self.sequences), default=0),
            ledger=last.ledger(),
            ttft=new_ledger() if first is None else first.ledger(),
            waits=last.waits(),
            decoding_ns=self.sequences[0].decoding_ns,
            writing_ns=self.writing_ns,
            adapter=None if caller.adapter is None else caller.adapter.name,
        )

    def _close_ledger(self, sequence: SequenceStream) -> None:
        """Closes the call's ledger at a write, with the ledger of the sequence that the write waited for."""
        self._last = sequence.write(time.monotonic_ns())

    def _take_moderated(self, sequence: SequenceStream) -> TextPiece | None:
        piece = sequence.moderated.take()
        if sequence.moderated.needs_no_more and not sequence.done.is_set():
            self._core.abort(sequence)  # at once, while its last text may still wait for a verdict
        return piece

    async def _wait_for_blocks(self, sequence: SequenceStream) -> None:
        """The blocks of its prompt are there for a decode server. Raises ApiError if the core dies before that."""
        await sequence.done.wait()
        sequence.note_wait_for_end()
        if sequence.ended.kv_source is None:
            self._fail(core_lost(self._core.state))

    def _fail_one(self, sequence: SequenceStream, error: ApiError) -> TextPiece:
        """The last piece of an output that failed alone. Raises the error where no output is left."""
        sequence.failure = error
        if all(other.failure is not None for other in self.sequences):
            self._fail(error)
        sequence.finish_reason = "error"
        return TextPiece(sequence, "", [], "error")

    def _fail(self, error: ApiError) -> NoReturn:
        self.failure, self._error = error, error.message
        raise error


def _together(ends: list[Ended]) -> dict[str, Any]:
    """What the ends of all sequences of a call say in its record."""

    def known(name: str) -> list[Any]:
        return [value for ended in ends if (value := getattr(ended, name)) is not None]

    lookup_steps = known("lookup_steps")
    return {
        **{name: sum(known(name)) for name in SUMMED},
        **{name: min(known(name), default=None) for name in EARLIEST},
        **{name: list(chain.from_iterable(known(name))) for name in JOINED},
        "last_step": max(known("last_step"), default=None),
        "rejected_ns": max(known("rejected_ns"), default=0),
        "lookup_steps": sum(lookup_steps) if len(lookup_steps) == len(ends) else None,
        **msgspec.structs.asdict(combined(known("prefix"))),
        **msgspec.structs.asdict(combined_loads(known("kv_load"))),
    }
