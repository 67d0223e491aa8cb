"""`response_format` and vLLM's fields for structured output → the grammar that the output must follow."""

import re
from typing import Any

import msgspec

from engine.sampling import Grammar
from engine.server.errors import ApiError
from engine.server.openai.protocol import GenerationRequest
from engine.server.openai.unsupported import shorten
from engine.token.grammar.grammar import choice

MAX_GRAMMAR_BYTES = 65_536
MAX_SCHEMA_DEPTH = 100  # objects and lists inside each other
MAX_CHOICE_OPTIONS = 1024

_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
_OBJECT = '{"type": "object"}'
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def wanted_grammar(body: GenerationRequest) -> tuple[Grammar, str] | None:
    """The grammar that a checked body asks for, and the field that does; None where it asks for none.

    Raises ApiError 400. That a grammar is none, or too much, is found out by `GrammarChecks`.
    """
    found: list[tuple[Grammar, str]] = []
    if body.response_format is not None and (grammar := _of_response_format(body.response_format)) is not None:
        found.append((grammar, "response_format"))
    if body.structured_outputs is not None:
        found.append((_of_structured_outputs(body.structured_outputs), "structured_outputs"))
    for param, kind in _GUIDED.items():
        if (value := getattr(body, param)) is not None:
            found.append((_grammar(kind, value, param), param))
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(f"`{param}`" for _, param in found)
        raise _refusal(found[1][1], f"{names} cannot be combined; send one of them")
    return found[0]


def refuse_other_ends(body: GenerationRequest, param: str) -> None:
    """Raises ApiError 400 for controls that end an output where its grammar does not."""
    for other, wanted in (("ignore_eos", body.ignore_eos), ("stop_token_ids", body.stop_token_ids)):
        if wanted:
            message = f"`{other}` cannot be combined with `{param}`, whose grammar says where the output ends"
            raise _refusal(other, f"{message}; leave it out")


def _of_response_format(wanted: dict[str, Any]) -> Grammar | None:
    param = "response_format"
    kind = wanted.get("type")
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        message = f"`response_format.type`={shorten(kind)} is not valid; it can be text, json_object or json_schema"
        raise _refusal(param, message)
    _refuse_unknown(wanted, allowed, param)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", _OBJECT)
    described = wanted.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise _refusal(param, "`response_format.json_schema` must be an object with a `name` and an object as `schema`")
    _refuse_unknown(described, {"name", "description", "schema", "strict"}, "response_format.json_schema")
    name, strict = described.get("name"), described.get("strict")
    if not _is_text(name) or not _NAME.fullmatch(name):
        message = f"`response_format.json_schema.name`={shorten(name)} must be 1 to 64 letters, digits, _ or -"
        raise _refusal(param, message)
    if strict is not None and not isinstance(strict, bool):  # false asks for less than what is done anyway
        raise _refusal(param, f"`response_format.json_schema.strict`={shorten(strict)} must be true or false")
    return _grammar("json", described["schema"], param)


def _of_structured_outputs(wanted: dict[str, Any]) -> Grammar:
    param = "structured_outputs"
    _refuse_unknown(wanted, {"json", "json_object", "regex", "choice", "grammar"}, param)
    asked = {kind: value for kind, value in wanted.items() if value is not None and value is not False}
    if len(asked) != 1:
        message = "`structured_outputs` must have exactly one of json, json_object, regex, choice and grammar"
        raise _refusal(param, message)
    ((kind, value),) = asked.items()
    return _grammar(kind, value, param)


def _grammar(kind: str, value: Any, param: str) -> Grammar:
    if kind == "json_object":
        if value is not True:
            raise _refusal(param, f"`{param}.json_object`={shorten(value)} must be true or false")
        return Grammar("json_schema", _OBJECT)
    if kind == "choice":
        if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICE_OPTIONS or not all(map(_is_text, value)):
            raise _refusal(param, f"the choice in `{param}` must be a list of 1 to {MAX_CHOICE_OPTIONS:,} texts")
        grammar = choice(value)
        _bounded(grammar.source, param)
        return grammar
    if kind == "json":
        schema = _schema(value, param)
        if _is_deeper(schema, MAX_SCHEMA_DEPTH):
            message = f"the schema in `{param}` is more than {MAX_SCHEMA_DEPTH} objects and lists deep; make it simpler"
            raise _refusal(param, message)
        return Grammar("json_schema", _bounded(msgspec.json.encode(schema).decode(), param))
    if not _is_text(value):
        raise _refusal(param, f"the {kind} in `{param}` must be a text, not {type(value).__name__}")
    return Grammar("lark" if kind == "grammar" else kind, _bounded(value, param))


def _schema(value: Any, param: str) -> dict[str, Any]:
    """Of an object, or of its JSON."""
    if _is_text(value):
        try:
            value = msgspec.json.decode(_bounded(value, param))
        except (msgspec.DecodeError, RecursionError):
            raise _refusal(param, f"the schema in `{param}` is a text that is not valid JSON") from None
    if not isinstance(value, dict):
        raise _refusal(param, f"the schema in `{param}` must be an object, not {type(value).__name__}")
    return value


def _bounded(source: str, param: str) -> str:
    size = len(source.encode())
    if size > MAX_GRAMMAR_BYTES:
        message = f"`{param}` is {size:,} bytes of grammar, but {MAX_GRAMMAR_BYTES:,} are the limit; make it simpler"
        raise _refusal(param, message)
    return source


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(value, (dict, list)) for value in level)


def _refuse_unknown(wanted: dict[str, Any], allowed: set[str], param: str) -> None:
    unknown = next((name for name, value in wanted.items() if name not in allowed and value is not None), None)
    if unknown is not None:
        message = f"`{param}.{unknown[:80]}` is not a field that this server knows; leave it out"
        raise _refusal(param.partition(".")[0], message, "unknown_parameter")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _refusal(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)
