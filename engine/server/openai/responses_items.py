"""Items of a Responses input → chat messages."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from sojourn.engine.server.body.shape import MAX_FIELDS
from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.messages import MAX_PARTS, CalledFunction

Parts = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)]
_Status = Literal["in_progress", "completed", "incomplete"]
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(CalledFunction):
    type: Literal["function_call"]
    call_id: str = Field(max_length=200)
    id: str | None = None
    status: _Status | None = None


class CallOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=200)
    output: str | Parts
    id: str | None = None
    status: _Status | None = None


class ReasoningPart(Strict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] = Field([])
    summary: Annotated[list[dict[str, Any]], Field(max_length=0)] = Field([])
    id: str | None = None
    status: _Status | None = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem
_ITEMS = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


def messages_of(request_input: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages, as clients send them, of an input. Calls that follow each other are one assistant's turn, and so
    are reasoning and what follows it.

    Raises ApiError 400 that names the item.
    """
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(request_input, str):
        return [*messages, {"role": "user", "content": request_input}]
    for index, value in enumerate(request_input):
        item = _item(index, value)
        if isinstance(item, ReasoningItem):
            thoughts = "".join(part.text for part in item.content)
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
        elif isinstance(item, MessageItem):
            text = _text(index, item.content)
            if item.role == "assistant" and _only_reasons(messages):
                messages[-1]["content"] = text
            else:
                messages.append({"role": item.role, "content": text})
        elif isinstance(item, CallOutputItem):
            output = _text(index, item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _only_reasons(messages: list[dict[str, Any]]) -> bool:
    """The last message is reasoning whose answer is still to come."""
    return bool(messages) and "reasoning_content" in messages[-1] and messages[-1].keys().isdisjoint({"tool_calls"})


def _item(index: int, value: dict[str, Any]) -> Item:
    kind = value.get("type", "message")
    model = _ITEMS.get(kind) if isinstance(kind, str) else None
    if model is None:
        known = ", ".join(_ITEMS)
        raise invalid(
            "input", f"`input[{index}]` is an item of the type {str(kind)[:80]!r}, but this server takes {known}"
        )
    if len(value) > MAX_FIELDS:
        raise invalid("input", f"`input[{index}]` has {len(value):,} fields, but an item may have {MAX_FIELDS}")
    try:
        return model.model_validate({key: inner for key, inner in value.items() if inner is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"`input[{index}]`, an item of the type {kind}, is not valid: {where}: {first['msg'].lower()}"
        raise invalid("input", message) from None


def _text(index: int, content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind = part.get("type")
        text = part.get(_TEXT_PARTS.get(kind, "")) if isinstance(kind, str) else None
        if not isinstance(text, str):
            message = f"`input[{index}]` has a part of the type {str(kind)[:80]!r}, but this server reads text only"
            raise invalid("input", f"{message}: send input_text or output_text")
        texts.append(text)
    return "".join(texts)
