"""Fields that this server does not honour: they pass only with a value that asks for nothing special."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.server.errors import ApiError


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
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
