"""What every body has in common: each field is honoured, or refused with its name; nothing is accepted and ignored."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from sojourn.engine.server.body.json_values import MAX_VALUES, has_too_many_values
from sojourn.engine.server.body.shape import check_shape, unknown_field
from sojourn.engine.server.errors import ApiError, invalid

SHOWN_CHARACTERS = 80  # of a value in an error

Body = TypeVar("Body", bound=BaseModel)


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
