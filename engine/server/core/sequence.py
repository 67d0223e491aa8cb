"""One sequence in the front: the core's tokens come in, text and its entries go out, and its ledger is closed."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec

from sojourn.engine import messages
from sojourn.engine.messages import Ended, Submit
from sojourn.engine.sampling import TokenLogprobs
from sojourn.engine.server.errors import ApiError
from sojourn.engine.token.text.assembler import TextAssembler
from sojourn.metrics.errors import ServerError
from sojourn.metrics.ledger import Account, ledger_at, new_ledger

LATEST_SPANS = 64


class CoreLost(ServerError):
    """The core dropped a sequence that the front did not abort: the core died, or the server drains."""


class Token(msgspec.Struct, frozen=True):
    """One token of the core. Its ledger is booked up to `booked_ns`, when the token was committed."""

    output: messages.Output
    ledger: messages.LedgerBase | None  # None with telemetry=off
    clock_ns: tuple[int, ...]  # the decode clock at the commit
    booked_ns: int

    def ledger_now(self) -> list[int]:
        """A new list."""
        return new_ledger() if self.ledger is None else ledger_at(self.ledger.base, self.clock_ns)

    @property
    def waits(self) -> dict[str, int]:
        return {} if self.ledger is None else self.ledger.waits


class Entry(msgspec.Struct, frozen=True):
    """An output token, for clients that want more than its text."""

    token_id: int
    text_offset: int  # characters of output before its text
    logprobs: TokenLogprobs | None


class TextPiece(msgspec.Struct, frozen=True):
    """The text of some tokens of one sequence. `finish_reason` stands on the last piece of a sequence."""

    sequence: "SequenceStream"
    text: str
    entries: list[Entry]  # of the tokens since the piece before; empty unless the call needs them
    finish_reason: str | None


class DecodeSpans:
    """When the tokens of a call were turned into text: the part of a token's wait in the front that is decoding.

    It is known only afterwards: while one token is decoded, the next ones arrive unseen. Only the latest spans are
    stored: a token that waited for more of them waited for a slow reader, too.
    """

    def __init__(self) -> None:
        self.total_ns = 0
        self._spans: deque[tuple[int, int]] = deque(maxlen=LATEST_SPANS)  # begin and end, in order

    def add(self, begin_ns: int, end_ns: int) -> None:
        self.total_ns += end_ns - begin_ns
        self._spans.append((begin_ns, end_ns))

    def since(self, ns: int) -> int:
        """Nanoseconds of decoding after a moment."""
        total_ns = 0
        for begin_ns, end_ns in reversed(self._spans):
            if end_ns <= ns:
                break
            total_ns += end_ns - max(begin_ns, ns)
        return total_ns


class FrontTimes(NamedTuple):
    """Nanoseconds in the front before the core got the prompt: they sum to `encoded_ns - arrived_ns`."""

    encoding_ns: int = 0
    quota_ns: int = 0
    moderation_ns: int = 0
    cold_start_ns: int = 0

    def book(self, ledger: list[int]) -> None:
        ledger[Account.TOKEN_ENCODE] += self.encoding_ns
        ledger[Account.REQUEST_QUOTA] += self.quota_ns
        ledger[Account.REQUEST_MODERATION] += self.moderation_ns
        ledger[Account.REQUEST_COLD_START] += self.cold_start_ns


class Hold(NamedTuple):
    """How long moderation had the text of a write: from when it was taken until it was released."""

    source: "Token | Ended"  # the core's account of the last of that text
    taken_ns: int
    released_ns: int


class Write(NamedTuple):
    """A write of a sequence's text. Its ledger is computed on demand: of hundreds of writes only one or two need it."""

    source: Token | Ended  # the core's latest account of the text
    decoding_ns: int  # since then
    front: FrontTimes
    ns: int
    moderation_ns: int = 0  # of the output, since the account

    def ledger(self) -> list[int]:
        """The core's ledger up to the last token of the text, and the front's own accounts."""
        ledger = self.source.ledger_now()
        self.front.book(ledger)
        ledger[Account.TOKEN_DECODE] += self.decoding_ns
        ledger[Account.REQUEST_MODERATION] += self.moderation_ns
        ledger[Account.REQUEST_STREAM] += self.ns - self.source.booked_ns - self.decoding_ns - self.moderation_ns
        return ledger

    def waits(self) -> dict[str, int]:
        """The waits in the core that are in the ledger: reason → nanoseconds."""
        return self.source.waits


