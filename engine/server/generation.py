"""One request in the front: admitted, handed to the core, its tokens turned into text, its record closed."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from engine.messages import Submit
from engine.sampling import SamplingParams
from engine.server.core_client import CoreClient, Token, Work
from engine.server.errors import ApiError, core_died, shutting_down
from engine.token.tokenizer import StopStrings, Tokenizer
from metrics.ledger import Account, new_ledger
from metrics.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Origin:
    """Who sent a request, and when it arrived."""

    request_id: str
    arrived_ns: int
    tenant: str
    klass: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens' text. `finish_reason` stands on the last piece."""

    text: str
    output_tokens: int  # so far
    finish_reason: str | None


class Generation:
    """Follows one request from its prompt's ids to its record. `pieces` is consumed once, and `written` after each."""

    def __init__(
        self,
        core: CoreClient,
        tokenizer: Tokenizer,
        origin: Origin,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        stops: list[str],
        cache_salt: str,
    ):
        self.origin = origin
        self.prompt_tokens = len(prompt_token_ids)
        self.output_tokens = 0
        self._core = core
        self._stream = tokenizer.stream()
        self._stops = StopStrings(stops)
        self._encoded_ns = time.monotonic_ns()
        self._finish_reason: str | None = None
        self._error: str | None = None
        self._delivered = False
        self._ledger: list[int] | None = None  # up to the last piece that was written
        self._ttft: list[int] | None = None  # up to the first one
        self._core_ledger: list[int] = []  # up to `_committed_ns`, when the last taken token left the core
        self._first_written_ns: int | None = None
        self._written_ns: int | None = None
        self._committed_ns = 0
        self._taken_ns = 0
        self._decoded_ns = 0
        self._has_text = False
        self._work: Work = core.submit(
            Submit(
                request_id=origin.request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                encoded_ns=self._encoded_ns,
                cache_salt=cache_salt,
            )
        )

    @property
    def cached_tokens(self) -> int:
        return self._work.cached_tokens

    async def pieces(self) -> AsyncIterator[Piece]:
        """The text as it becomes ready; tokens that pile up behind a slow reader come together.

        Raises ApiError if the core dies, or if the request is aborted from elsewhere.
        """
        work = self._work
        while self._finish_reason is None:
            await work.news.wait()
            work.news.clear()
            tokens = list(work.tokens)
            work.tokens.clear()
            if work.ended is not None and work.ended.reason != "abort":
                self._finish_reason = work.ended.reason
            elif work.over.is_set():
                error = shutting_down() if self._core.state == "draining" else core_died()
                self._error = error.message
                raise error
            if tokens:
                text = self._decode(tokens)
                if text or self._finish_reason:
                    yield Piece(text, self.output_tokens, self._finish_reason)

    def written(self, piece: Piece) -> None:
        """The piece was handed to the socket: everything up to now is on its way to the client."""
        self._written_ns = time.monotonic_ns()
        self._ledger = self._booked()
        if self._ttft is None and self._has_text:
            self._first_written_ns, self._ttft = self._written_ns, self._ledger
        self._delivered = piece.finish_reason is not None

    def abort(self) -> None:
        """The client is gone: whatever it has not read counts for nothing."""
        if not self._delivered and self._error is None:
            self._finish_reason = "abort"
        self._core.abort(self._work)

    async def record(self) -> RequestRecord:
        """Waits for the core's part and closes the books."""
        await self._work.over.wait()
        ended, finished_ns = self._work.ended, time.monotonic_ns()
        ledger = self._ledger
        if ledger is None:  # nothing was ever written
            ledger = list(ended.ledger) if ended else new_ledger()
            ledger[Account.TOKEN_ENCODE] = self._encoded_ns - self.origin.arrived_ns
        return RequestRecord(
            request_id=self.origin.request_id,
            arrived_ns=self.origin.arrived_ns,
            finished_ns=self._written_ns or finished_ns,
            tenant=self.origin.tenant,
            klass=self.origin.klass,
            finish_reason=self._finish_reason,
            error=self._error,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self._work.cached_tokens,
            computed_tokens=ended.computed_tokens if ended else 0,
            recomputed_tokens=ended.recomputed_tokens if ended else 0,
            output_tokens=self.output_tokens,
            preemptions=ended.preemptions if ended else 0,
            first_step=ended.first_step if ended else None,
            last_step=ended.last_step if ended else None,
            token_ns=self._work.token_ns[: self.output_tokens],  # none that a stop string made void
            written_ns=self._written_ns,
            first_written_ns=self._first_written_ns,
            ledger=ledger,
            ttft=self._ttft or new_ledger(),
        )

    def _decode(self, tokens: list[Token]) -> str:
        self._taken_ns = time.monotonic_ns()
        shown = []
        for token in tokens:
            self.output_tokens += 1
            self._core_ledger, self._committed_ns = token.ledger, token.committed_ns
            shown.append(self._stops.push(self._stream.push(token.id)))
            if self._stops.found:
                self._finish_reason = "stop"
                self._core.abort(self._work)
                break
        if self._finish_reason and not self._stops.found:
            shown.append(self._stops.rest())
        self._decoded_ns = time.monotonic_ns()
        text = "".join(shown)
        self._has_text = self._has_text or bool(text)
        return text

    def _booked(self) -> list[int]:
        """The core's ledger up to the last taken token, and the front's own accounts around it, at a write."""
        ledger = list(self._core_ledger)
        ledger[Account.TOKEN_ENCODE] += self._encoded_ns - self.origin.arrived_ns
        ledger[Account.TOKEN_DECODE] += self._decoded_ns - self._taken_ns
        handed_over = self._taken_ns - self._committed_ns
        ledger[Account.REQUEST_STREAM] += handed_over + (self._written_ns - self._decoded_ns)
        return ledger


def admit(core: CoreClient, max_waiting: int) -> None:
    """Raises ApiError unless the core is up and its queue has room: 503 while it is not, 429 when it is full."""
    if core.state != "ready":
        raise ApiError(503, f"the engine is {core.state}", code=f"engine_{core.state}", retry_after_seconds=2)
    waiting = core.num_waiting
    if waiting >= max_waiting + core.free_places:
        raise ApiError(
            429,
            f"max_waiting, {max_waiting} requests, wait already; try again after the given time",
            code="queue_full",
            retry_after_seconds=_drain_seconds(core, waiting),
        )


def _drain_seconds(core: CoreClient, waiting: int) -> int:
    """How long the queue takes to clear at the speed of the last admissions, between 1 and 60 seconds."""
    admissions = core.admitted_at
    if len(admissions) < 2:
        return 1
    elapsed = time.monotonic() - admissions[0]
    return max(1, min(60, round(waiting * elapsed / len(admissions))))
