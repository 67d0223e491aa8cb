"""What clients may send. Every field is honoured, or refused with its name; nothing is accepted and ignored."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sojourn.engine.server.errors import ApiError, invalid
from sojourn.engine.server.http.json_values import MAX_VALUES, has_too_many_values
from sojourn.engine.server.openai.kv_transfer import KVTransferParams
from sojourn.engine.server.openai.shape import check_shape, unknown_field
from sojourn.engine.token.generation_config import SamplingDefaults

MAX_CHOICES = 128  # n and best_of
MAX_PROMPTS = 128  # of one call
MAX_SEQUENCES = 256  # of one call: prompts × choices
MAX_LOGPROBS = 20  # alternatives at each position
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_CHOICE_OPTIONS = 1024
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 262_144  # the largest vocabulary of any family
SHOWN_CHARACTERS = 80  # of a value in an error

Body = TypeVar("Body", bound=BaseModel)
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that this server does not honour: it passes only with a value that asks for nothing special."""

    values: tuple[Any, ...]  # that pass beside null
    of: str  # whose field it is
    because: str = "is not supported by this server yet"  # in the refusal


# A field of an endpoint's model is honoured there, even if it is listed here.
UNSUPPORTED: dict[str, UnsupportedField] = {
    "audio": UnsupportedField((), "OpenAI"),
    "chat_template": UnsupportedField((), "vLLM"),
    "detokenize": UnsupportedField((True,), "vLLM"),
    "early_stopping": UnsupportedField((False,), "vLLM"),
    "echo": UnsupportedField((False,), "vLLM, in chats"),
    "function_call": UnsupportedField(("none", "auto"), "OpenAI, the older form of tools"),
    "functions": UnsupportedField(([],), "OpenAI, the older form of tools"),
    "include_reasoning": UnsupportedField((True, False), "vLLM"),
    "kv_transfer_params": UnsupportedField(({},), "vLLM"),
    "length_penalty": UnsupportedField((1,), "vLLM, for beam search"),
    "logits_processors": UnsupportedField(([],), "vLLM"),
    "metadata": UnsupportedField(({},), "OpenAI, for stored answers"),
    "modalities": UnsupportedField((["text"],), "OpenAI"),
    "moderation": UnsupportedField((), "OpenAI"),
    "no_stop_trim": UnsupportedField((False,), "SGLang; vLLM's router adds it"),
    "nvext": UnsupportedField(({},), "Dynamo"),
    "parallel_tool_calls": UnsupportedField((True, False), "OpenAI"),
    "prediction": UnsupportedField((), "OpenAI"),
    "prompt_cache_options": UnsupportedField(({},), "OpenAI"),
    "prompt_cache_retention": UnsupportedField(("in_memory", "in-memory"), "OpenAI"),
    "prompt_embeds": UnsupportedField((), "vLLM"),
    "reasoning_effort": UnsupportedField(("none",), "OpenAI"),
    "return_hidden_states": UnsupportedField((False,), "SGLang; vLLM's router adds it"),
    "return_tokens_as_token_ids": UnsupportedField((False,), "vLLM"),
    "separate_reasoning": UnsupportedField((True,), "SGLang; vLLM's router adds it"),
    "service_tier": UnsupportedField(("auto", "default"), "OpenAI"),
    "spaces_between_special_tokens": UnsupportedField((True,), "vLLM"),
    "store": UnsupportedField((False,), "OpenAI"),
    "stream_reasoning": UnsupportedField((True,), "SGLang; vLLM's router adds it"),
    "suffix": UnsupportedField(("",), "OpenAI"),
    "thinking_token_budget": UnsupportedField((), "vLLM"),
    "tool_choice": UnsupportedField(("none", "auto"), "OpenAI"),
    "tools": UnsupportedField(([],), "OpenAI"),
    "truncate_prompt_tokens": UnsupportedField((), "vLLM"),
    "use_beam_search": UnsupportedField((False,), "vLLM"),
    "verbosity": UnsupportedField(("medium",), "OpenAI"),
    "vllm_xargs": UnsupportedField(({},), "vLLM"),
    "web_search_options": UnsupportedField((), "OpenAI"),
}


