"""The tables of docs/api.md, from the models that check requests.

`python -m sojourn.engine.server.api_reference` renews them.

The prose around them is written by hand. A table stands between `<!-- fields: NAME -->` and `<!-- end -->`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sojourn.engine.server.anthropic.content_blocks import TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock
from sojourn.engine.server.anthropic.messages_request import CountTokensRequest
from sojourn.engine.server.app import ENDPOINTS
from sojourn.engine.server.body.strict import UnsupportedField
from sojourn.engine.server.endpoints.debug import ProfileRequest
from sojourn.engine.server.openai.messages import TemplateFields
from sojourn.engine.server.openai.protocol import GenerationRequest
from sojourn.engine.server.openai.responses_request import ResponsesRequest
from sojourn.engine.techniques import load

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
# Their fields have one table, for all bodies that take them.
SHARED = (GenerationRequest, TemplateFields, CountTokensRequest)
BLOCKS = (TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock)  # in the lists of a message
BODIES = {f"POST {path}": endpoint.body for path, endpoint in ENDPOINTS.items()}
BODIES["POST /debug/profile"] = ProfileRequest
BODIES |= load("lora", "served").BODIES
_TABLE = re.compile(r"(<!-- (fields|unsupported): (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def tables() -> dict[str, str]:
    """Name of a model → its table, of every model that a request can hold."""
    found: dict[str, str] = {}
    for model in (*SHARED, *BODIES.values(), *BLOCKS):
        schema = model.model_json_schema()
        for name, inner in schema.pop("$defs", {}).items():
            found[name] = _table(inner, set())
        bases = [base for base in SHARED if base is not model and issubclass(model, base)]
        shared = {name for base in bases for name in base.model_fields if not _declares(model, base, name)}
        found[model.__name__] = _table(schema, shared)
    return found


def unsupported_tables() -> dict[str, Mapping[str, UnsupportedField]]:
    """Name of a model → the fields that pass with some values only. Completions and chats share one table."""
    return {model.__name__: model.unsupported for model in (GenerationRequest, ResponsesRequest, CountTokensRequest)}


def renew_tables(document: str) -> str:
    """The document with current tables. Raises KeyError for a table of no model."""
    fields, unsupported = tables(), unsupported_tables()

    def renew(found: re.Match) -> str:
        begin, kind, name, _, end = found.groups()
        return begin + (fields[name] if kind == "fields" else _unsupported_table(unsupported[name])) + end

    return _TABLE.sub(renew, document)


def _table(schema: dict[str, Any], left_out: set[str]) -> str:
    lines = ["| field | type | default | bounds | meaning |", "|---|---|---|---|---|"]
    for name, field in schema.get("properties", {}).items():
        if name not in left_out:
            default = "required" if name in schema.get("required", ()) else _value(field.get("default"))
            cells = (f"`{name}`", _type(field), default, ", ".join(_bounds(field)), field.get("description", ""))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _unsupported_table(table: Mapping[str, UnsupportedField]) -> str:
    lines = ["| field | of | passes with null, or |", "|---|---|---|"]
    for name, unsupported in sorted(table.items()):
        values = ", ".join(_value(value) for value in unsupported.values) or "–"
        lines.append(f"| `{name}` | {unsupported.of} | {values} |")
    return "\n".join(lines) + "\n"


def _declares(model: type[BaseModel], base: type[BaseModel], name: str) -> bool:
    """Whether the model has a field of its own in place of its base's."""
    nearer = model.__mro__[: model.__mro__.index(base)]
    return any(name in vars(kind).get("__annotations__", {}) for kind in nearer)


def _value(value: Any) -> str:
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def _type(schema: dict[str, Any]) -> str:
    """What a value may be, null apart."""
    if "anyOf" in schema or "oneOf" in schema:
        members = [_type(member) for member in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(member for member in members if member != "null"))
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        return " or ".join(_value(value) for value in schema.get("enum") or [schema["const"]])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return kind


def _bounds(schema: dict[str, Any]) -> list[str]:
    """Of a value and of its members."""
    bounds = [f"{sign} {_number(schema[key])}" for key, sign in _SIGNS.items() if key in schema]
    for short, noun in (("Length", "characters"), ("Items", "items"), ("Properties", "entries")):
        least, most = schema.get(f"min{short}"), schema.get(f"max{short}")
        if most is not None:
            bounds.append(f"{least or 0:,} to {most:,} {noun}")
        elif least is not None:
            bounds.append(f"at least {least:,} {noun}")
    if "pattern" in schema:
        bounds.append(f"`{schema['pattern']}`")
    inner_schemas = [*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")]
    for inner in inner_schemas:
        if isinstance(inner, dict):
            bounds += [bound for bound in _bounds(inner) if bound not in bounds]
    return bounds


def _number(value: float) -> str:
    """2^31 instead of ten digits."""
    if value and value == int(value) and abs(value) >= 2**31 and abs(int(value)).bit_count() == 1:
        return f"{'-' if value < 0 else ''}2^{abs(int(value)).bit_length() - 1}"
    return f"{value:g}" if abs(value) < 1e6 else f"{value:,}"


if __name__ == "__main__":
    DOCUMENT.write_text(renew_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
