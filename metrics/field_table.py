"""Tables of fields for the documents: a row per field of a JSON schema, as pydantic writes it."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

# A bound of an optional field stands under pydantic's own name.
_SIGNS = {
    "minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<",
    "ge": "≥", "gt": ">", "le": "≤", "lt": "<",
}  # fmt: skip
_SIZES = (("Length", "character", "characters"), ("Items", "item", "items"), ("Properties", "entry", "entries"))
_MADE = {"object": {}, "array": []}  # what a field's factory makes, which the schema does not say

Link = Callable[[Sequence[str]], str]  # names of models, one of which a field holds → text with a link


class FieldRow(NamedTuple):
    name: str
    type: str
    default: str
    bounds: str
    meaning: str


def field_rows(schema: dict[str, Any], link: Link) -> Iterator[FieldRow]:
    for name, field in schema.get("properties", {}).items():
        unset = field.get("default", _MADE.get(field.get("type")))
        default = "required" if name in schema.get("required", ()) else value_text(unset)
        yield FieldRow(name, _type(field, link), default, ", ".join(_bounds(field)), field.get("description", ""))


def as_table(rows: Sequence[FieldRow]) -> str:
    lines = ["| field | type | default | bounds | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{row.name}` | {' | '.join(row[1:])} |" for row in rows]
    return "\n".join(lines) + "\n"


def value_text(value: Any) -> str:
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def _type(schema: dict[str, Any], link: Link) -> str:
    """What a value may be, null apart."""
    if "discriminator" in schema:
        return link([_name(member) for member in schema["oneOf"]])
    if "anyOf" in schema or "oneOf" in schema:
        members = [_type(member, link) for member in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(member for member in members if member != "null"))
    if "$ref" in schema:
        return link([_name(schema)])
    if "const" in schema or "enum" in schema:
        return " or ".join(value_text(value) for value in schema.get("enum") or [schema["const"]])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), link)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'], link)}"
    return kind


def _name(reference: dict[str, Any]) -> str:
    return reference["$ref"].rsplit("/", 1)[1]


def _bounds(schema: dict[str, Any]) -> list[str]:
    """Of a value and of its members."""
    bounds = [f"{sign} {_number(schema[key])}" for key, sign in _SIGNS.items() if key in schema]
    for short, noun, nouns in _SIZES:
        least, most = schema.get(f"min{short}"), schema.get(f"max{short}")
        if most is not None:
            bounds.append(f"{least or 0:,} to {most:,} {nouns}")
        elif least is not None:
            bounds.append(f"at least {least:,} {noun if least == 1 else nouns}")
    if "pattern" in schema:
        bounds.append(f"`{schema['pattern']}`")
    inner_schemas = [*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")]
    for inner in inner_schemas:
        if isinstance(inner, dict):
            bounds += [bound for bound in _bounds(inner) if bound not in bounds]
    return bounds


def _number(value: float) -> str:
    """2^31 instead of ten digits."""
    if value != int(value):
        return f"{value:g}"
    if abs(value) >= 2**31 and abs(int(value)).bit_count() == 1:
        return f"{'-' if value < 0 else ''}2^{abs(int(value)).bit_length() - 1}"
    return f"{int(value):,}"