class Strict(BaseModel):
    """No unknown fields, no conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = UNSUPPORTED

    @property
    def tenant(self) -> str:
        """Who sent it, as the body says; empty where it has no such field."""
        return ""

    @property
    def served_model(self) -> str | None:
        """The served model that it names; None where it names none."""
        return getattr(self, "model", None)

    def refuse_contradictions(self) -> None:
        """Raises ApiError 400 for fields that are valid by themselves, but not together."""


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="one more chunk at the end, with the usage of the whole call")
    continuous_usage_stats: bool = Field(
        False, description="beside include_usage: the usage so far in every chunk, which tells the tokens of a chunk"
    )
    include_obfuscation: Literal[False] = Field(False, description="only false: no padding is sent")


# Each of them asks for a grammar that the output follows.
GRAMMAR_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip


class GenerationRequest(Strict):
    """What completions and chat completions share."""

    model: str = Field(description="name of the served model")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices for each prompt; they share the prompt's KV blocks")
    temperature: float = Field(1.0, ge=0, le=2, description="0, or anything below 0.00001, is greedy")
    top_p: float = Field(
        1.0, ge=0, le=1, description="draws from the smallest set of this much probability; 0 leaves the best one"
    )
    top_k: int = Field(0, ge=-1, lt=2**31, description="draws from the k most probable; 0 and -1 keep all")
    min_p: float = Field(0.0, ge=0, le=1, description="drops what is less probable than this share of the best")
    top_n_sigma: float = Field(
        0.0, ge=0, le=1000, description="drops logits this many standard deviations below the best; 0 keeps all"
    )
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="taken off a logit for each time it was drawn")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="taken off a logit once it was drawn")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, description="divides positive logits of tokens in prompt or output, multiplies negative"
    )
    lz_penalty: float = Field(0.0, ge=0, le=10, description="strength of the penalty on continuing a repetition")
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASED_TOKENS)] = (
        Field({}, description="token id, as a string → what is added to its logit")
    )
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] = Field(
        [], description="not written with the tokens that spell them, at a beginning or after a blank"
    )
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] = Field(
        [], description="the only ids that may be drawn; empty allows all"
    )
    min_tokens: int = Field(0, ge=0, lt=2**31, description="output tokens before anything may stop the output")
    stop: StopString | Annotated[list[StopString], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="strings that end the output; cut off, unless include_stop_str_in_output"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] = Field(
        [], description="ids that end the output, beside the model's own"
    )
    include_stop_str_in_output: bool = Field(False, description="what ended the output is part of it")
    skip_special_tokens: bool = Field(True, description="special tokens have no text")
    ignore_eos: bool = Field(False, description="the model's own end tokens do not end the output")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="the same seed draws the same tokens; choice i has its own from it"
    )
    stream: bool = Field(False, description="server-sent events, as the text becomes ready")
    stream_options: StreamOptions | None = Field(None, description="needs stream")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="log-probabilities of the prompt's tokens, as vLLM shows them"
    )
    response_format: dict[str, Any] | None = Field(
        None,
        description="text, json_object or json_schema: the output is valid, always, unless `length` or `stop` cut it",
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json (a schema), json_object, regex, choice and grammar (Lark), as vLLM has it"
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="vLLM's older name of structured_outputs.json")
    guided_regex: str | None = Field(None, description="... of structured_outputs.regex")
    guided_choice: Annotated[list[str], Field(max_length=MAX_CHOICE_OPTIONS, fail_fast=True)] | None = Field(
        None, description="... of structured_outputs.choice"
    )
    guided_grammar: str | None = Field(None, description="... of structured_outputs.grammar")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="lower goes first, where the policy asks")
    cache_salt: str = Field("", max_length=1000, description="calls with different salts share no cached prefix")
    user: str = Field("", max_length=1000, description="recorded as the tenant, by whom fair shares are counted")
    safety_identifier: str = Field("", max_length=1000, description="the newer name of user; user goes first")
    prompt_cache_key: str = Field(
        "", max_length=1000, description="a hint where to look for a cached prefix; there is one cache, which has all"
    )
    kv_transfer_params: KVTransferParams | None = Field(
        None, description="prefill and decode servers: hold the prompt's KV for another server, or read it from one"
    )
    return_token_ids: bool = Field(False, description="the ids of prompt and output beside the text, as vLLM has it")

    @property
    def tenant(self) -> str:
        return self.user or self.safety_identifier

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def choices(self) -> int:
        """Sequences that are computed for each prompt."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to each output token; None where log-probabilities are not wanted."""
        raise NotImplementedError

    def take_defaults(self, defaults: SamplingDefaults) -> None:
        """Fields that were not sent, or as null, get the checkpoint's value; a limit of the output is no field here."""
        for name in defaults.values.keys() - self.model_fields_set:
            setattr(self, name, defaults.values[name])

    @property
    def reasoning_budget(self) -> int | None:
        """Tokens of reasoning at most; None bounds nothing."""
        return None

    def refuse_contradictions(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "`stream_options` needs `stream`: true; leave it out", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "`prompt_logprobs` cannot be streamed; leave out `stream`")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = Field(description="a text, a list of token ids, or a list of up to 128 of either")
    max_tokens: int = Field(16, ge=0, description="output tokens at most; 0 only with echo")
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="draws this many and gives the n of best mean log-probability"
    )
    echo: bool = Field(False, description="the prompt stands before the output, with its logprobs if they are wanted")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="alternatives to each token")
    add_special_tokens: bool = Field(True, description="the tokenizer adds its own, such as a begin of text")

    def take_defaults(self, defaults: SamplingDefaults) -> None:
        super().take_defaults(defaults)
        if defaults.max_tokens is not None and "max_tokens" not in self.model_fields_set:
            self.max_tokens = min(self.max_tokens, defaults.max_tokens)

    @property
    def choices(self) -> int:
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        if self.max_tokens == 0 and not self.echo:
            message = "`max_tokens`=0 is not valid: it should be greater than or equal to 1, but with `echo`"
            raise invalid("max_tokens", message)
        if self.best_of is not None and self.best_of < self.n:
            message = f"`best_of`={self.best_of} is not valid: it should be at least `n`, {self.n}"
            raise invalid("best_of", message)
        if self.stream and self.choices > self.n:
            message = f"`best_of` above `n` cannot be streamed; leave out `stream`, or send {self.n}"
            raise invalid("best_of", message)


