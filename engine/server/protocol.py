"""What clients may send. Every field is honoured, or refused with its name; nothing is accepted and ignored."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.server.errors import ApiError

# Fields of the official API, or of well-known clients, that are not honoured yet: they pass only with a value that asks
# for nothing special. null always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_cache_key": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

Body = TypeVar("Body", bound=BaseModel)
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage in every chunk, as vLLM offers it: tells the tokens of a chunk


class GenerationRequest(BaseModel):
    """What completions and chat completions share."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    temperature: float = Field(1.0, ge=0, le=2)  # below 0.00001 it is greedy
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1 keep everything
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_salt: str = Field("", max_length=1000)  # requests with different salts share no cached prefix
    user: str = Field("", max_length=1000)  # recorded as the tenant

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any  # a text, or a list of token ids; looked at by hand, because it may be long
    max_tokens: int = Field(16, ge=1)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=1000)]
    name: str | None = None

    def template_value(self) -> dict[str, str]:
        """As chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or messages to be rendered by the chat template."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


def parse(kind: type[Body], raw: Any) -> Body:
    """Checks a decoded body. Raises ApiError 400 that names the first bad field, its value and what it may be."""
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(raw).__name__}")
    wanted = {}
    for name, value in raw.items():
        if name in NEUTRAL:
            _refuse_unless_neutral(name, value)
        elif value is not None:
            wanted[name] = value
    try:
        body = kind.model_validate(wanted)
    except ValidationError as error:
        raise _first(error.errors(include_url=False)) from None
    if isinstance(body, GenerationRequest):
        _refuse_contradictions(body)
    return body


def _refuse_contradictions(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "`stream_options` needs `stream`: true; leave it out", param="stream_options")
    if isinstance(body, ChatRequest) and None not in (body.max_tokens, body.max_completion_tokens):
        raise ApiError(400, "send `max_completion_tokens` or `max_tokens`, not both", param="max_tokens")


def _refuse_unless_neutral(name: str, value: Any) -> None:
    allowed = NEUTRAL[name]
    if value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in allowed
    ):
        return
    accepted = " or ".join(repr(neutral) for neutral in allowed)
    way_out = f"leave it out, or send {accepted}" if allowed else "leave it out"
    message = f"`{name}` is not supported by this server yet, but was sent as {_short(value)}; {way_out}"
    raise ApiError(400, message, param=name, code="unsupported_parameter")


def _first(errors: list[dict[str, Any]]) -> ApiError:
    field = errors[0]["loc"][0]
    # Each member of a union says why it did not fit; what was meant is the one that objects to more than the type.
    error = max(
        (e for e in errors if e["loc"][0] == field), key=lambda e: (not e["type"].endswith("_type"), len(e["loc"]))
    )
    path = ".".join(str(part) for part in error["loc"] if part not in _UNION_BRANCHES)
    if error["type"] == "extra_forbidden":
        message = f"`{path}` is not a field that this server knows; leave it out"
        return ApiError(400, message, param=path, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"`{path}` is required", param=path, code="missing_required_parameter")
    message = f"`{path}`={_short(error['input'])} is not valid: {error['msg'][0].lower()}{error['msg'][1:]}"
    return ApiError(400, message, param=str(field), code="invalid_value")


# Pydantic names the tried member of a union in the path; a client has no such field.
_UNION_BRANCHES = {"str", "list[TextPart]", "constrained-str"}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
