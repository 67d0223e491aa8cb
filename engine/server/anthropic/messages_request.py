"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and their translation into a chat."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from sojourn.engine.server.anthropic.content_blocks import CacheControl, MessageParam, chat_messages
from sojourn.engine.server.body.strict import Strict, UnsupportedField, refusal_of
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.messages import MAX_MESSAGES, MAX_PARTS
from sojourn.engine.server.openai.protocol import StopString
from sojourn.engine.server.openai.tools import MAX_TOOLS, AsSent, Name


class CustomTool(AsSent):
    """A function; tools that Anthropic's servers run are not here."""

    name: Name = Field(description="letters, digits, _ and -, up to 64")
    input_schema: dict[str, Any] = Field(description="JSON schema of an object")
    description: str | None = Field(None, description="shown to the model")
    strict: bool | None = Field(None, description="calls always match the schema, also where the model chooses freely")
    type: Literal["custom"] | None = Field(None, description="only functions of the client")
    cache_control: CacheControl | None = Field(None, description="a hint; the prefix cache needs none")

    @property
    def chat_value(self) -> dict[str, Any]:
        """As a chat would have it, in the order in which it was sent."""
        names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
        function = {names[key]: value for key, value in self._sent.items() if key in names}
        return {"type": "function", "function": function}


class ToolChoiceParam(Strict):
    type: Literal["auto", "any", "tool", "none"] = Field(description="any: at least one call; tool: one of this name")
    name: Name | None = Field(None, description="of the function, with the type tool")
    disable_parallel_tool_use: bool = Field(False, description="true: at most one call")


class ThinkingParam(Strict):
    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="set as the variable by which the chat template turns reasoning on and off"
    )
    budget_tokens: int | None = Field(None, ge=1, description="tokens of reasoning at most, with the type enabled")
    display: Literal["omitted"] | None = Field(None, description="omitted: the block of the reasoning is empty")


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="followed strictly")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="needs a chat template that reads reasoning_effort"
    )
    format: OutputFormat | None = Field(None, description="what the text must look like")


class MetadataParam(Strict):
    user_id: str = Field("", max_length=1000, description="recorded as the tenant, by whom fair shares are counted")


class CountTokensRequest(Strict):
    """POST /v1/messages/count_tokens: what shapes a prompt."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = {
        "container": UnsupportedField((), "Anthropic"),
        "context_management": UnsupportedField(({},), "Anthropic"),
        "diagnostics": UnsupportedField((), "Anthropic"),
        "inference_geo": UnsupportedField((), "Anthropic"),
        "mcp_servers": UnsupportedField(([],), "Anthropic"),
        "service_tier": UnsupportedField(("auto", "standard_only"), "Anthropic"),
        "speed": UnsupportedField(("standard",), "Anthropic"),
        "user_profile_id": UnsupportedField((), "Anthropic"),
        "workspace_id": UnsupportedField((), "Anthropic"),
    }

    model: str = Field(description="name of the served model")
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="the turns; a last one of the assistant is continued"
    )
    system: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] | None = Field(
        None, description="a text, or text blocks, before all messages"
    )
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] = Field(
        [], description="functions that the model may call"
    )
    tool_choice: ToolChoiceParam | None = Field(None, description="whether the model calls; by default as it likes")
    thinking: ThinkingParam | None = Field(None, description="by default as the model does")
    output_config: OutputConfig = Field(OutputConfig(), description="effort, and the schema of the text")
    cache_control: CacheControl | None = Field(None, description="a hint; the prefix cache needs none")

    def refuse_contradictions(self) -> None:
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise invalid("tool_choice", "`tool_choice.name` goes with the `type` tool, and with no other")
        budget = self.thinking and self.thinking.budget_tokens
        if self.thinking is not None and (self.thinking.type == "enabled") != (budget is not None):
            raise invalid("thinking", "`thinking.budget_tokens` goes with the `type` enabled, and with no other")

    def chat_fields(self) -> dict[str, Any]:
        """Fields of the same chat. Raises ApiError 400 for blocks that a chat cannot hold."""
        choice = self.tool_choice or ToolChoiceParam(type="auto")
        continues = self.messages[-1].role == "assistant"
        fields = {
            "model": self.model,
            "messages": chat_messages(self.system, self.messages),
            "tools": [tool.chat_value for tool in self.tools],
            "tool_choice": {"any": "required", "tool": {"type": "function", "function": {"name": choice.name}}}.get(
                choice.type, choice.type
            ),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "reasoning_effort": self.output_config.effort,
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
        }
        if self.thinking is not None and self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        if (shape := self.output_config.format) is not None:
            described = {"name": "output", "schema": shape.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": described}
        return fields

    def as_chat(self) -> ChatRequest:
        """The same chat as a body of chat completions. Raises ApiError 400."""
        try:
            return ChatRequest.model_validate(self.chat_fields())
        except ValidationError as error:
            raise refusal_of(error) from None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, description="output tokens at most, reasoning included")
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] = Field(
        [], description="strings that end the output; cut off"
    )
    stream: bool = Field(False, description="server-sent events, as the text becomes ready")
    temperature: float = Field(1.0, ge=0, le=1, description="0, or anything below 0.00001, is greedy")
    top_p: float = Field(1.0, ge=0, le=1, description="draws from the smallest set of this much probability")
    top_k: int = Field(0, ge=0, lt=2**31, description="draws from the k most probable; 0 keeps all")
    metadata: MetadataParam = Field(MetadataParam(), description="who asks")

    @property
    def tenant(self) -> str:
        return self.metadata.user_id

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        budget = self.thinking and self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            message = f"`thinking.budget_tokens`={budget} must be less than `max_tokens`, {self.max_tokens}"
            raise invalid("thinking", message)

    def chat_fields(self) -> dict[str, Any]:
        sent = self.model_dump(include={"temperature", "top_p", "top_k"}, exclude_unset=True)
        return (
            super().chat_fields()
            | sent
            | {
                "max_completion_tokens": self.max_tokens,
                "stop": self.stop_sequences or None,
                "user": self.metadata.user_id,
                "thinking_token_budget": self.thinking and self.thinking.budget_tokens,
            }
        )


# Fields of the chat that `as_chat` makes → the fields of a message that they come from, as errors name them.
MESSAGES_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