def parse(kind: type[Body], content: bytes) -> Body:
    """Checks the JSON of a body. Raises ApiError 400 that names the first bad field, its value and its bounds.

    The JSON is strict: no NaN, no half characters, no number that a double or 64 bits cannot hold. Of two equal keys
    the last counts. It has MAX_VALUES values at most: nothing stops a decoder that has begun.
    """
    if has_too_many_values(content):
        message = (
            f"the body has too many values; {MAX_VALUES:,} numbers or texts are the limit, and an object counts more"
        )
        raise ApiError(400, message, code="too_many_values")
    try:
        raw = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(raw).__name__}")
    check_shape(kind, raw, kind.unsupported)
    fields = {}
    for name, value in raw.items():
        if name in kind.unsupported and name not in kind.model_fields:
            _refuse_unless_passing(name, value, kind.unsupported[name])
        elif value is not None:
            fields[name] = value
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise refusal_of(error, {*kind.model_fields, *kind.unsupported}) from None
    body.refuse_contradictions()
    return body


def refusal_of(failure: ValidationError, known: Collection[str] = ()) -> ApiError:
    """Names the first bad field, its value and its bounds. `known` are the fields that its sender may have meant."""
    errors = failure.errors(include_url=False)
    field = errors[0]["loc"][0]
    # Each member of a union objects. The sender meant the member that objects to more than the type.
    error = max(
        (e for e in errors if e["loc"][0] == field), key=lambda e: (not e["type"].endswith("_type"), len(e["loc"]))
    )
    path = ".".join(part for part in map(str, error["loc"]) if part not in _UNION_BRANCHES and "[" not in part)
    if error["type"] == "extra_forbidden":
        return unknown_field(path, known)
    if error["type"] == "missing":
        return invalid(path, f"`{path}` is required", "missing_required_parameter")
    message = f"`{path}`={shorten(error['input'])} is not valid: {error['msg'][0].lower()}{error['msg'][1:]}"
    return invalid(str(field), message)


# Pydantic names the tried member of a union in the path; a client has no such field.
_UNION_BRANCHES = {
    "str", "constrained-str", "NamedChoice", "AllowedChoice", "ResponseToolChoice", "ResponseAllowedTools",
}  # fmt: skip


def trace_attributes(body: GenerationRequest, max_tokens: int | None) -> dict[str, Any]:
    """Attributes of a request's trace, by OpenTelemetry's GenAI conventions. No text of the prompt is among them."""
    attributes = {
        "gen_ai.operation.name": "text_completion" if isinstance(body, CompletionRequest) else "chat",
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.stop_sequences": body.stops or None,
        "gen_ai.request.stream": body.stream,
        "gen_ai.request.choice.count": body.choices,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _refuse_unless_passing(name: str, value: Any, field: UnsupportedField) -> None:
    """Raises ApiError 400 for a value that asks for something."""
    # In Python True == 1, and in JSON it is not.
    if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in field.values):
        return
    accepted = " or ".join(map(repr, field.values))
    way_out = f"leave it out, or send {accepted}" if accepted else "leave it out"
    message = f"`{name}` {field.because}, but was sent as {shorten(value)}; {way_out}"
    raise invalid(name, message, "unsupported_parameter")


def shorten(value: Any) -> str:
    """A value as an error shows it. Reads no more of the value than it shows, because bodies are long."""
    text = ""
    for part in _parts(value):
        text += part
        if len(text) > SHOWN_CHARACTERS:
            return f"{text[: SHOWN_CHARACTERS - 3]}..."
    return text


def _parts(value: Any) -> Iterator[str]:
    """Python's `repr` of what JSON can say, bit by bit."""
    if isinstance(value, dict):
        yield "{"
        for index, (name, inner) in enumerate(value.items()):
            yield f"{', ' if index else ''}{name[: SHOWN_CHARACTERS + 1]!r}: "
            yield from _parts(inner)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for index, inner in enumerate(value):
            yield ", " if index else ""
            yield from _parts(inner)
        yield "]"
    else:
        yield repr(value[: SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
