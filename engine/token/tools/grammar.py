"""The grammar, in llguidance's Lark, of an output that calls tools in a model's own format."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sojourn.engine.sampling import Grammar
from sojourn.engine.token.tools.calls import ToolFormat
from sojourn.engine.token.tools.schemas import any_of

# As json.dumps writes it, which is how templates show schemas and calls to a model.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. Its `parameters` are the schema of an object."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False  # else keywords of the schema that the grammar does not know are let pass


def call_grammar(
    tool_format: ToolFormat,
    tools: list[Tool],
    added_tokens: Mapping[str, int],
    *,
    forced: bool,
    parallel: bool,
    answer: str | None = None,
) -> Grammar:
    """Calls of these tools, with arguments after their schemas.

    `forced` wants at least one; else text may stand before them or instead of them. `parallel` allows several.
    `answer` is the JSON schema of a text that stands instead of calls; then no text stands before them, and a format
    that marks calls by nothing allows one.
    `added_tokens` are the literals that the tokenizer writes as one id.
    """
    return Grammar("lark", _Rules(tool_format, tools, added_tokens).source(forced, parallel, answer))


class _Rules:
    """One grammar's text while it is put together."""

    def __init__(self, tool_format: ToolFormat, tools: list[Tool], added_tokens: Mapping[str, int]):
        self._format = tool_format
        self._tools = tools
        self._added = tool_format.tokens(added_tokens)

    def source(self, forced: bool, parallel: bool, answer: str | None) -> str:
        body = " | ".join(f"body{index}" for index in range(len(self._tools)))
        if answer is None:
            start = self._start(forced)
        elif self._format.bare:  # two kinds of object are told apart inside one schema only
            return self._answer_or_call(json.loads(answer))
        else:
            opening = self._literals(self._format.section + self._format.opener)
            start = [f"start: answer | {opening} calls", f"answer: {_json_rule(json.loads(answer))}"]
        rules = [*start, f"calls: {self._calls(parallel)}", f"body: {body}"]
        for index, tool in enumerate(self._tools):
            rules += [f"body{index}: {self._before_arguments(tool)} arguments{index}{self._after_arguments()}"]
            rules += [f"arguments{index}: {_json_rule(_schema(tool), strict=tool.strict)}"]
        return "\n".join(rules) + "\n"

    def _start(self, forced: bool) -> list[str]:
        """What leads to the calls: what opens them, or text that ends there."""
        if self._format.bare:  # what begins as a call does must be one
            text = r"TEXT: /(\s*[^{\s](?s:.*))?/"
            return ["start: calls"] if forced else ["start: TEXT | calls", text]
        opening = self._literals(self._format.section + self._format.opener)
        if forced:
            return [f"start: {opening} calls"]
        first, _, rest = opening.partition(" ") if opening.startswith("<[") else (opening, "", "")
        text = "TEXT: /(?s:.*)/"
        if first.startswith("<["):  # text cannot hold the token itself
            return [f"start: TEXT | TEXT {first} {rest} calls", text]
        return ["start: TEXT | head calls", f"head[lazy]: TEXT {first}", text]

    def _answer_or_call(self, answer: Any) -> str:
        key = self._format.arguments_key
        parts = {"answer": answer} | {f"tool{index}": _schema(tool) for index, tool in enumerate(self._tools)}
        whole = any_of(parts)
        whole["anyOf"][1:] = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, key: reference},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for tool, reference in zip(self._tools, whole["anyOf"][1:], strict=True)
        ]
        return f"start: {_json_rule(whole)}\n"

    def _calls(self, parallel: bool) -> str:
        """One or several calls, after what opens the first."""
        written = self._format
        if written.form == "list":
            first, again, end = '"[" body', '", " body', '"]"'
        elif written.bare:
            first, again, end = "body", '"; " body', ""
        else:
            closing = self._literals(written.before_closer + written.closer)
            first = f"body {closing}"
            again = f"{self._literals(written.separator + written.opener)} {first}"
            end = self._literals(written.between[-1]) if written.section else ""
        return f"{first} {f'({again})*' if parallel else ''} {end}"

    def _before_arguments(self, tool: Tool) -> str:
        if self._format.form == "named":
            return self._literals(self._format.header_text.format(name=tool.name))
        blank = "\n" if self._format.form == "object" and not self._format.bare else ""
        return self._literals(f'{blank}{{"name": "{tool.name}", "{self._format.arguments_key}": ')

    def _after_arguments(self) -> str:
        return "" if self._format.form == "named" else ' "}"'

    def _literals(self, text: str) -> str:
        """A text as strings and tokens: what the tokenizer has as one token is never spelled out."""
        if not text:
            return ""
        known = sorted((name for name in self._added if name in text), key=len, reverse=True)
        if not known:
            return _quoted(text)
        parts = re.split("(" + "|".join(map(re.escape, known)) + ")", text)
        return " ".join(f"<[{self._added[part]}]>" if part in self._added else _quoted(part) for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(tool: Tool) -> dict[str, Any]:
    return {**tool.parameters, "type": "object"}


def _json_rule(schema: dict[str, Any], *, strict: bool = True) -> str:
    options = _SPACING if strict else _SPACING | {"lenient": True}
    return "%json " + json.dumps({**schema, "x-guidance": options})
