"""The body of POST /v1/responses, stateless, and its translation into a chat."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from sojourn.engine.server.body.strict import Strict, UnsupportedField, refusal_of
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.messages import MAX_MESSAGES, TemplateValue
from sojourn.engine.server.openai.protocol import MAX_LOGPROBS, GenerationRequest
from sojourn.engine.server.openai.reasoning import Effort
from sojourn.engine.server.openai.responses_items import messages_of
from sojourn.engine.server.openai.tools import MAX_TOOLS, AsSent, FunctionTool, Name

LOGPROBS = "message.output_text.logprobs"

_STATELESS = "has no meaning where no response is stored"
_NO_HISTORY = "has no meaning where no response is stored (send the earlier turns in `input`)"


class _Function(Strict):
    type: Literal["function"]  # looked at first


class ResponseTool(AsSent, FunctionTool, _Function):
    """A function; tools that a server would run itself are not here."""

    @property
    def function_value(self) -> dict[str, Any]:
        """As a chat would have it, in the order in which it was sent."""
        return {name: value for name, value in self._sent.items() if name != "type"}


class ResponseToolChoice(Strict):
    type: Literal["function"]
    name: Name


class ResponseAllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = Field(description="auto: the model may call one of them; required: it must")
    tools: Annotated[list[ResponseToolChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] = Field(
        description="which of `tools`; the model is still shown all"
    )


class TextFormat(Strict):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat = Field(TextFormat(type="text"), description="text, json_object, or json_schema with a schema")
    verbosity: Literal["medium"] = Field("medium", description="only medium, which asks for nothing")


class ReasoningOptions(Strict):
    effort: Effort | None = Field(
        None, description="none turns reasoning off, where the chat template can; others need a template that reads it"
    )
    summary: None = Field(None, description="only null: the reasoning itself is given")


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] = Field(False, description="only false: no padding is sent")


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses. The sampling controls of chat completions that the specification lacks are taken, too."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = {
        "access_programs": UnsupportedField((), "OpenAI"),
        "background": UnsupportedField((False,), "OpenAI", _STATELESS),
        "context_management": UnsupportedField(([],), "OpenAI"),
        "conversation": UnsupportedField((), "OpenAI", _NO_HISTORY),
        "image": UnsupportedField((), "OpenAI"),
        "max_tool_calls": UnsupportedField((), "OpenAI, for tools that the server runs"),
        "moderation": UnsupportedField((), "OpenAI"),
        "previous_response_id": UnsupportedField((), "OpenAI", _NO_HISTORY),
        "prompt": UnsupportedField((), "OpenAI, for stored prompts"),
        "prompt_cache_options": UnsupportedField(({},), "OpenAI"),
        "prompt_cache_retention": UnsupportedField(("in_memory", "in-memory"), "OpenAI"),
        "service_tier": UnsupportedField(("auto", "default"), "OpenAI"),
        "store": UnsupportedField((False,), "OpenAI", _STATELESS),
        "truncation": UnsupportedField(("disabled",), "OpenAI"),
    }

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="a text, or items: messages of texts, function_call, function_call_output"
    )
    instructions: str | None = Field(None, description="a system message before all others")
    max_output_tokens: int | None = Field(None, ge=1, description="output tokens at most; else what fits")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        [], description="functions that the model may call"
    )
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | ResponseAllowedTools = Field(
        "auto", description="none, auto, required, one function or allowed_tools; a call that must come is valid"
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    reasoning: ReasoningOptions = Field(ReasoningOptions(), description="how much the model reasons")
    text: TextOptions = Field(TextOptions(), description="the format of the text")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        [],
        max_length=16,
        fail_fast=True,
        description="log-probabilities; reasoning.encrypted_content passes: reasoning comes, and goes back, as text",
    )
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="alternatives to each token, where included")
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] = Field(
        {}, description="given back in the response"
    )
    chat_template_kwargs: Annotated[dict[str, TemplateValue], Field(max_length=32)] = Field(
        {}, description="variables that the chat template reads, such as enable_thinking; vLLM's field"
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="asks for nothing that is not so anyway")

    response_format: None = Field(None, description="not here; `text.format` says it")
    n: Literal[1] = Field(1, description="only 1: a response is one answer")
    prompt_logprobs: None = Field(None, description="not here; chat completions have it")
    return_token_ids: Literal[False] = Field(False, description="not here; chat completions have it")

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if LOGPROBS in self.include else None

    def refuse_contradictions(self) -> None:
        if self.top_logprobs and LOGPROBS not in self.include:
            raise invalid("top_logprobs", f"`top_logprobs` needs `include` with {LOGPROBS!r}")

    def as_chat(self) -> ChatRequest:
        """The same chat as a body of chat completions. Raises ApiError 400 for items that a chat cannot hold."""
        own = {"n", "stream", "stream_options", "prompt_logprobs", "return_token_ids"}
        shared = self.model_dump(include=set(GenerationRequest.model_fields) - own)
        fields = shared | {
            "messages": messages_of(self.input, self.instructions),
            "tools": [{"type": "function", "function": tool.function_value} for tool in self.tools],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.num_logprobs is not None,
            "top_logprobs": self.num_logprobs,
        }
        if self.text.format.type != "text":
            fields["response_format"] = _response_format(self.text.format)
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise refusal_of(error) from None


# Fields of the chat that `as_chat` makes → the fields of a response that they come from.
RESPONSES_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
RESPONSES_PARAMS["reasoning_effort"] = "reasoning"


def _chat_choice(choice: str | ResponseToolChoice | ResponseAllowedTools) -> str | dict[str, Any]:
    """A choice of tools as chats have it."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, ResponseToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    named = [_chat_choice(tool) for tool in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}
