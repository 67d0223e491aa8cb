"""The outputs of offline use, and how they grow token by token."""

from collections.abc import Callable
from dataclasses import dataclass

from sojourn.engine import messages
from sojourn.engine.sampling import TokenLogprobs
from sojourn.engine.token.text.assembler import assembler_of
from sojourn.engine.token.text.tokenizer import NoTokenizer, Tokenizer
from sojourn.metrics.ledger import ACCOUNTS


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str  # without the stop string that ended it
    finish_reason: str  # stop, length, or error
    error: str | None  # a sentence, where finish_reason is error
    cached_tokens: int
    logprobs: list[TokenLogprobs]  # one for each of token_ids, if the request wants them
    prompt_logprobs: list[TokenLogprobs]  # of each prompt token but the first, if the request wants them
    ledger_ms: dict[str, float]  # account → milliseconds in the core


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that one token added to a streamed output. `finish_reason` stands on the last piece."""

    text: str
    token_id: int | None  # None: a grammar ended the output without a token
    finish_reason: str | None


class OutputSequence:
    """One output while its tokens come. Lives in the loop's thread.

    `on_piece` gets each piece, and None after an error or the engine's end. `on_end` gets the ended sequence.
    """

    def __init__(
        self,
        request: messages.Submit,
        tokenizer: Tokenizer | NoTokenizer,
        stops: list[str],
        *,
        on_piece: Callable[[Piece | None], None] | None = None,
        on_end: Callable[["OutputSequence"], None] | None = None,
    ):
        self.request = request
        self.finish_reason: str | None = None
        self._on_piece, self._on_end = on_piece, on_end
        self._text = assembler_of(tokenizer, request.prompt_token_ids, request.sampling, stops)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._ended: messages.Ended | None = None
        self._failure: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def error(self) -> str | None:
        """A sentence, if it ended with an error."""
        return self._failure or (self._ended and self._ended.error)

    def take(self, output: messages.Output) -> None:
        self._token_ids.append(output.token_id)
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs)
        self._prompt_logprobs += output.prompt_logprobs or ()
        try:
            text = self._text_of(output)
        except Exception as error:  # it concerns this output alone
            self._failure = f"the text of this output cannot be made: {type(error).__name__}: {error}"[:300]
            self.finish_reason = "error"
            if self._on_piece is not None:
                self._on_piece(None)
            return
        self._texts.append(text)
        if self._on_piece is not None:
            self._on_piece(Piece(text, output.token_id, self.finish_reason))

    def _text_of(self, output: messages.Output) -> str:
        text = self._text.push(output.token_id, stops=output.finish_reason == "stop")
        self.finish_reason = output.finish_reason
        if self.finish_reason is not None and self._text.stop_string is None:
            text += self._text.rest()
        if self._text.stop_string is not None:
            self.finish_reason = "stop"
        return text

    def end(self, ended: messages.Ended) -> None:
        self._ended = ended
        if self.finish_reason is None:  # it ended without a token
            self.finish_reason = ended.reason
            self._texts.append(self._text.rest())
            if self._text.stop_string is not None and self.finish_reason == "length":
                self.finish_reason = "stop"
            if self._on_piece is not None:
                self._on_piece(None if self.error else Piece(self._texts[-1], None, self.finish_reason))
        if self._on_end is not None:
            self._on_end(self)

    def wake(self) -> None:
        """The engine is gone: wakes those that wait, and they raise."""
        if self._on_piece is not None:
            self._on_piece(None)
        if self._on_end is not None:
            self._on_end(self)

    def completion(self) -> Completion:
        accounts = zip(ACCOUNTS, self._ended.ledger, strict=True)
        return Completion(
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=self._token_ids,
            text="".join(self._texts),
            finish_reason=self.finish_reason,
            error=self.error,
            cached_tokens=self._ended.cached_tokens,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            ledger_ms={info.name: ns / 1e6 for info, ns in accounts if ns},
        )
