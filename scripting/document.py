"""docs/json.md, written from the documents' types: `python -m sojourn.scripting.document > docs/json.md`."""

import inspect
import re
import types
import typing
from typing import Any

import msgspec

from sojourn.scripting.documents import DOCUMENTS

HEAD = """# JSON documents

This page answers: which fields can a script rely on?

`python -m sojourn.scripting.document` writes this page from the code. A test compares the two.

Each document names its schema in the field `schema`, as `sojourn.NAME/VERSION`. Within a version fields are only added.
A field that is removed, or that changes its meaning, raises the version. Ignore fields that you do not know.

Numbers that do not exist are null. Times that end with `_ns` are nanoseconds, latencies that end with `_ms` are
milliseconds, and shares are between 0 and 1. `sojourn.scripting.documents.json_schema(NAME)` gives the JSON Schema.

A document says what it rests on, and what it cannot say: `evidence`, `source` and `basis` name tables and columns;
`unknown`, `warnings`, `unsafe`, `doubts`, `reason` and the verdicts "cannot tell" and "inconclusive" are abstentions.
"""
_FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$")


def page() -> str:
    parts = [HEAD]
    described: set[type] = set()
    for name, (kind, writers) in DOCUMENTS.items():
        parts.append(f"\n## {name}\n\n{_doc(kind)}\nWritten by {writers}.\n\n{_table(kind)}")
        described.add(kind)
    pending = [kind for kind, _ in DOCUMENTS.values()]
    inner: list[type] = []
    while pending:
        for found in _structs(pending.pop(0)):
            if found not in described:
                described.add(found)
                inner.append(found)
                pending.append(found)
    parts.append("\n## Objects in them\n")
    parts += [f"\n### {kind.__name__}\n\n{_doc(kind)}\n{_table(kind)}" for kind in inner]
    return "".join(parts)


def _doc(kind: type) -> str:
    return inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0] + "\n"


def _table(kind: type) -> str:
    comments = _comments(kind)
    rows = [
        f"| `{field.name}` | {_type(field.type)} | {comments.get(field.name, '')} |"
        for field in msgspec.structs.fields(kind)
    ]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows]) + "\n"


def _comments(kind: type) -> dict[str, str]:
    """The comment behind each field, or the lines of comment right above it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
        elif match := _FIELD.match(line):
            text = match[2] or " ".join(above)
            found[match[1]] = text.replace("|", "\\|").removeprefix("... ")
            above = []
        else:
            above = []
    return found


def _structs(kind: Any) -> list[type]:
    """The structs that the fields of a struct hold, in their order."""
    hints = typing.get_type_hints(kind)
    return [found for name in kind.__struct_fields__ for found in _inside(hints[name])]


def _inside(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [found for each in typing.get_args(annotation) for found in _inside(each)]


def _type(annotation: Any) -> str:
    """In the words of JSON."""
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(each) for each in members)
    if origin is typing.Literal:
        return ", ".join(f'"{each}"' for each in members)
    if origin in (list, tuple) or "Sequence" in str(origin):
        return f"list of {_type(members[0])}"
    if origin is dict or "Mapping" in str(origin):
        return f"object of {_type(members[1])}"
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    named = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any"}
    return named.get(annotation, "any")


if __name__ == "__main__":
    print(page(), end="")
