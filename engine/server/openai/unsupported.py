"""Fields that this server does not honour: they pass only with a value that asks for nothing special."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.server.errors import ApiError

SHOWN_CHARACTERS = 80  # of a value in an error


@dataclass(frozen=True, slots=True)
class Neutral:
    """What passes beside null, and whose field it is."""

    values: tuple[Any, ...]
    of: str
    because: str = ""  # said to whom it is refused


# A field that becomes one of an endpoint's model is honoured there, whatever stands here.
NEUTRAL: dict[str, Neutral] = {
    "audio": Neutral((), "OpenAI"),
    "chat_template": Neutral((), "vLLM"),
    "detokenize": Neutral((True,), "vLLM"),
    "early_stopping": Neutral((False,), "vLLM"),
    "echo": Neutral((False,), "vLLM, in chats"),
    "function_call": Neutral(("none", "auto"), "OpenAI, the older form of tools"),
    "functions": Neutral(([],), "OpenAI, the older form of tools"),
    "include_reasoning": Neutral((True, False), "vLLM"),
    "kv_transfer_params": Neutral(({},), "vLLM"),
    "length_penalty": Neutral((1,), "vLLM, for beam search"),
    "logits_processors": Neutral(([],), "vLLM"),
    "metadata": Neutral(({},), "OpenAI, for stored answers"),
    "modalities": Neutral((["text"],), "OpenAI"),
    "moderation": Neutral((), "OpenAI"),
    "nvext": Neutral(({},), "Dynamo"),
    "parallel_tool_calls": Neutral((True, False), "OpenAI"),
    "prediction": Neutral((), "OpenAI"),
    "prompt_cache_options": Neutral(({},), "OpenAI"),
    "prompt_cache_retention": Neutral(("in_memory", "in-memory"), "OpenAI"),
    "prompt_embeds": Neutral((), "vLLM"),
    "reasoning_effort": Neutral(("none",), "OpenAI"),
    "return_tokens_as_token_ids": Neutral((False,), "vLLM"),
    "service_tier": Neutral(("auto", "default"), "OpenAI"),
    "spaces_between_special_tokens": Neutral((True,), "vLLM"),
    "store": Neutral((False,), "OpenAI"),
    "suffix": Neutral(("",), "OpenAI"),
    "thinking_token_budget": Neutral((), "vLLM"),
    "tool_choice": Neutral(("none", "auto"), "OpenAI"),
    "tools": Neutral(([],), "OpenAI"),
    "truncate_prompt_tokens": Neutral((), "vLLM"),
    "use_beam_search": Neutral((False,), "vLLM"),
    "verbosity": Neutral(("medium",), "OpenAI"),
    "vllm_xargs": Neutral(({},), "vLLM"),
    "web_search_options": Neutral((), "OpenAI"),
}


def refuse_unless_neutral(name: str, value: Any, table: Mapping[str, Neutral] = NEUTRAL) -> None:
    """Raises ApiError 400 for a value that asks for something."""
    allowed = table[name].values
    if value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in allowed
    ):
        return
    accepted = " or ".join(repr(neutral) for neutral in allowed)
    way_out = f"leave it out, or send {accepted}" if allowed else "leave it out"
    because = table[name].because or "is not supported by this server yet"
    message = f"`{name}` {because}, but was sent as {shorten(value)}; {way_out}"
    raise ApiError(400, message, param=name, code="unsupported_parameter")


def shorten(value: Any) -> str:
    """A value as an error shows it; no more of it is looked at than that, because bodies are long."""
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
