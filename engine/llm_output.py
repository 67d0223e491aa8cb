"""What offline use gives, and how it comes about token by token."""

from collections.abc import Callable
from dataclasses import dataclass

from engine import messages
from engine.sampling import TokenLogprobs
from engine.token.text.tokenizer import StopStrings, Tokenizer
from metrics.ledger import ACCOUNTS


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str  # without the stop string that ended it
    finish_reason: str  # stop, length, or error
    error: str | None  # a sentence, where finish_reason is error
    cached_tokens: int
    logprobs: list[TokenLogprobs]  # as long as token_ids where they were asked for
    prompt_logprobs: list[TokenLogprobs]  # of each prompt token but the first, likewise
    ledger_ms: dict[str, float]  # account → milliseconds in the core


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added to a streamed output. `finish_reason` stands on the last piece."""

    text: str
    token_id: int | None  # None: a grammar ended the output, and it had no token for that
    finish_reason: str | None


class OutputSequence:
    """One output as its tokens come: their text, and where a stop string ends it. Lives in the loop's thread.

    `piece` is told each token, and None where an error or the engine's end leaves no more; `whole` is told the end.
    """

    def __init__(
        self,
        request: messages.Submit,
        tokenizer: Tokenizer,
        stops: list[str],
        *,
        piece: Callable[[Piece | None], None] | None = None,
        whole: Callable[["OutputSequence"], None] | None = None,
    ):
        self.request = request
        self.finish_reason: str | None = None
        self._piece, self._whole = piece, whole
        self._text = tokenizer.stream()
        self._stops = StopStrings(stops)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._ended: messages.Ended | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def error(self) -> str | None:
        """A sentence, where that is how it ended."""
        return self._ended.error

    def take(self, output: messages.Output) -> None:
        self._token_ids.append(output.token_id)
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs)
        self._prompt_logprobs += output.prompt_logprobs or ()
        text = self._stops.push(self._text.push(output.token_id))
        if self._stops.found:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            text += self._stops.rest()
        self._texts.append(text)
        if self._piece is not None:
            self._piece(Piece(text, output.token_id, self.finish_reason))

    def end(self, ended: messages.Ended) -> None:
        self._ended = ended
        if self.finish_reason is None:  # it ended without a token
            self.finish_reason = ended.reason
            self._texts.append(self._stops.rest())
            if self._piece is not None:
                self._piece(None if self.error else Piece(self._texts[-1], None, self.finish_reason))
        if self._whole is not None:
            self._whole(self)

    def wake(self) -> None:
        """The engine is gone: whoever waits finds out why."""
        if self._piece is not None:
            self._piece(None)
        if self._whole is not None:
            self._whole(self)

    def completion(self) -> Completion:
        ledger = zip(ACCOUNTS, self._ended.ledger, strict=True)
        return Completion(
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=self._token_ids,
            text="".join(self._texts),
            finish_reason=self.finish_reason,
            error=self.error,
            cached_tokens=self._ended.cached_tokens,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            ledger_ms={info.name: booked_ns / 1e6 for info, booked_ns in ledger if booked_ns},
        )
