"""A call in the format of POST /v1/messages: content blocks that grow, and events that report it."""

from typing import Any

import pydantic_core

from sojourn.engine.server.anthropic.messages_request import MessagesRequest
from sojourn.engine.server.core.call import Call
from sojourn.engine.server.core.sequence import SequenceStream, TextPiece
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.openai.assistant_turn import AssistantTurn, ReasoningDelta
from sojourn.engine.server.openai.reasoning import TurnPlan
from sojourn.engine.server.openai.serializer import Serializer, timings_of, to_json
from sojourn.engine.token.tools.calls import CallDelta, ContentDelta

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
# Type of a block → the type of its deltas, and the field of both.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessagesSerializer(Serializer):
    """One message. Whole or streamed, it has the same blocks; a stream also reports how they grow."""

    def __init__(self, call: Call, body: MessagesRequest, model: str, plan: TurnPlan):
        self._call = call
        self._body = body
        self._model = model
        self._turn = AssistantTurn(plan, call_prefix="toolu_")
        self._hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._content: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the last block
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._events: list[bytes] = []
        self._has_begun = False

    def events(self, piece: TextPiece) -> bytes:
        if not self._has_begun:
            self._begin()
        self._add(piece)
        return self._take_events()

    def closing(self, last: SequenceStream) -> bytes:
        self._close()
        self._event("message_delta", delta=self._stop, usage=self._usage(), **timings_of(self._call, last))
        self._event("message_stop")
        return self._take_events()

    def failure(self, error: ApiError) -> bytes:
        self._events.append(b"event: error\ndata: " + to_json(error.anthropic_body()) + b"\n\n")
        return self._take_events()

    def body(self, pieces: list[TextPiece]) -> bytes:
        for piece in pieces:
            self._add(piece)
        self._close()
        return to_json(self._message() | timings_of(self._call, pieces[-1].sequence))

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._call.caller.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content,
            **self._stop,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """`input_tokens` are those that were computed, as Anthropic counts. No client asks for cache entries here."""
        cached_tokens, sequence = self._call.cached_tokens, self._call.sequences[0]
        return {
            "input_tokens": self._call.prompt_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": self._call.output_tokens,
            "output_tokens_details": {"thinking_tokens": self._turn.reasoning_tokens(sequence)},
        }

    def _add(self, piece: TextPiece) -> None:
        for delta in self._turn.add(piece):
            if isinstance(delta, ReasoningDelta):
                self._grow({"type": "thinking", "thinking": "", "signature": ""}, delta.text)
            elif isinstance(delta, ContentDelta):
                self._grow({"type": "text", "text": "", "citations": None}, delta.text)
            else:
                self._add_call(delta)
        if piece.finish_reason is not None:
            stop = piece.sequence.stop_reason
            reason = _STOP_REASONS[self._turn.finish_reason(piece.finish_reason)]
            self._stop = {"stop_reason": reason, "stop_sequence": None}
            if isinstance(stop, str):
                self._stop = {"stop_reason": "stop_sequence", "stop_sequence": stop}

    # Blocks, one after another: only the last one grows.

    def _grow(self, block: dict[str, Any], text: str) -> None:
        if not self._content or self._content[-1]["type"] != block["type"]:
            self._open(block)
        if block["type"] != "thinking" or not self._hides_thinking:
            self._delta(text)

    def _add_call(self, delta: CallDelta) -> None:
        if delta.name is not None:
            call_id = self._turn.calls[delta.index].id
            self._open({"type": "tool_use", "id": call_id, "name": delta.name, "input": {}})
        if delta.arguments:
            self._delta(delta.arguments)

    def _open(self, block: dict[str, Any]) -> None:
        self._close()
        self._content.append(block)
        self._event("content_block_start", index=len(self._content) - 1, content_block=block)

    def _delta(self, text: str) -> None:
        self._texts.append(text)
        kind, field = _DELTAS[self._content[-1]["type"]]
        self._event("content_block_delta", index=len(self._content) - 1, delta={"type": kind, field: text})

    def _close(self) -> None:
        if not self._content:
            return
        block, text = self._content[-1], "".join(self._texts)
        self._texts.clear()
        if block["type"] != "tool_use":
            block[block["type"]] += text
        elif text:
            block["input"] = _input_of(text)
        self._event("content_block_stop", index=len(self._content) - 1)

    def _begin(self) -> None:
        """With the first piece, because the usage tells what the cache gave."""
        self._has_begun = True
        self._event("message_start", message=self._message())

    def _event(self, kind: str, **fields: Any) -> None:
        if self._body.stream:
            content = to_json({"type": kind} | fields)
            self._events.append(b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n")

    def _take_events(self) -> bytes:
        written = b"".join(self._events)
        self._events.clear()
        return written


def _input_of(arguments: str) -> dict[str, Any]:
    """The object that the model wrote, as far as it came. Text that is no object is not lost."""
    try:
        value = pydantic_core.from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"unparsed": arguments}
