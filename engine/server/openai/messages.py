"""Chat messages as clients send them, and the other fields that shape a rendered prompt."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.tools import MAX_TOOLS, ChatTool

MAX_MESSAGES = 10_000
MAX_PARTS = 1000
MAX_MESSAGE_CALLS = 128
MAX_ARGUMENT_CHARACTERS = 262_144  # of one call: 20 ms to read and to write

TemplateValue = bool | int | float | Annotated[str, Field(max_length=1000)] | None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """What a model answered in place of a text, in an earlier turn."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class CalledFunction(Strict):
    name: str = Field(min_length=1, max_length=64)
    arguments: str = Field(max_length=MAX_ARGUMENT_CHARACTERS, description="JSON of an object, as the model wrote it")

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, arguments: str) -> str:
        try:
            value = json.loads(arguments or "{}")
            json.dumps(value, ensure_ascii=False).encode()  # as templates write it; half a character fails
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError("it should be the JSON of an object")
        return arguments or "{}"


class MessageCall(Strict):
    """A call that the model made in an earlier turn."""

    id: str = Field(max_length=200)
    type: Literal["function"] = "function"
    function: CalledFunction


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="as the chat template knows it"
    )
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)] | None = Field(
        None, description="a text, or parts: texts, and refusals of the assistant; null only beside tool_calls"
    )
    refusal: str | None = Field(None, description="of the assistant, as an earlier answer had it; the template's text")
    reasoning_content: str | None = Field(None, description="of the assistant, as an earlier answer had it")
    reasoning: str | None = Field(None, description="the same under vLLM's name; both may be sent if they are equal")
    name: str | None = Field(None, description="of the speaker, where the template shows it")
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_MESSAGE_CALLS, fail_fast=True)] | None = Field(
        None, description="calls that the assistant made; their results follow as messages of the role tool"
    )
    tool_call_id: str | None = Field(None, max_length=200, description="the call whose result a tool message brings")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Clients send back the messages of earlier answers, with null for every absent field."""
        if not isinstance(value, dict):
            return value
        no_citations = {"annotations": []}  # of an official answer
        return {name: v for name, v in value.items() if v is not None and v != no_citations.get(name)}

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only the assistant calls tools, and this message has the role {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message of the role tool has a `tool_call_id`, and no other has one")
        parts = self.content if isinstance(self.content, list) else []
        if self.role != "assistant" and (self.refusal or any(isinstance(part, RefusalPart) for part in parts)):
            raise ValueError(f"only the assistant refuses, and this message has the role {self.role}")
        if self.thoughts is not None and self.role != "assistant":
            raise ValueError(f"only the assistant reasons, and this message has the role {self.role}")
        if None not in (self.reasoning, self.reasoning_content) and self.reasoning != self.reasoning_content:
            raise ValueError("send `reasoning_content` or `reasoning`, not both with different texts")
        if self.content is None and self.refusal is None and self.thoughts is None and not self.tool_calls:
            raise ValueError("`content` may be left out only beside `tool_calls`, `refusal` or `reasoning_content`")
        return self

    @property
    def thoughts(self) -> str | None:
        """The reasoning of an earlier answer."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def text(self) -> str:
        """All parts. A template knows no refusals: one is what the assistant said."""
        parts = self.content or ""
        return (parts if isinstance(parts, str) else "".join(part.text for part in parts)) or self.refusal or ""

    def texts(self) -> list[str]:
        """All that its sender wrote in it."""
        calls = [text for call in self.tool_calls or () for text in (call.function.name, call.function.arguments)]
        return [self.text, self.thoughts or "", self.name or "", *calls]

    def template_value(self) -> dict[str, Any]:
        """As chat templates read it. Calls without content have None there."""
        content: str | list[dict[str, str]] | None = self.text
        if self.tool_calls and self.content is None and not content:
            content = None
        if isinstance(self.content, list) and self.content:
            content = [{"type": "text", "text": part.text} for part in self.content]
        value: dict[str, Any] = {"role": self.role, "content": content}
        if self.thoughts is not None:  # templates know it by either name, and most show that of the last turn only
            value |= {"reasoning_content": self.thoughts, "reasoning": self.thoughts}
        if self.name:
            value["name"] = self.name
        if self.tool_calls:
            value["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            value["tool_call_id"] = self.tool_call_id
        return value


class TemplateFields(Strict):
    """The fields that shape the prompt beside the messages."""

    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        [], description="functions that the model may call, shown to it by its chat template"
    )
    add_generation_prompt: bool = Field(True, description="the prompt ends with the beginning of the assistant's turn")
    continue_final_message: bool = Field(
        False, description="the prompt ends inside the last message; needs add_generation_prompt: false"
    )
    chat_template_kwargs: Annotated[dict[str, TemplateValue], Field(max_length=32)] = Field(
        {}, description="variables that the chat template reads, such as enable_thinking"
    )

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        if self.continue_final_message and self.add_generation_prompt:
            message = "`continue_final_message` needs `add_generation_prompt`: false; a prompt has one end"
            raise invalid("continue_final_message", message)
