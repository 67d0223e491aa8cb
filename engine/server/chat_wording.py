"""A call in the words of POST /v1/chat/completions."""

from typing import Any

from engine.server.call import Call
from engine.server.errors import ApiError
from engine.server.protocol import StreamOptions
from engine.server.protocol_chat import ChatRequest
from engine.server.sequence import Entry, Piece, Sequence
from engine.server.token_words import chat_logprobs, extras, prompt_words
from engine.server.wording import DONE, event, failure_event, timings_of, to_json, usage_of
from engine.token.tokenizer import Tokenizer


class ChatWording:
    """Chat completions: one prompt, n choices."""

    def __init__(self, call: Call, body: ChatRequest, base: dict[str, Any], tokenizer: Tokenizer):
        self._call = call
        self._body = body
        self._base = base
        self._chunk = base | {"object": "chat.completion.chunk"}
        self._vocabulary = tokenizer.vocabulary
        self._options = (body.stream and body.stream_options) or StreamOptions()
        self._begun: set[int] = set()  # choices whose role was named
        self._texts: list[list[str]] = [[] for _ in call.sequences]
        self._entries: list[list[Entry]] = [[] for _ in call.sequences]
        self._last: Sequence | None = None  # that ended last

    def opening(self) -> bytes:
        return b""

    def events(self, piece: Piece) -> bytes:
        sequence, delta = piece.sequence, {}
        if sequence.choice not in self._begun:
            self._begun.add(sequence.choice)
            delta = {"role": "assistant", "content": piece.text}
        elif piece.text:
            delta = {"content": piece.text}
        self._last = sequence
        chunk = self._chunk | {"choices": [self._choice(sequence, piece.entries) | {"delta": delta}]}
        if self._body.return_token_ids and "role" in delta:
            chunk["prompt_token_ids"] = sequence.prompt.token_ids
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage_of(self._call)
        elif self._options.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def closing(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        final = self._chunk | {"choices": [], "usage": usage_of(self._call)} | timings_of(self._call, self._last)
        return event(final) + DONE

    def failure(self, error: ApiError) -> bytes:
        return failure_event(error)

    def add(self, piece: Piece) -> None:
        self._texts[piece.sequence.choice].append(piece.text)
        self._entries[piece.sequence.choice] += piece.entries
        self._last = piece.sequence

    def body(self) -> bytes:
        choices = []
        for sequence in self._call.sequences:
            text = "".join(self._texts[sequence.choice])
            message = {"role": "assistant", "content": text, "refusal": None}
            choices.append(self._choice(sequence, self._entries[sequence.choice]) | {"message": message})
        whole = self._base | {"object": "chat.completion", "choices": choices, "usage": usage_of(self._call)}
        if self._body.prompt_logprobs is not None:
            booked = self._call.sequences[0].work.prompt_logprobs or []
            whole["prompt_logprobs"] = prompt_words(booked, self._body.prompt_logprobs, self._vocabulary)
        if self._body.return_token_ids:
            whole["prompt_token_ids"] = self._call.sequences[0].prompt.token_ids
        return to_json(whole | timings_of(self._call, self._last))

    def _choice(self, sequence: Sequence, entries: list[Entry]) -> dict[str, Any]:
        num_top = self._body.num_logprobs
        choice = {
            "index": sequence.choice,
            "logprobs": None if num_top is None else chat_logprobs(entries, num_top, self._vocabulary),
            "finish_reason": sequence.finish_reason,
        }
        return choice | extras(sequence, entries, self._body)
