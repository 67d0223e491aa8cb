"""The objects of a body against its models, before pydantic: that collects every fault, and bodies are long."""

import difflib
import types
import typing
from collections.abc import Collection, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from annotated_types import MaxLen
from pydantic import BaseModel

from sojourn.engine.server.errors import ApiError, invalid

MAX_OBJECTS = 25_000  # of a body: messages, their parts and calls, tools. Checking them takes 4 µs each
MAX_FIELDS = 128  # of one object, those that are null included
SHOWN_CHARACTERS = 80  # of a name


class Shape(NamedTuple):
    """What a value of a body may be, as far as it is made of objects."""

    known: frozenset[str] = frozenset()  # fields of the models that may stand here; none: an object of any names
    fields: Mapping[str, "Shape"] = MappingProxyType({})  # those whose values have a shape
    item: "Shape | None" = None  # of a list, if its items have one
    most: int | None = None  # entries of an object of any names


def check_shape(kind: type[BaseModel], raw: dict[str, Any], also_known: Collection[str] = ()) -> None:
    """Raises ApiError 400 for the first field that no model knows, and for more objects than a body may have.

    `also_known` are fields of `raw` itself.
    """
    shape = shape_of(kind)
    _check(shape._replace(known=shape.known.union(also_known)), raw, (), [MAX_OBJECTS])


@cache
def shape_of(kind: type[BaseModel]) -> Shape:
    shapes = {name: _shape(field.annotation, field.metadata) for name, field in kind.model_fields.items()}
    names = {field.alias or name for name, field in kind.model_fields.items()}
    return Shape(frozenset(names), {name: shape for name, shape in shapes.items() if shape != Shape()})


def unknown_field(path: str, known: Collection[str]) -> ApiError:
    """The refusal of a field; `known` are those that its sender may have meant."""
    path = path[:SHOWN_CHARACTERS]
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    way_out = f"did you mean `{close[0]}`?" if close else "leave it out"
    return invalid(path, f"`{path}` is not a field that this server knows; {way_out}", "unknown_parameter")


def _check(shape: Shape, value: Any, path: tuple[str | int, ...], left: list[int]) -> None:
    if isinstance(value, list) and shape.item is not None:
        for index, item in enumerate(value):
            _check(shape.item, item, (*path, index), left)
    elif isinstance(value, dict) and shape.known:
        left[0] -= 1
        if left[0] < 0:
            message = f"the body has more than {MAX_OBJECTS:,} messages, parts, calls and tools; send fewer"
            raise invalid(str(path[0]), message)
        for name, inner in value.items():
            if name in shape.fields:
                _check(shape.fields[name], inner, (*path, name), left)
            elif name not in shape.known and inner not in (None, [], {}):
                raise unknown_field(".".join(map(str, (*path, name))), shape.known)
        if len(value) > MAX_FIELDS:
            where = f"`{'.'.join(map(str, path))}`" if path else "the body"
            message = f"{where} has {len(value):,} fields, but an object may have {MAX_FIELDS}; leave some out"
            raise ApiError(400, message, param=str(path[0]) if path else None)
    elif isinstance(value, dict) and shape.most is not None and len(value) > shape.most:
        name = str(path[0])
        raise invalid(name, f"`{name}` has {len(value)} entries, but may have {shape.most}; send fewer")


def _shape(annotation: Any, metadata: Collection[Any]) -> Shape:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _shape(arguments[0], [*metadata, *_constraints(annotation.__metadata__)])
    if origin in (typing.Union, types.UnionType):
        return _merge([_shape(member, metadata) for member in arguments])
    if origin is list:
        item = _shape(arguments[0], ())
        return Shape() if item == Shape() else Shape(item=item)
    if origin is dict:
        return Shape(most=next((limit.max_length for limit in metadata if isinstance(limit, MaxLen)), None))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return shape_of(annotation)
    return Shape()


def _constraints(metadata: Collection[Any]) -> list[Any]:
    """Those inside of pydantic's Field, too."""
    return [inner for outer in metadata for inner in (outer, *getattr(outer, "metadata", ()))]


def _merge(shapes: list[Shape]) -> Shape:
    """Of a union: what any member knows."""
    fields: dict[str, Shape] = {}
    for shape in shapes:
        for name, inner in shape.fields.items():
            fields[name] = _merge([fields[name], inner]) if name in fields else inner
    return Shape(
        frozenset().union(*(shape.known for shape in shapes)),
        fields,
        next((shape.item for shape in shapes if shape.item is not None), None),
        next((shape.most for shape in shapes if shape.most is not None), None),
    )
