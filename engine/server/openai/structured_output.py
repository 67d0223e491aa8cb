"""`response_format` and vLLM's fields for structured output → the grammar that the output must follow."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from sojourn.engine.sampling import Grammar
from sojourn.engine.server.body.strict import shorten
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.protocol import GRAMMAR_FIELDS, MAX_CHOICE_OPTIONS, GenerationRequest
from sojourn.engine.server.openai.reasoning import TurnPlan, behind_reasoning
from sojourn.engine.server.openai.tools import is_deeper

MAX_GRAMMAR_BYTES = 65_536
MAX_SCHEMA_DEPTH = 100  # objects and lists inside each other

_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
_OBJECT = '{"type": "object"}'


def output_grammar(
    body: GenerationRequest, plan: TurnPlan, added_tokens: Mapping[str, int]
) -> tuple[Grammar, str] | None:
    """The grammar that the fields and the tools of a checked body ask for, and the field; None where none does.

    Raises ApiError 400. `GrammarChecks` finds out whether the grammar can be compiled.
    """
    wanted = _wanted_grammar(body)
    tools = plan.tools
    if tools is not None:
        if wanted is not None and wanted[0].kind != "json_schema":
            message = f"`{wanted[1]}` that is no JSON schema cannot be combined with `tools`; send `tool_choice`: none"
            raise invalid(wanted[1], message)
        if wanted is not None and not tools.forced:
            wanted = (tools.beside(wanted[0].source), wanted[1])
        elif tools.grammar is not None:  # a forced call leaves no answer that a schema could shape
            wanted = (tools.grammar, "tools")
    wanted = behind_reasoning(wanted, plan, body.reasoning_budget, added_tokens)
    if wanted is None:
        return None
    for other, value in (("ignore_eos", body.ignore_eos), ("stop_token_ids", body.stop_token_ids)):
        if value:
            message = f"`{other}` cannot be combined with `{wanted[1]}`, whose grammar says where the output ends"
            raise invalid(other, f"{message}; leave it out")
    return wanted


def _wanted_grammar(body: GenerationRequest) -> tuple[Grammar, str] | None:
    found: list[tuple[Grammar, str]] = []
    for param in GRAMMAR_FIELDS:
        if (value := getattr(body, param)) is None:
            continue
        if param == "response_format":
            grammar = _of_response_format(value)
        elif param == "structured_outputs":
            grammar = _of_structured_outputs(value)
        else:
            grammar = _grammar(param.removeprefix("guided_"), value, param)
        if grammar is not None:
            found.append((grammar, param))
    if len(found) > 1:
        names = " and ".join(f"`{param}`" for _, param in found)
        raise invalid(found[1][1], f"{names} cannot be combined; send one of them")
    return found[0] if found else None


def _of_response_format(wanted: dict[str, Any]) -> Grammar | None:
    param = "response_format"
    kind = wanted.get("type")
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        message = f"`response_format.type`={shorten(kind)} is not valid; it can be text, json_object or json_schema"
        raise invalid(param, message)
    _refuse_unknown(wanted, allowed, param)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", _OBJECT)
    described = wanted.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise invalid(param, "`response_format.json_schema` must be an object with a `name` and an object as `schema`")
    _refuse_unknown(described, {"name", "description", "schema", "strict"}, "response_format.json_schema")
    name, strict = described.get("name"), described.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"`response_format.json_schema.name`={shorten(name)} must be 1 to 64 letters, digits, _ or -"
        raise invalid(param, message)
    if strict is not None and not isinstance(strict, bool):  # false asks for less than what is done anyway
        raise invalid(param, f"`response_format.json_schema.strict`={shorten(strict)} must be true or false")
    return _grammar("json", described["schema"], param)


def _of_structured_outputs(wanted: dict[str, Any]) -> Grammar:
    param = "structured_outputs"
    _refuse_unknown(wanted, {"json", "json_object", "regex", "choice", "grammar"}, param)
    constraints = {kind: value for kind, value in wanted.items() if value is not None and value is not False}
    if len(constraints) != 1:
        message = "`structured_outputs` must have exactly one of json, json_object, regex, choice and grammar"
        raise invalid(param, message)
    ((kind, value),) = constraints.items()
    return _grammar(kind, value, param)


def _grammar(kind: str, value: Any, param: str) -> Grammar:
    if kind == "json_object":
        if value is not True:
            raise invalid(param, f"`{param}.json_object`={shorten(value)} must be true or false")
        return Grammar("json_schema", _OBJECT)
    if kind == "choice":
        if (
            not isinstance(value, list)
            or not 0 < len(value) <= MAX_CHOICE_OPTIONS
            or not all(isinstance(v, str) for v in value)
        ):
            raise invalid(param, f"the choice in `{param}` must be a list of 1 to {MAX_CHOICE_OPTIONS:,} texts")
        grammar = choice(value)
        _bound(grammar.source, param)
        return grammar
    if kind == "json":
        schema = _schema(value, param)
        source = _bound(msgspec.json.encode(schema).decode(), param)
        if is_deeper(schema, MAX_SCHEMA_DEPTH):
            message = f"the schema in `{param}` is more than {MAX_SCHEMA_DEPTH} objects and lists deep; make it simpler"
            raise invalid(param, message)
        return Grammar("json_schema", source)
    if not isinstance(value, str):
        raise invalid(param, f"the {kind} in `{param}` must be a text, not {type(value).__name__}")
    return Grammar("lark" if kind == "grammar" else kind, _bound(value, param))


def choice(options: list[str]) -> Grammar:
    """The grammar of one of some texts."""
    return Grammar("lark", "start: " + " | ".join(json.dumps(option) for option in options))


def _schema(value: Any, param: str) -> dict[str, Any]:
    """Of an object, or of its JSON."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(_bound(value, param))
        except (msgspec.DecodeError, RecursionError):
            raise invalid(param, f"the schema in `{param}` is a text that is not valid JSON") from None
    if not isinstance(value, dict):
        raise invalid(param, f"the schema in `{param}` must be an object, not {type(value).__name__}")
    return value


def _bound(source: str, param: str) -> str:
    size = len(source.encode())
    if size > MAX_GRAMMAR_BYTES:
        message = f"`{param}` is {size:,} bytes of grammar, but {MAX_GRAMMAR_BYTES:,} are the limit; make it simpler"
        raise invalid(param, message)
    return source


def _refuse_unknown(wanted: dict[str, Any], allowed: set[str], param: str) -> None:
    unknown = next((name for name, value in wanted.items() if name not in allowed and value is not None), None)
    if unknown is not None:
        message = f"`{param}.{unknown[:80]}` is not a field that this server knows; leave it out"
        raise invalid(param.partition(".")[0], message, "unknown_parameter")