class ModeratedPieces(Protocol):
    """The pieces of a sequence behind checks of its text (engine/server/gateway/moderation/output.py)."""

    needs_no_more: bool  # the core may drop the sequence

    def take(self) -> TextPiece | None: ...
    def close(self) -> None: ...


def oldest_wait_seconds(streams: Iterable["SequenceStream"]) -> float:
    """The age of the oldest sequence without a token, since its prompt was ready; 0 where there is none."""
    since = [stream.request.encoded_ns for stream in streams if not stream.token_ns and stream.ended is None]
    return max(0, time.monotonic_ns() - min(since)) / 1e9 if since else 0.0


class SequenceStream:
    """One choice of one prompt, from its submission to its end.

    The core client calls `admit`, `add` and `end`; `take` returns the new text. The sequences of a call share `updated`
    and `decode_spans`.
    """

    def __init__(
        self,
        request: Submit,
        text: TextAssembler,
        updated: asyncio.Event,
        decode_spans: DecodeSpans,
        *,
        front: FrontTimes = FrontTimes(),
        prompt_text: str | None = None,
        prompt_index: int = 0,
        choice: int = 0,
        client_stop_ids: frozenset[int] = frozenset(),
        needs_entries: bool = False,
        discards_output: bool = False,
    ):
        """`client_stop_ids` are the stop tokens that the client named. With `discards_output` the call wants no output:
        the one token that the core samples is dropped."""
        self.request = request
        self.updated = updated
        self.front = front
        self.prompt_text = prompt_text  # None: the client sent token ids
        self.prompt_index = prompt_index
        self.choice = choice  # of its prompt
        self.cached_tokens = 0  # of the prompt, known once it is admitted
        self.is_admitted = False
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.token_ns: list[int] = []
        self.ended: Ended | None = None
        self.done = asyncio.Event()  # `ended` is there, and the core has dropped the sequence
        self.output_tokens = 0
        self.shown_tokens = 0  # tokens of the output as the client counts them
        self.finish_reason: str | None = None  # as the client sees it
        self.failure: ApiError | None = None  # why it failed beside others of its call
        self.stop_reason: int | str | None = None  # the client's stop string or token id that ended it
        self.moderated: ModeratedPieces | None = None  # what its call takes in its place
        self.hold: Hold | None = None  # of the latest text that moderation released
        self._text = text
        self._decode_spans = decode_spans
        self._client_stop_ids = client_stop_ids
        self._needs_entries = needs_entries
        self._discards_output = discards_output
        self._new_tokens: list[Token] = []
        self._last_token: Token | None = None  # from the core
        self._last_text_token: Token | None = None  # the last one of the text; None: the text ends with the sequence
        self._entries: list[Token] = []  # not handed out yet

    @property
    def token_offsets(self) -> list[int]:
        """Characters of output before each shown token."""
        return [] if self._discards_output else self._text.offsets

    @property
    def num_characters(self) -> int:
        """Of the text of the tokens that were handed out, with what a stop string may hold back or cut off."""
        return self._text.offsets[-len(self._entries)] if self._entries else self._text.num_characters

    @property
    def text_source(self) -> "Token | Ended":
        """The core's latest account of the text that was taken so far."""
        return self.ended if self._last_text_token is None else self._last_text_token

    @property
    def has_last_token(self) -> bool:
        """The core samples no more tokens of it."""
        return self._last_token is not None and self._last_token.output.finish_reason is not None

    def admit(self, cached_tokens: int) -> None:
        self.is_admitted, self.cached_tokens = True, cached_tokens

    def add(self, output: messages.Output, clock_ns: tuple[int, ...], committed_ns: int) -> None:
        unchanged = self._last_token.ledger if self._last_token is not None else None
        self._last_token = Token(output, output.ledger or unchanged, clock_ns, committed_ns)
        self._new_tokens.append(self._last_token)
        self.token_ns.append(committed_ns)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.updated.set()

    def end(self, ended: Ended) -> None:
        self.ended = ended
        self.updated.set()
        self.done.set()

    def end_as_lost(self, now_ns: int) -> None:
        """Ends it in place of a core that is dead: the time since its last account is `request.lost`."""
        ledger, waits, since_ns, computed_tokens = new_ledger(), {}, self.request.encoded_ns, 0
        if (last := self._last_token) is not None:
            ledger, waits, since_ns = last.ledger_now(), last.waits, last.booked_ns
            computed_tokens = len(self.request.prompt_token_ids) - self.cached_tokens + len(self.token_ns) - 1
        ledger[Account.REQUEST_LOST] = now_ns - since_ns
        ended = Ended(
            request_id=self.request.request_id,
            reason="lost",
            booked_ns=now_ns,
            ledger=ledger,
            waits=waits,
            cached_tokens=self.cached_tokens,
            computed_tokens=computed_tokens,
        )
        self.end(ended)

    def take(self) -> TextPiece | None:
        """The text since the last call; None while there is none. Tokens that pile up come together.

        Raises CoreLost if the core dropped it, and ApiError if the core could not go on with it.
        """
        if not self._new_tokens and self.ended is None:
            return None
        tokens, self._new_tokens = self._new_tokens, []
        if self.has_last_token:
            self.finish_reason = self._last_token.output.finish_reason
        elif self.ended is not None:
            if self.ended.reason in ("abort", "lost"):
                self._last_text_token = None
                raise CoreLost
            if self.ended.reason == "error":
                self._last_text_token = None
                if self.ended.is_peer_error:
                    raise ApiError(502, self.ended.error, code="kv_transfer_failed")
                # The request itself causes it, as with masks that leave no token: the same request fails again.
                message = self.ended.error or "what this request asks for cannot be generated"
                raise ApiError(400, message, code="generation_failed")
            self.finish_reason = self.ended.reason
        text = self._decode(tokens)
        if not text and self.finish_reason is None:
            return None
        return TextPiece(self, text, self._take_entries(), self.finish_reason)

    def note_wait_for_end(self) -> None:
        """Its text was given out behind its end, whose account covers the time since its last token."""
        self._last_text_token = None

    @property
    def decoding_ns(self) -> int:
        """Nanoseconds that the tokens of its call took to become text so far."""
        return self._decode_spans.total_ns

    def write(self, ns: int) -> Write:
        """The text that was taken last was handed to the socket at that moment."""
        since = self._decode_spans.since
        if self.hold is None:
            source = self.text_source
            return Write(source, since(source.booked_ns), self.front, ns)
        source, taken_ns, released_ns = self.hold
        # What was decoded meanwhile is text behind it, and delayed nothing.
        decoding_ns = since(source.booked_ns) - since(taken_ns) + since(released_ns)
        return Write(source, decoding_ns, self.front, ns, released_ns - taken_ns)

    def _decode(self, tokens: list[Token]) -> str:
        begin_ns = time.monotonic_ns()
        texts = []
        for token in tokens:
            texts.append(self._text_of(token, stops=self.finish_reason == "stop" and token is tokens[-1]))
            if self._text.stop_string is not None:
                self.finish_reason, self.stop_reason = "stop", self._text.stop_string
                break
        if self.finish_reason is not None and self._text.stop_string is None:
            texts.append(self._text.rest())
            if self._text.stop_string is not None:  # in what waited for more
                self.finish_reason, self.stop_reason = "stop", self._text.stop_string
            if not self.has_last_token:  # it ended after its last token
                self._last_text_token = None
        if self._discards_output:
            texts.clear()
            self.finish_reason = self.finish_reason and "length"
        self._decode_spans.add(begin_ns, time.monotonic_ns())
        return "".join(texts)

    def _text_of(self, token: Token, *, stops: bool) -> str:
        """The text that can be shown once this token is known."""
        self.output_tokens += 1
        self._last_text_token = token
        token_id = token.output.token_id
        if stops and token_id in self._client_stop_ids:
            self.stop_reason = token_id
        if not self._discards_output:
            self.shown_tokens += 1
            if self._needs_entries:
                self._entries.append(token)
        return self._text.push(token_id, stops=stops)

    def _take_entries(self) -> list[Entry]:
        """Of the new tokens; those whose place in the text is open wait for it."""
        size = len(self._entries)
        if self.finish_reason is None:
            size = max(0, size - self._text.num_open)
        first = len(self._text.offsets) - len(self._entries)
        tokens, self._entries = self._entries[:size], self._entries[size:]
        offsets = self._text.offsets[first : first + size]
        return [
            Entry(token.output.token_id, offset, token.output.logprobs)
            for token, offset in zip(tokens, offsets, strict=True)
        ]
