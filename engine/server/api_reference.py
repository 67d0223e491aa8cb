"""The tables of docs/api.md, from the models that check requests.

`python -m sojourn.engine.server.api_reference` renews them.

The prose around them is written by hand. A table stands between `<!-- fields: NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Mapping, Sequence
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
from sojourn.metrics.field_table import as_table, field_rows, value_text

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
# Their fields have one table, for all bodies that take them.
SHARED = (GenerationRequest, TemplateFields, CountTokensRequest)
BLOCKS = (TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock)  # in the lists of a message
BODIES = {f"POST {path}": endpoint.body for path, endpoint in ENDPOINTS.items()}
BODIES["POST /debug/profile"] = ProfileRequest
BODIES |= load("lora", "served").BODIES
_TABLE = re.compile(r"(<!-- (fields|unsupported): (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


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
    return as_table([row for row in field_rows(schema, _link) if row.name not in left_out])


def _link(names: Sequence[str]) -> str:
    return " or ".join(f"[{name}](#{name.lower()})" for name in names)


def _unsupported_table(table: Mapping[str, UnsupportedField]) -> str:
    lines = ["| field | of | passes with null, or |", "|---|---|---|"]
    for name, unsupported in sorted(table.items()):
        values = ", ".join(value_text(value) for value in unsupported.values) or "–"
        lines.append(f"| `{name}` | {unsupported.of} | {values} |")
    return "\n".join(lines) + "\n"


def _declares(model: type[BaseModel], base: type[BaseModel], name: str) -> bool:
    """Whether the model has a field of its own in place of its base's."""
    nearer = model.__mro__[: model.__mro__.index(base)]
    return any(name in vars(kind).get("__annotations__", {}) for kind in nearer)


if __name__ == "__main__":
    DOCUMENT.write_text(renew_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
