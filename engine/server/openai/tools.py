"""Functions that a client offers to the model: their fields, and how prompt, grammar and output carry them."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from engine.sampling import Grammar
from engine.server.core.sequence import TextPiece
from engine.server.errors import invalid
from engine.server.openai.protocol import Strict
from engine.token.text.template import ChatTemplate
from engine.token.tools.calls import FORMATS, CallDelta, ContentDelta, Delta, ToolCallParser, ToolFormat
from engine.token.tools.grammar import Tool, call_grammar

MAX_TOOLS = 128
MAX_TOOL_BYTES = 262_144  # of all tools together, as JSON
MAX_SCHEMA_DEPTH = 32

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class FunctionTool(Strict):
    """A function that the model may call."""

    name: Name = Field(description="letters, digits, _ and -, up to 64")
    description: str | None = Field(None, description="shown to the model")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object; none means no arguments")
    strict: bool | None = Field(None, description="calls always match the schema, also where the model chooses freely")


class ChatTool(Strict):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(Strict):
    name: Name


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How the prompt, the grammar and the output of a call carry its tools."""

    format: ToolFormat
    names: frozenset[str]
    template_value: list[dict[str, Any]]  # as chat templates read them
    forced: bool  # no answer but a call
    grammar: Grammar | None
    beside: Callable[[str], Grammar]  # the grammar of calls, or of an answer with this JSON schema
    shown_token_ids: frozenset[int]  # special tokens that mark calls: the text must show them


@dataclass(slots=True)
class ToolCall:
    """A call, as far as the model has written it."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class AssistantTurn:
    """Grows with the pieces of one sequence. Without a plan all of it is content."""

    def __init__(self, plan: ToolPlan | None):
        self.calls: list[ToolCall] = []
        self._plan = plan
        self._parser = ToolCallParser(plan.format, plan.names) if plan is not None else None
        self._content: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    def add(self, piece: TextPiece) -> list[Delta]:
        """What the piece adds, in order."""
        if self._parser is None:
            deltas = [ContentDelta(piece.text)] if piece.text else []
        else:
            deltas = self._parser.push(piece.text)
            if piece.finish_reason is not None:
                deltas += self._parser.finish()
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            else:
                self._grow(delta)
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason as the API says it: a model that stops after a call has stopped for the call."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _grow(self, delta: CallDelta) -> None:
        if delta.name is not None:
            # Mistral's templates take back nothing but nine letters and digits.
            short = self._plan.format.opener == "[TOOL_CALLS]"
            self.calls.append(ToolCall(uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}", delta.name))
        self.calls[delta.index].parts.append(delta.arguments)


def plan_tools(
    tools: list[FunctionTool],
    choice: Literal["none", "auto", "required"] | FunctionName | None,
    *,
    parallel: bool,
    template: ChatTemplate,
    tool_format: str | None,
    added_tokens: Mapping[str, int],
) -> ToolPlan | None:
    """The plan for checked fields; None where the model may call nothing, and so is shown no function.

    `tool_format` overrides what the template shows. Raises ApiError 400 with `param`.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "`tool_choice` wants a call, but there are no `tools`; send some")
        return None
    _check(tools)
    named = choice.name if isinstance(choice, FunctionName) else None
    if named is not None and named not in {tool.name for tool in tools}:
        raise invalid("tool_choice", f"`tool_choice` names {named!r}, which is none of the `tools`; offer it there")
    if choice == "none":
        return None
    form = _format(template, tool_format)
    callable_tools = [tool for tool in tools if named in (None, tool.name)]
    forced = named is not None or choice == "required"
    described = [Tool(tool.name, _parameters(tool), bool(tool.strict)) for tool in callable_tools]
    # A named function is called once, as the official API does.
    grammar_of = partial(call_grammar, form, described, added_tokens, parallel=parallel and named is None)
    constrained = forced or not parallel or any(tool.strict for tool in tools)
    return ToolPlan(
        format=form,
        names=frozenset(tool.name for tool in callable_tools),
        template_value=[_template_value(tool) for tool in tools],
        forced=forced,
        grammar=grammar_of(forced=forced) if constrained else None,
        beside=lambda schema: grammar_of(forced=False, answer=schema),
        shown_token_ids=frozenset(form.tokens(added_tokens).values()),
    )


def _check(tools: list[FunctionTool]) -> None:
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid("tools", f"`tools` has {twice!r} more than once; give each function a name of its own")
    size = sum(len(msgspec.json.encode(tool.parameters)) + len((tool.description or "").encode()) for tool in tools)
    if size > MAX_TOOL_BYTES:
        raise invalid("tools", f"`tools` are {size:,} bytes of JSON, but {MAX_TOOL_BYTES:,} are the limit; send fewer")
    for index, tool in enumerate(tools):
        where = f"`tools[{index}].function.parameters`"
        kind = (tool.parameters or {}).get("type", "object")
        if kind != "object":
            raise invalid("tools", f"{where} must be the schema of an object, but has the type {str(kind)[:80]!r}")
        if is_deeper(tool.parameters, MAX_SCHEMA_DEPTH):
            raise invalid("tools", f"{where} is nested deeper than {MAX_SCHEMA_DEPTH}; make the schema flatter")


def _format(template: ChatTemplate, tool_format: str | None) -> ToolFormat:
    if not template.knows_tools:
        message = (
            "this model's chat template knows no tools; leave out `tools`, or serve a model that was trained on them"
        )
        raise invalid("tools", message)
    form = template.tool_format if tool_format is None else FORMATS[tool_format]
    if form is None:
        known = ", ".join(FORMATS)
        message = f"this model's chat template shows calls in no format that this server reads ({known})"
        raise invalid("tools", f"{message}; leave out `tools`, or start the server with the right `tool_format`")
    return form


def _parameters(tool: FunctionTool) -> dict[str, Any]:
    return {"properties": {}, "additionalProperties": False} if tool.parameters is None else tool.parameters


def _template_value(tool: FunctionTool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def is_deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` objects and lists are nested. Looks no deeper than that."""
    level = [value]
    for _ in range(limit + 1):
        level = [v for v in level if isinstance(v, dict | list)]
        if not level:
            return False
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return True
