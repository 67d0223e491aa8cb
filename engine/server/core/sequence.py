"""One sequence in the front: handed to the core, its tokens turned into text and entries, its ledger kept."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine.messages import Ended, Submit
from engine.sampling import TokenLogprobs
from engine.server.core.client import CoreClient, Token, Work
from engine.server.errors import ApiError
from engine.token.text.tokenizer import StopStrings, TextStream
from metrics.errors import ServerError
from metrics.ledger import Account

KEPT_SPANS = 64


class Lost(ServerError):
    """The core forgot a sequence that nobody here gave up: it died, or the server drains."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call."""

    token_ids: list[int]
    text: str | None = None  # as it was sent, where it was sent as a text


@dataclass(frozen=True, slots=True)
class Reading:
    """How the ids of an output become the text that a client sees."""

    stops: list[str] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    named_stop_token_ids: frozenset[int] = frozenset()  # those of them that the client named
    show_stop: bool = False  # else the text of what ended an output, string or token, is cut off
    skip_special_tokens: bool = True
    min_tokens: int = 0  # before them no stop string ends the text
    entries: bool = False  # more of each token is wanted than its text
    unread: bool = False  # the call wants no output at all: the one token that the core draws is dropped


class Entry(msgspec.Struct, frozen=True):
    """One output token for those who want more than its text."""

    token_id: int
    text_offset: int  # characters of output before its text
    logprobs: TokenLogprobs | None


class Piece(msgspec.Struct, frozen=True):
    """Some tokens of one sequence as text. `finish_reason` stands on the last piece of a sequence."""

    sequence: "Sequence"
    text: str
    entries: list[Entry]  # of the tokens since the piece before; empty unless the call wants them
    finish_reason: str | None


class DecodeSpans:
    """When the tokens of a call became text. What of a token's wait in the front was that is known only afterwards:
    while one is decoded, the next ones arrive unseen.

    The latest spans are kept: a token that waited for more of them waited for a reader, too.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int]] = deque(maxlen=KEPT_SPANS)  # begin and end, in order

    def add(self, begin_ns: int, end_ns: int) -> None:
        self._spans.append((begin_ns, end_ns))

    def since(self, ns: int) -> int:
        """Nanoseconds of decoding after a moment."""
        total_ns = 0
        for begin_ns, end_ns in reversed(self._spans):
            if end_ns <= ns:
                break
            total_ns += end_ns - max(begin_ns, ns)
        return total_ns


class Write(NamedTuple):
    """A write of a sequence's text, and what its books are made of then: hundreds come before one is asked for them."""

    told: Token | Ended  # of the core's books, the last that is in it
    decoding_ns: int  # since then
    encoding_ns: int
    ns: int

    def ledger(self) -> list[int]:
        """The core's ledger up to the last taken token, and the front's own accounts around it."""
        told, ledger = self.told, self.told.ledger_now()
        ledger[Account.TOKEN_ENCODE] += self.encoding_ns
        ledger[Account.TOKEN_DECODE] += self.decoding_ns
        ledger[Account.REQUEST_STREAM] += self.ns - told.booked_ns - self.decoding_ns
        return ledger

    def waits(self) -> dict[str, int]:
        """What the sequence waited for in the core, of what is in the ledger: reason → nanoseconds."""
        return self.told.waits


class Sequence:
    """Follows one prompt's choice from its submission to its end. `take` gives what is new of it."""

    def __init__(
        self,
        core: CoreClient,
        message: Submit,
        prompt: Prompt,
        stream: TextStream,
        reading: Reading,
        news: asyncio.Event,
        decoding: DecodeSpans,
        *,
        arrived_ns: int,
        prompt_index: int = 0,
        choice: int = 0,
    ):
        self.prompt = prompt
        self.prompt_index = prompt_index
        self.choice = choice  # of its prompt
        self.output_tokens = 0
        self.shown_tokens = 0  # ... as the client counts them
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None  # the stop string or token id that a client named and that ended it
        self._core = core
        self._stream = stream
        self._reading = reading
        self._stops = StopStrings(reading.stops, show=reading.show_stop)
        self._arrived_ns = arrived_ns
        self._encoded_ns = message.encoded_ns
        self._entries: list[Entry] = []
        self._characters = 0  # of output so far, what is held back included
        self._token: Token | None = None  # up to which the core's books are read; None: to its end
        self._decoding = decoding
        self._work: Work = core.submit(message, news)

    @property
    def id(self) -> str:
        return self._work.request_id

    @property
    def work(self) -> Work:
        return self._work

    def take(self) -> Piece | None:
        """What came since the last call; None while that is no text. Tokens that pile up come together.

        Raises Lost if the core forgot it, and ApiError if the core could not go on with it.
        """
        work = self._work
        if not work.tokens and not work.over.is_set():
            return None
        tokens = list(work.tokens)
        work.tokens.clear()
        if work.finish_reason is not None:
            self.finish_reason = work.finish_reason
        elif work.over.is_set():
            if work.ended.reason in ("abort", "lost"):
                self._token = None
                raise Lost
            if work.ended.reason == "error":
                self._token = None
                # What the request itself makes impossible, as masks that leave no token: the same request fails again.
                message = work.ended.error or "what this request asks for cannot be generated"
                raise ApiError(400, message, code="generation_failed")
            self.finish_reason = work.ended.reason
        text = self._decode(tokens)
        if not text and self.finish_reason is None:
            return None
        entries, self._entries = self._entries, []
        return Piece(self, text, entries, self.finish_reason)

    def abort(self) -> None:
        """Nobody wants the rest."""
        self._core.abort(self._work)

    def write(self, ns: int) -> "Write":
        """What was taken last was handed to the socket at that moment."""
        told = self._work.ended if self._token is None else self._token
        return Write(told, self._decoding.since(told.booked_ns), self._encoded_ns - self._arrived_ns, ns)

    def _decode(self, tokens: list[Token]) -> str:
        taken_ns = time.monotonic_ns()
        shown = []
        for token in tokens:
            shown.append(self._read(token, ends=self.finish_reason == "stop" and token is tokens[-1]))
            if self._stops.found is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.found
                self.abort()
                break
        if self.finish_reason and self._stops.found is None:
            shown.append(self._stops.rest())
            if self._work.finish_reason is None:  # it ended after its last token
                self._token = None
        if self._reading.unread:
            shown.clear()
            self.finish_reason = self.finish_reason and "length"
        self._decoding.add(taken_ns, time.monotonic_ns())
        return "".join(shown)

    def _read(self, token: Token, *, ends: bool) -> str:
        """The text that may be shown once this token is known."""
        reading = self._reading
        self.output_tokens += 1
        self._token = token
        stopped = ends and token.id in reading.stop_token_ids
        if stopped and token.id in reading.named_stop_token_ids:
            self.stop_reason = token.id
        text = "" if stopped and not reading.show_stop else self._stream.push(token.id)
        if not reading.unread:
            self.shown_tokens += 1
            if reading.entries:
                self._entries.append(Entry(token.id, self._characters, token.logprobs))
                self._characters += len(text)
        return text if self.output_tokens < reading.min_tokens else self._stops.push(text)
