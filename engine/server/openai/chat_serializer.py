"""A call in the words of POST /v1/chat/completions."""

from typing import Any

from engine.server.core.call import Call
from engine.server.core.sequence import Entry, Piece, Sequence
from engine.server.errors import ApiError
from engine.server.openai.chat_request import ChatRequest
from engine.server.openai.logprobs import chat_logprobs, extras, prompt_words
from engine.server.openai.protocol import StreamOptions
from engine.server.openai.serializer import Chunks, failure_event, timings_of, to_json, usage_of
from engine.server.openai.tool_output import Answer, WrittenCall
from engine.server.openai.tools import ToolPlan
from engine.token.text.tokenizer import Tokenizer
from engine.token.tools.calls import CallDelta, ContentDelta, Delta


class ChatSerializer:
    """Chat completions: one prompt, n choices. With a plan, the text of each is looked through for calls."""

    def __init__(
        self, call: Call, body: ChatRequest, base: dict[str, Any], tokenizer: Tokenizer, plan: ToolPlan | None = None
    ):
        self._call = call
        self._body = body
        self._base = base
        options = (body.stream and body.stream_options) or StreamOptions()
        self._chunks = Chunks(call, base | {"object": "chat.completion.chunk"}, options)
        self._vocabulary = tokenizer.vocabulary
        self._begun = False  # the roles were named
        self._calls_tools = plan is not None
        self._answers = [Answer(plan) for _ in call.sequences]
        self._entries: list[list[Entry]] = [[] for _ in call.sequences]
        self._last: Sequence | None = None  # that ended last

    def opening(self) -> bytes:
        return b""

    def events(self, piece: Piece) -> bytes:
        sequence = piece.sequence
        if self._calls_tools:
            delta = self._delta_with_calls(piece)
            if not delta and not piece.entries and piece.finish_reason is None:
                return b""  # what came may be the beginning of a call
        else:
            delta = {"content": piece.text} if piece.text else {}
        roles = b"" if self._begun else self._roles()
        self._last = sequence
        return roles + self._chunks.of(self._choice(sequence, piece.entries, "delta", delta))

    def closing(self) -> bytes:
        return self._chunks.end(self._last)

    def failure(self, error: ApiError) -> bytes:
        return failure_event(error)

    def add(self, piece: Piece) -> None:
        self._answers[piece.sequence.choice].add(piece)
        self._entries[piece.sequence.choice] += piece.entries
        self._last = piece.sequence

    def body(self) -> bytes:
        choices = []
        for sequence in self._call.sequences:
            answer = self._answers[sequence.choice]
            message = {"role": "assistant", "content": answer.content, "refusal": None}
            if answer.calls:
                message["content"] = answer.content or None
                message["tool_calls"] = [_call_words(call) for call in answer.calls]
            choices.append(self._choice(sequence, self._entries[sequence.choice], "message", message))
        whole = self._base | {"object": "chat.completion", "choices": choices, "usage": usage_of(self._call)}
        if self._body.prompt_logprobs is not None:
            booked = self._call.sequences[0].work.prompt_logprobs or []
            whole["prompt_logprobs"] = prompt_words(booked, self._body.prompt_logprobs, self._vocabulary)
        if self._body.return_token_ids:
            whole["prompt_token_ids"] = self._call.sequences[0].prompt.token_ids
        return to_json(whole | timings_of(self._call, self._last))

    def _roles(self) -> bytes:
        """A chunk without text for each choice, in their order: what openai-python's accumulator relies on.

        They are written together with the first text, so that no client takes them for it.
        """
        self._begun = True
        delta = {"role": "assistant", "content": None if self._calls_tools else ""}
        chunks = []
        for sequence in self._call.sequences:
            choice = {"index": sequence.choice, "delta": delta, "logprobs": None, "finish_reason": None}
            wanted = self._body.return_token_ids and sequence.choice == 0
            extra = {"prompt_token_ids": sequence.prompt.token_ids} if wanted else {}
            chunks.append(self._chunks.first(choice, extra))
        return b"".join(chunks)

    def _delta_with_calls(self, piece: Piece) -> dict[str, Any]:
        """The piece as content and calls; may be empty."""
        answer = self._answers[piece.sequence.choice]
        deltas = answer.add(piece)
        words: dict[str, Any] = {}
        text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        if text:
            words["content"] = text
        if calls := [_delta_words(delta, answer) for delta in _merged(deltas)]:
            words["tool_calls"] = calls
        return words

    def _choice(self, sequence: Sequence, entries: list[Entry], name: str, content: dict[str, Any]) -> dict[str, Any]:
        reason = sequence.finish_reason
        choice = {
            "index": sequence.choice,
            name: content,
            "logprobs": None,
            "finish_reason": reason and self._answers[sequence.choice].finish_reason(reason),
        }
        if entries or reason is not None:
            if (num_top := self._body.num_logprobs) is not None:
                choice["logprobs"] = chat_logprobs(entries, num_top, self._vocabulary)
            choice |= extras(sequence, entries, self._body)
        return choice


def _merged(deltas: list[Delta]) -> list[CallDelta]:
    """What came of each call, in one."""
    merged: list[CallDelta] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            continue
        if merged and delta.name is None and merged[-1].index == delta.index:
            last = merged.pop()
            delta = CallDelta(last.index, last.name, last.arguments + delta.arguments)
        merged.append(delta)
    return merged


def _delta_words(delta: CallDelta, answer: Answer) -> dict[str, Any]:
    function = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    call_id = answer.calls[delta.index].id
    return {"index": delta.index, "id": call_id, "type": "function", "function": {"name": delta.name} | function}


def _call_words(call: WrittenCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
