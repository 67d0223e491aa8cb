"""One JSON document of a reply, a whole one or of an event: its error, its texts, how its choices end, its usage.

The shapes are those that servers and gateways write: docs/load_generator.md has the table.
"""

import json
from collections.abc import Iterator
from typing import Any

from sojourn.metrics.errors import ServerError

MAX_ERROR_CHARACTERS = 300
LARGEST_COUNT = 2**63 - 1  # what a column of the tables holds
MESSAGES = ("message", "detail", "error_message", "error_msg", "err_msg", "errmsg", "msg", "reason", "title")
CODES = ("error_code", "err_code", "errcode", "code", "status", "status_code", "statusCode")
# A finish reason with one of these in it says that generation failed: abort, error, cancelled, internal_error,
# insufficient_system_resource, timeout, malformed_function_call …
FAILED = (
    "abort", "error", "cancel", "fail", "timeout", "timed_out", "insufficient", "unavailable", "overload",
    "disconnect", "interrupt", "malformed", "exception", "shutdown", "preempt", "unknown",
)  # fmt: skip
# Parts of a message in the order in which a model writes them. Of several names of one part the first counts.
REASONING = ("reasoning_content", "reasoning", "reasoning_text", "thinking", "thinking_content")
ANSWER = ("content", "text", "refusal")


class ReplyFault(ServerError):
    """A reply that does not follow OpenAI's API, with a sentence that says where."""


def parse(document: str | bytes) -> Any:
    """The value of a JSON document. Raises ValueError where it is none, or nested deeper than Python reads."""
    try:
        return json.loads(document)
    except RecursionError:
        raise ValueError("nested too deep") from None


def failure(content: dict[str, Any]) -> str:
    """The server's words where the document is, or holds, an error; "" where it is none."""
    found = content.get("error") or content.get("errors")
    if found:
        return message(found, content)
    if content.get("object") == "error" or content.get("type") == "error" or _is_failure(content.get("error_code")):
        return message(content)
    for choice in entries(content, "choices"):
        if found := choice.get("error"):
            return message(found)
        if reason := failed_reason(choice):
            return reason
    if content.get("choices") is None and any(
        isinstance(content.get(name), str | list) and content[name] for name in MESSAGES
    ):
        return message(content)
    return f"code {code}" if (code := _http_code(content)) and content.get("choices") is None else ""


def failed_reason(choice: dict[str, Any]) -> str:
    """A sentence where the choice's finish reason says that generation failed. SGLang's may be an object."""
    reason = choice.get("finish_reason")
    said = ""
    if isinstance(reason, dict):
        reason, said = reason.get("type"), str(reason.get("message") or "")
    if not isinstance(reason, str) or not any(word in reason.lower() for word in FAILED):
        return ""
    return f"finish_reason is {reason!r}{f': {said}' if said else ''}"[:MAX_ERROR_CHARACTERS]


def finishes(choice: dict[str, Any]) -> bool:
    return bool(choice.get("finish_reason"))


def message(error: Any, beside: dict[str, Any] | None = None) -> str:
    """The message within an error of any shape: an object's message, a list's first one, or the value itself."""
    if isinstance(error, list) and error:
        return message(error[0])
    if isinstance(error, dict):
        inner = next((error[name] for name in (*MESSAGES, "error") if error.get(name)), None)
        return message(inner) if inner is not None else str(error)[:MAX_ERROR_CHARACTERS]
    if error is True or isinstance(error, int | float):  # `"error": 500` has its words beside it
        said = next((beside[name] for name in MESSAGES if beside.get(name)), None) if beside else None
        return message(said) if said is not None else f"error {error}"
    return str(error)[:MAX_ERROR_CHARACTERS]


def texts(choice: dict[str, Any]) -> Iterator[str]:
    """What a choice adds: reasoning first, text, names and arguments of tools, a transcript; nothing for a role."""
    written = part(choice, "delta", dict) or part(choice, "message", dict) or choice
    yield _first_text(written, REASONING) or _reasoning_details(written)
    for name in ANSWER:
        yield _text(written, name)
    for call in entries(written, "tool_calls"):
        for called in (part(call, "function", dict), part(call, "custom", dict)):
            yield part(called, "name", str) + part(called, "arguments", str) + part(called, "input", str)
    called = part(written, "function_call", dict)
    yield part(called, "name", str) + part(called, "arguments", str)
    audio = part(written, "audio", dict)
    yield part(audio, "transcript", str) or part(audio, "data", str)


def _reasoning_details(written: dict[str, Any]) -> str:
    """Of OpenRouter's list: its texts, summaries, or data that only the provider can read."""
    details = entries(written, "reasoning_details")
    return "".join(_first_text(each, ("text", "summary", "data")) for each in details)


def _first_text(block: dict[str, Any], names: tuple[str, ...]) -> str:
    return next((text for name in names if (text := _text(block, name))), "")


def _text(block: dict[str, Any], name: str) -> str:
    """A text, or the texts of a list of parts, as Mistral's `content` with parts of `thinking` and `text`."""
    value = block.get(name)
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return "".join(_first_text(each, ("text", "thinking", "reasoning", "refusal")) for each in value)
    if isinstance(value, dict) and name in REASONING:
        return _first_text(value, ("content", "text"))
    return part(block, name, str)


def part(block: dict[str, Any], key: str, kind: type) -> Any:
    """A value of a JSON object; an empty one where it is absent or null. Raises ReplyFault if it is something else."""
    value = block.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ReplyFault(f"`{key}` of the reply is {shown(value)}, but should be {_KINDS[kind]}")
    return value


def entries(block: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = part(block, key, list)
    for entry in found:
        if not isinstance(entry, dict):
            raise ReplyFault(f"`{key}` of the reply has the entry {shown(entry)}, but should have objects")
    return found


def count(usage: dict[str, Any], *keys: str) -> int | None:
    """A number of tokens under the first of these names; None where the server tells none."""
    key = next((name for name in keys if usage.get(name) is not None), None)
    if key is None:
        return None
    value = usage[key]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise ReplyFault(f"`usage.{key}` of the reply is {shown(value)}, but should be a number of tokens")
    return value


def shown(value: Any) -> str:
    return repr(value)[:MAX_ERROR_CHARACTERS]


def _is_failure(code: Any) -> bool:
    return code not in (None, 0, "", "0", False)


def _http_code(content: dict[str, Any]) -> int | None:
    """An HTTP status of failure that a document without choices has in one of its fields."""
    values = (content.get(name) for name in CODES)
    return next((value for value in values if type(value) is int and 400 <= value < 600), None)


_KINDS = {dict: "an object", list: "a list", str: "text"}
