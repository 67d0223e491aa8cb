"""A call in the format of POST /v1/chat/completions."""

from functools import partial
from typing import Any

from sojourn.engine.server.core.call import Call
from sojourn.engine.server.core.sequence import SequenceStream, TextPiece
from sojourn.engine.server.openai.assistant_turn import AssistantTurn, ReasoningDelta, ToolCall, TurnDelta
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.kv_transfer import handoff_of
from sojourn.engine.server.openai.logprobs import chat_logprobs, prompt_logprobs
from sojourn.engine.server.openai.reasoning import PLAIN, TurnPlan
from sojourn.engine.server.openai.serializer import (
    NULL_FIELDS,
    Chunks,
    Serializer,
    timings_of,
    to_json,
    usage_of,
    vllm_fields,
    whole_outputs,
)
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.engine.token.tools.calls import CallDelta, ContentDelta

_NULL_MESSAGE_FIELDS = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))


class ChatSerializer(Serializer):
    """Chat completions: one prompt, n choices. As the plan says, each text is searched for reasoning and tool calls."""

    def __init__(self, call: Call, body: ChatRequest, base: dict[str, Any], tokenizer: Tokenizer, plan: TurnPlan):
        self._call = call
        self._body = body
        self._base = base
        self._vocabulary = tokenizer.vocabulary
        self._roles_are_out = False
        self._is_plain = plan == PLAIN
        self._turns = [AssistantTurn(plan) for _ in call.sequences]
        # A bound method would be a cycle, and a call would live until a garbage collection.
        self._reasoning_tokens = partial(_reasoning_tokens, self._turns, call)
        self._chunks = Chunks(call, base | {"object": "chat.completion.chunk"}, body, self._reasoning_tokens)

    def events(self, piece: TextPiece) -> bytes:
        if self._is_plain:
            delta = {"content": piece.text} if piece.text else {}
        else:
            delta = self._read_delta(piece)
            if not delta and not piece.entries and piece.finish_reason is None:
                return b""  # the text may be the beginning of a call or of a marker
        roles = b"" if self._roles_are_out else self._roles()
        return roles + self._chunks.of(self._choice(piece, "delta", delta))

    def closing(self, last: SequenceStream) -> bytes:
        return self._chunks.end(last)

    def body(self, pieces: list[TextPiece]) -> bytes:
        choices = []
        for output, turn in zip(whole_outputs(self._call, pieces), self._turns, strict=True):
            turn.add(output)
            reasoning = turn.reasoning or None if self._body.include_reasoning else None
            message = {"role": "assistant", "content": turn.content} | _NULL_MESSAGE_FIELDS | _reasoning(reasoning)
            if turn.calls or turn.reasoning:
                message["content"] = turn.content or None
            if turn.calls:
                message["tool_calls"] = [_call_fields(call) for call in turn.calls]
            choices.append(self._choice(output, "message", message))
        whole = self._base | NULL_FIELDS | {"prompt_logprobs": None, "prompt_token_ids": None}
        usage = usage_of(self._call, self._reasoning_tokens())
        whole |= {"object": "chat.completion", "choices": choices, "usage": usage}
        whole |= handoff_of(self._call.handed_over)
        if self._body.prompt_logprobs is not None:
            positions = self._call.sequences[0].prompt_logprobs
            whole["prompt_logprobs"] = prompt_logprobs(positions, self._body.prompt_logprobs, self._vocabulary)
        if self._body.return_token_ids:
            whole["prompt_token_ids"] = self._call.sequences[0].request.prompt_token_ids
        return to_json(whole | timings_of(self._call, pieces[-1].sequence))

    def _roles(self) -> bytes:
        """A chunk without text for each choice, in their order: openai-python's accumulator relies on it.

        They are written together with the first text, so that no client mistakes them for it.
        """
        self._roles_are_out = True
        delta = {"role": "assistant", "content": "" if self._is_plain else None}
        chunks = []
        for sequence in self._call.sequences:
            choice = {"index": sequence.choice, "delta": delta, "logprobs": None, "finish_reason": None}
            shows_prompt = self._body.return_token_ids and sequence.choice == 0
            extra = {"prompt_token_ids": sequence.request.prompt_token_ids} if shows_prompt else {}
            chunks.append(self._chunks.first(choice, extra))
        return b"".join(chunks)

    def _read_delta(self, piece: TextPiece) -> dict[str, Any]:
        """The piece as reasoning, content and calls; may be empty."""
        turn = self._turns[piece.sequence.choice]
        deltas = turn.add(piece)
        delta: dict[str, Any] = {}
        reasoning = "".join(part.text for part in deltas if isinstance(part, ReasoningDelta))
        if reasoning and self._body.include_reasoning:
            delta |= _reasoning(reasoning)
        text = "".join(part.text for part in deltas if isinstance(part, ContentDelta))
        if text:
            delta["content"] = text
        if calls := [_delta_fields(part, turn) for part in _merge(deltas)]:
            delta["tool_calls"] = calls
        return delta

    def _choice(self, piece: TextPiece, name: str, content: dict[str, Any]) -> dict[str, Any]:
        index, reason = piece.sequence.choice, piece.finish_reason
        choice = {
            "index": index,
            name: content,
            "logprobs": None,
            "finish_reason": reason and self._turns[index].finish_reason(reason),
        }
        if piece.entries or reason is not None:
            if (num_top := self._body.num_logprobs) is not None:
                choice["logprobs"] = chat_logprobs(piece.entries, num_top, self._vocabulary)
            choice |= vllm_fields(piece, self._body)
        return choice


def _reasoning_tokens(turns: list[AssistantTurn], call: Call) -> int:
    return sum(turn.reasoning_tokens(sequence) for turn, sequence in zip(turns, call.sequences, strict=True))


def _reasoning(text: str | None) -> dict[str, Any]:
    """By vLLM's name, and by DeepSeek's, which more clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _merge(deltas: list[TurnDelta]) -> list[CallDelta]:
    """The deltas of calls, those of one call in one."""
    merged: list[CallDelta] = []
    for delta in (delta for delta in deltas if isinstance(delta, CallDelta)):
        if merged and delta.name is None and merged[-1].index == delta.index:
            last = merged.pop()
            delta = CallDelta(last.index, last.name, last.arguments + delta.arguments)
        merged.append(delta)
    return merged


def _delta_fields(delta: CallDelta, turn: AssistantTurn) -> dict[str, Any]:
    function = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    call_id = turn.calls[delta.index].id
    return {"index": delta.index, "id": call_id, "type": "function", "function": {"name": delta.name} | function}


def _call_fields(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
