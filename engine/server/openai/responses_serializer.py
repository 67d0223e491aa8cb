"""A call in the format of POST /v1/responses: items that grow, and events that report it."""

import time
from typing import Any

from sojourn.engine.server.core.call import Call
from sojourn.engine.server.core.sequence import Entry, SequenceStream, TextPiece
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.openai.assistant_turn import AssistantTurn, ReasoningDelta
from sojourn.engine.server.openai.logprobs import chat_logprobs
from sojourn.engine.server.openai.reasoning import TurnPlan
from sojourn.engine.server.openai.responses_request import ResponsesRequest
from sojourn.engine.server.openai.serializer import DONE, Serializer, timings_of, to_json
from sojourn.engine.token.text.vocabulary import Vocabulary
from sojourn.engine.token.tools.calls import CallDelta, ContentDelta

# Finish reason → the reason of an incomplete response.
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesSerializer(Serializer):
    """One response. Whole or streamed, it has the same items; a stream also reports how they grow."""

    def __init__(
        self,
        call: Call,
        body: ResponsesRequest,
        model: str,
        vocabulary: Vocabulary,
        plan: TurnPlan,
        cached_block_size: int,
    ):
        """`cached_block_size` tokens are one block of the prefix cache; 0 where there is none."""
        self._call = call
        self._body = body
        self._vocabulary = vocabulary
        self._cached_block_size = cached_block_size
        self._turn = AssistantTurn(plan)
        self._response = _skeleton(call, body, model)
        self._output: list[dict[str, Any]] = self._response["output"]
        self._texts: list[str] = []  # of the open item
        self._entries: list[Entry] = []  # tokens of the open item, if the client wants log-probabilities
        self._events: list[dict[str, Any]] = []
        self._sequence_number = 0
        self._is_open = False  # the last item still grows

    def opening(self) -> bytes:
        self._event("response.created", response=self._response)
        self._event("response.in_progress", response=self._response)
        return self._take_events()

    def events(self, piece: TextPiece) -> bytes:
        self._add(piece)
        return self._take_events()

    def closing(self, last: SequenceStream) -> bytes:
        self._finish()
        self._event(f"response.{self._response['status']}", response=self._response)
        return self._take_events() + DONE

    def failure(self, error: ApiError) -> bytes:
        self._response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        self._response["usage"] = self._usage()
        if self._is_open:
            item, text = self._output[-1], "".join(self._texts)
            item["status"] = "incomplete"
            if item["type"] in ("message", "reasoning"):
                item["content"][0]["text"] = text
            else:
                item["arguments"] = text
        self._event("response.failed", response=self._response)
        return self._take_events()

    def _add(self, piece: TextPiece) -> None:
        self._entries += piece.entries if self._body.num_logprobs is not None else []
        for delta in self._turn.add(piece):
            if isinstance(delta, ReasoningDelta):
                self._add_reasoning(delta.text)
            elif isinstance(delta, ContentDelta):
                self._add_text(delta.text)
            else:
                self._add_call(delta)
        if piece.finish_reason is not None:
            if not self._output:
                self._open_message()
            self._close("incomplete" if piece.finish_reason in INCOMPLETE else "completed")
            self._response["status"] = self._output[-1]["status"]
            if piece.finish_reason in INCOMPLETE:
                self._response["incomplete_details"] = {"reason": INCOMPLETE[piece.finish_reason]}

    def body(self, pieces: list[TextPiece]) -> bytes:
        for piece in pieces:
            self._add(piece)
        self._finish()
        return to_json(self._response)

    def _finish(self) -> None:
        self._response["usage"] = self._usage()
        if self._response["status"] == "completed":
            self._response["completed_at"] = int(time.time())
        self._response |= timings_of(self._call, self._call.sequences[0])

    def _usage(self) -> dict[str, Any]:
        prompt_tokens, output_tokens = self._call.prompt_tokens, self._call.output_tokens
        cached_tokens, block = self._call.cached_tokens, self._cached_block_size
        cacheable_tokens = prompt_tokens // block * block if block else 0
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": cached_tokens,
                "cache_write_tokens": max(0, cacheable_tokens - cached_tokens),
            },
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._turn.reasoning_tokens(self._call.sequences[0])},
            "total_tokens": prompt_tokens + output_tokens,
        }

    # Items, one after another: only the last one is open.

    def _add_text(self, text: str) -> None:
        if not self._is_open or self._output[-1]["type"] != "message":
            self._open_message()
        self._texts.append(text)
        logprobs = self._logprobs() if self._body.stream else []
        self._event("response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> None:
        if not self._is_open:  # it stands before all else
            self._open(
                {"id": self._id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            )
            part = {"type": "reasoning_text", "text": ""}
            self._output[-1]["content"].append(part)
            self._event("response.content_part.added", **self._place(), content_index=0, part=dict(part))
        self._texts.append(text)
        self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _open_message(self) -> None:
        item = {"id": self._id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self._open(item)
        item["content"].append(_text_part())
        self._event("response.content_part.added", **self._place(), content_index=0, part=_text_part())

    def _add_call(self, delta: CallDelta) -> None:
        if delta.name is not None:
            call_id = self._turn.calls[delta.index].id
            item = {"id": self._id("fc"), "type": "function_call", "status": "in_progress", "call_id": call_id}
            self._open(item | {"name": delta.name, "arguments": ""})
        if delta.arguments:
            self._texts.append(delta.arguments)
            self._event("response.function_call_arguments.delta", **self._place(), delta=delta.arguments)

    def _open(self, item: dict[str, Any]) -> None:
        self._close("completed")
        self._output.append(item)
        self._is_open = True
        self._event("response.output_item.added", output_index=len(self._output) - 1, item=_copy(item))

    def _close(self, status: str) -> None:
        if not self._is_open:
            return
        item, text = self._output[-1], "".join(self._texts)
        self._texts.clear()
        item["status"], self._is_open = status, False
        if item["type"] == "message":
            part = item["content"][0]
            part["text"] = text
            if not self._body.stream:
                part["logprobs"] = self._logprobs()
            logprobs = part["logprobs"]
            self._event("response.output_text.done", **self._place(), content_index=0, text=text, logprobs=logprobs)
            self._event("response.content_part.done", **self._place(), content_index=0, part=dict(part))
        elif item["type"] == "reasoning":
            part = item["content"][0]
            part["text"] = text
            self._event("response.reasoning_text.done", **self._place(), content_index=0, text=text)
            self._event("response.content_part.done", **self._place(), content_index=0, part=dict(part))
        else:
            item["arguments"] = text
            self._event("response.function_call_arguments.done", **self._place(), name=item["name"], arguments=text)
        self._event("response.output_item.done", output_index=len(self._output) - 1, item=_copy(item))

    def _logprobs(self) -> list[dict[str, Any]]:
        """Of the tokens since the last call. The open item has all of them."""
        if self._body.num_logprobs is None:
            return []
        own = [entry for entry in self._entries if entry.text_offset >= self._turn.reasoning_end]
        logprobs = chat_logprobs(own, self._body.num_logprobs, self._vocabulary)["content"]
        self._entries.clear()
        if self._body.stream:
            self._output[-1]["content"][0]["logprobs"] += logprobs
        return logprobs

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._call.caller.request_id}_{len(self._output)}"

    def _event(self, kind: str, **fields: Any) -> None:
        if self._body.stream:
            self._events.append({"type": kind, "sequence_number": self._sequence_number, **fields})
            self._sequence_number += 1

    def _take_events(self) -> bytes:
        written = b"".join(b"event: " + e["type"].encode() + b"\ndata: " + to_json(e) + b"\n\n" for e in self._events)
        self._events.clear()
        return written


def _skeleton(call: Call, body: ResponsesRequest, model: str) -> dict[str, Any]:
    """A response before its output, with every field of the specification."""
    choice = body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()
    return {
        "id": f"resp_{call.caller.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key or None,
        "reasoning": body.reasoning.model_dump(),
        "safety_identifier": body.safety_identifier or None,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "top_logprobs": body.top_logprobs,
        "text": body.text.model_dump(by_alias=True, exclude_none=True),
        "tool_choice": choice,
        "tools": [tool.model_dump() for tool in body.tools],
        "truncation": "disabled",
        "background": False,
        "metadata": body.metadata,
        "user": body.user or None,
        "usage": None,
    }


def _text_part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is now. It may grow before its event is written."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}
