"""Content blocks of Anthropic's messages → chat messages."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.errors import ApiError, invalid
from sojourn.engine.server.openai.messages import MAX_PARTS
from sojourn.engine.server.openai.tools import Name

CallId = Annotated[str, Field(max_length=200)]


class CacheControl(Strict):
    """A hint. Prompts that begin alike share their KV blocks in any case, as long as the pool keeps them."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Strict):
    cache_control: CacheControl | None = Field(None, description="a hint; the prefix cache needs none")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Clients send back the blocks of earlier answers, with null for every absent field."""
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="only an empty list")


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="goes back as it came, which is empty")


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: CallId
    name: Name
    input: dict[str, Any]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] = Field(
        "", description="a text, or text blocks"
    )
    is_error: bool = Field(False, description='true: the model reads "Error: " before the result')


_BLOCKS = {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock, "tool_result": ToolResultBlock}
# role → the blocks that it may hold
_OF_ROLE = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}


class MessageParam(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] = Field(
        description="a text, or blocks: text, tool_use, tool_result, thinking"
    )


def chat_messages(system: str | list[dict[str, Any]] | None, messages: list[MessageParam]) -> list[dict[str, Any]]:
    """Messages as chats have them. Raises ApiError 400 that names the block."""
    chat = []
    if system:
        text = system if isinstance(system, str) else _text_of(system, "system")
        chat.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            chat.append({"role": message.role, "content": message.content})
        else:
            where = f"messages.{index}.content"
            blocks = [_block(value, f"{where}.{n}", _OF_ROLE[message.role]) for n, value in enumerate(message.content)]
            chat += _assistant(blocks) if message.role == "assistant" else _user_messages(message.role, blocks, where)
    return chat


def _user_messages(role: str, blocks: list[_Block], where: str) -> list[dict[str, Any]]:
    """The results of tools, each a message of its own, and then the text."""
    chat = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            is_text = isinstance(block.content, str)
            text = block.content if is_text else _text_of(block.content, f"{where}.{index}.content")
            text = f"Error: {text}" if block.is_error else text
            chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if texts or not chat:
        chat.append({"role": role, "content": "".join(texts)})
    return chat


def _assistant(blocks: list[_Block]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "".join(thoughts)
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return [message | ({"tool_calls": calls} if calls else {})]


def _text_of(blocks: list[dict[str, Any]], where: str) -> str:
    return "".join(_block(value, f"{where}.{index}", ("text",)).text for index, value in enumerate(blocks))


def _block(value: dict[str, Any], where: str, allowed: tuple[str, ...]) -> Any:
    """A checked block. Raises ApiError 400 for one that is not allowed there, as an image always is."""
    kind = value.get("type")
    if kind not in allowed:
        raise _refusal(where, f"has the type {str(kind)[:80]!r}, but this server reads {', '.join(allowed)} there")
    try:
        return _BLOCKS[kind].model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise _refusal(where, f"is not valid: {field}: {first['msg'].lower()}") from None


def _refusal(where: str, sentence: str) -> ApiError:
    return invalid(where.partition(".")[0], f"`{where}` {sentence}")
