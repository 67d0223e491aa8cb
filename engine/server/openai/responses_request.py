"""POST /v1/responses, stateless: what clients may send, and the same chat in the words of chat completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from pydantic import Field, ValidationError
from starlette.responses import Response

from engine.server.errors import ApiError
from engine.server.openai.chat_request import ChatRequest
from engine.server.openai.messages import MAX_MESSAGES
from engine.server.openai.protocol import MAX_LOGPROBS, GenerationRequest, Strict, refusal_of
from engine.server.openai.responses_items import messages_of
from engine.server.openai.responses_serializer import ResponsesWording
from engine.server.openai.tools import MAX_TOOLS, FunctionTool, Name
from engine.server.openai.unsupported import Neutral
from engine.server.service import Service

LOGPROBS = "message.output_text.logprobs"

_STATELESS = "has no meaning where no response is stored"
_NO_HISTORY = "has no meaning where no response is stored (send the earlier turns in `input`)"

# Fields that pass only with a value that asks for nothing special.
_NEUTRAL = {
    "access_programs": Neutral((), "OpenAI"),
    "background": Neutral((False,), "OpenAI", _STATELESS),
    "context_management": Neutral(([],), "OpenAI"),
    "conversation": Neutral((), "OpenAI", _NO_HISTORY),
    "image": Neutral((), "OpenAI"),
    "max_tool_calls": Neutral((), "OpenAI, for tools that the server runs"),
    "moderation": Neutral((), "OpenAI"),
    "previous_response_id": Neutral((), "OpenAI", _NO_HISTORY),
    "prompt": Neutral((), "OpenAI, for stored prompts"),
    "prompt_cache_options": Neutral(({},), "OpenAI"),
    "prompt_cache_retention": Neutral(("in_memory", "in-memory"), "OpenAI"),
    "reasoning": Neutral(({}, {"effort": "none"}, {"effort": None, "summary": None}), "OpenAI"),
    "service_tier": Neutral(("auto", "default"), "OpenAI"),
    "store": Neutral((False,), "OpenAI", _STATELESS),
    "truncation": Neutral(("disabled",), "OpenAI"),
}


class _Function(Strict):
    type: Literal["function"]  # looked at first


class ResponseTool(FunctionTool, _Function):
    """A function; tools that a server would run itself are not here."""


class ResponseToolChoice(Strict):
    type: Literal["function"]
    name: Name


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


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] = Field(False, description="only false: no padding is sent")


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses. The sampling controls of chat completions that the specification lacks are taken, too."""

    neutral: ClassVar[Mapping[str, Neutral]] = _NEUTRAL

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="a text, or items: messages of texts, function_call, function_call_output"
    )
    instructions: str | None = Field(None, description="a system message before all others")
    max_output_tokens: int | None = Field(None, ge=1, description="output tokens at most; else what fits")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] = Field(
        [], description="functions that the model may call"
    )
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice = Field(
        "auto", description="none, auto, required, or one function; the last two always give valid calls"
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    text: TextOptions = Field(TextOptions(), description="the format of the text")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        [], description="log-probabilities; reasoning.encrypted_content passes, as there is no reasoning item"
    )
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="alternatives to each token, where included")
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] = Field(
        {}, description="given back in the response"
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
            message = f"`top_logprobs` needs `include` with {LOGPROBS!r}"
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")

    def as_chat(self) -> ChatRequest:
        """The same in the words of chat completions. Raises ApiError 400 for items that have none."""
        own = {"n", "stream", "stream_options", "prompt_logprobs", "return_token_ids"}
        shared = self.model_dump(include=set(GenerationRequest.model_fields) - own)
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        words = shared | {
            "messages": messages_of(self.input, self.instructions),
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.num_logprobs is not None,
            "top_logprobs": self.num_logprobs,
        }
        if self.text.format.type != "text":
            words["response_format"] = _response_format(self.text.format)
        try:
            return ChatRequest.model_validate(words)
        except ValidationError as error:
            raise refusal_of(error) from None


_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}


async def create(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """Answers POST /v1/responses. Raises ApiError before the first byte."""
    try:
        call, plan = await service.start_chat(request, body.as_chat())
    except ApiError as error:
        error.param = _PARAMS.get(error.param, error.param)
        raise
    block_size = service.config.block_size if service.config.prefix_caching else 0
    wording = ResponsesWording(call, body, service.name, service.tokenizer.vocabulary, plan, block_size)
    return service.respond(call, wording, stream=body.stream)


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}
