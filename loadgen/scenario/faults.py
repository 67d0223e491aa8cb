"""Faults of a scenario file as sentences: the field, its value, the bound and the way out."""

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from sojourn.loadgen.errors import nearest

_BOUNDS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}: letters, digits and _ . -",
    "literal_error": "must be one of {expected}",
    "finite_number": "must be a finite number",
    "string_type": "must be text; put it in quotes",
    "list_type": "must be a list",
    **dict.fromkeys(("int_from_float", "int_type", "int_parsing"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be a block of keys"),
}


class KeyTwiceError(yaml.MarkedYAMLError):
    """A duplicate key in one block: YAML would silently take the last."""


class UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise KeyTwiceError(problem=key.value, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """Where the file stops being YAML, and why."""
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    if isinstance(error, KeyTwiceError):
        return f"{place}`{error.problem}` stands twice in this block; keep one"
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{place}not YAML: {problem}; check the indentation and the quotes there"


def describe_faults(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One sentence for each fault that pydantic found in a document of type `root`."""
    faults = error.errors(include_url=False)
    missing: dict[tuple, list[str]] = {}
    for fault in faults:
        if fault["type"] == "missing":
            missing.setdefault(fault["loc"][:-1], []).append(str(fault["loc"][-1]))
    descriptions = [_describe(fault, root, missing.get(fault["loc"][:-1], [])) for fault in faults]
    return list(dict.fromkeys(line for sentences in descriptions for line in sentences.splitlines()))


def _describe(fault: dict[str, Any], root: type[BaseModel], missing: list[str]) -> str:
    """`missing`: the absent required keys of the fault's block."""
    path, block = _walk(fault["loc"], root)
    kind, value, context = fault["type"], fault.get("input"), fault.get("ctx", {})
    if kind == "missing":
        field = block.model_fields.get(str(fault["loc"][-1])) if block else None
        return f"`{path}` is missing; add it{f': {field.description}' if field and field.description else ''}"
    if kind == "extra_forbidden":
        return f"`{path}` is no known key{_suggestion(str(fault['loc'][-1]), block, missing)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = context["discriminator"].strip("'")
        expected = context.get("expected_tags") or _tags(block, fault["loc"][-1], tag)
        if kind == "union_tag_not_found":
            return f"`{path}.{tag}` is missing; it must be one of {expected}"
        return f"`{path}.{tag}` is {context['tag']!r}; it must be one of {expected}"
    if kind == "value_error":
        return f"`{path}` {context['error']}" if path else str(context["error"])
    bound = _BOUNDS[kind].format(**context) if kind in _BOUNDS else fault["msg"]
    return f"`{path}` is {_shown(value)}; it {bound}"


def _suggestion(key: str, block: type[BaseModel] | None, missing: list[str]) -> str:
    """A guess for an unknown key: a similar one, else the missing one; without a guess all keys, required ones
    first."""
    fields = block.model_fields if block else {}
    if guess := nearest(key, list(fields)):
        return guess
    if len(missing) == 1:
        return f"; did you mean `{missing[0]}`, which is missing?"
    return f"; known here: {', '.join(sorted(fields, key=lambda name: not fields[name].is_required()))}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tags(block: type[BaseModel] | None, key: Any, discriminator: str) -> str:
    """The choices of a union, for the message of an absent tag (pydantic does not name them there)."""
    field = block.model_fields.get(str(key)) if block else None
    members = _models(field.annotation) if field else []
    return ", ".join(f"'{get_args(member.model_fields[discriminator].annotation)[0]}'" for member in members)


def _walk(loc: tuple[Any, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """The path as in the file (without pydantic's names of union members) and the block of the key."""
    path, options, block = "", [root], root
    for step in loc:
        tagged = [model for model in options if _tag_of(model) == step]
        if tagged and len(options) > 1:
            options = tagged
            continue
        owners = [model for model in options if isinstance(step, str) and step in model.model_fields]
        block = (owners or options or [None])[0]
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
        if isinstance(step, str):
            options = _models(owners[0].model_fields[step].annotation) if owners else []
    return path, block


def _tag_of(model: type[BaseModel]) -> str | None:
    for name in ("process", "distribution"):
        if name in model.model_fields:
            return get_args(model.model_fields[name].annotation)[0]
    return None


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (list, Annotated, Union, UnionType):
        return [model for member in get_args(annotation) for model in _models(member)]
    return []
