"""JSON schemas inside one schema: each keeps the meaning that it has alone, its references included."""

from typing import Any

# Keywords whose value is data, and those whose values are schemas under names of the user's own.
_DATA = {"const", "enum", "default", "examples", "example"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
_REFERENCES = {"$ref", "$dynamicRef", "$recursiveRef"}


def any_of(parts: dict[str, Any], place: str = "$defs") -> dict[str, Any]:
    """The schema of what one of the parts allows. Each part stands whole under its name, where its references lead."""
    inside = {name: _moved(part, f"#/{place}/{name}", _id_of(part)) for name, part in parts.items()}
    return {"anyOf": [{"$ref": f"#/{place}/{name}"} for name in inside], place: inside}


def _id_of(schema: Any) -> str:
    return schema["$id"].removesuffix("#") if isinstance(schema, dict) and isinstance(schema.get("$id"), str) else ""


def _moved(schema: Any, root: str, own_id: str, *, is_root: bool = True) -> Any:
    """The schema with references to its root, `#` or its own `$id`, that lead to `root`."""
    if isinstance(schema, list):
        return [_moved(each, root, own_id, is_root=False) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if not is_root and isinstance(schema.get("$id"), str):
        return schema  # a document of its own
    moved = {}
    for key, value in schema.items():
        if key in _REFERENCES and isinstance(value, str):
            moved[key] = _reference(value, root, own_id)
        elif key in _NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(each, root, own_id, is_root=False) for name, each in value.items()}
        elif not (is_root and key in ("$id", "$schema")):
            moved[key] = value if key in _DATA else _moved(value, root, own_id, is_root=False)
    return moved


def _reference(value: str, root: str, own_id: str) -> str:
    if value.startswith(own_id + "#"):
        value = value.removeprefix(own_id)
    if value == "#" or value.startswith("#/"):
        return root + value[1:]
    return root if own_id and value == own_id else value
