"""Functions that a client offers to the model: their fields, and how prompt, grammar and output carry them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from sojourn.engine.sampling import Grammar
from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.errors import invalid
from sojourn.engine.token.text.template import ChatTemplate
from sojourn.engine.token.tools.calls import FORMATS, ToolFormat
from sojourn.engine.token.tools.grammar import Tool, call_grammar

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


class AsSent(Strict):
    """An object that also stores what the client sent, with its order and its nulls."""

    _sent: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _store(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        checked = handler(value)
        checked._sent = value
        return checked


class ChatTool(AsSent):
    type: Literal["function"]
    function: FunctionTool

    @property
    def template_value(self) -> dict[str, Any]:
        """As the client sent it: a template may write all of it into the prompt."""
        return self._sent


class FunctionName(Strict):
    name: Name


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"] = Field(description="auto: the model may call one of them; required: it must")
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)] = Field(
        description="which of `tools`; the model is still shown all"
    )


class AllowedChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How the prompt, the grammar and the output of a call carry its tools."""

    format: ToolFormat
    names: frozenset[str]
    template_value: list[dict[str, Any]]  # as chat templates read them
    forced: bool  # no answer but a call
    grammar: Grammar | None
    beside: Callable[[str | None], Grammar]  # the grammar of calls, or of an answer with this JSON schema, or any
    shown_token_ids: frozenset[int]  # special tokens that mark calls: the text must show them


def plan_tools(
    tools: list[ChatTool],
    choice: ToolChoice | None,
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
    functions = [tool.function for tool in tools]
    _check(functions)
    allowed = _allowed_names(functions, choice)
    if choice == "none":
        return None
    form = _format(template, tool_format)
    callable_tools = [function for function in functions if function.name in allowed]
    is_named = isinstance(choice, NamedChoice)
    forced = is_named or choice == "required"
    if isinstance(choice, AllowedChoice):
        forced = choice.allowed_tools.mode == "required"
    described = [Tool(tool.name, _parameters(tool), bool(tool.strict)) for tool in callable_tools]
    # A named function is called once, as the official API does.
    grammar_of = partial(call_grammar, form, described, added_tokens, parallel=parallel and not is_named)
    constrained = (
        forced or not parallel or isinstance(choice, AllowedChoice) or any(tool.strict for tool in callable_tools)
    )
    return ToolPlan(
        format=form,
        names=frozenset(tool.name for tool in callable_tools),
        template_value=[tool.template_value for tool in tools],
        forced=forced,
        grammar=grammar_of(forced=forced) if constrained else None,
        beside=lambda schema: grammar_of(forced=False, answer=schema),
        shown_token_ids=frozenset(form.tokens(added_tokens).values()),
    )


def _allowed_names(tools: list[FunctionTool], choice: ToolChoice | None) -> set[str]:
    """Of the functions that the choice leaves to the model. Raises ApiError 400 for one that is not offered."""
    offered = {tool.name for tool in tools}
    if isinstance(choice, NamedChoice):
        allowed = {choice.function.name}
    elif isinstance(choice, AllowedChoice):
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
    else:
        return offered
    if unknown := sorted(allowed - offered):
        message = f"`tool_choice` names {unknown[0]!r}, which is none of the `tools`; offer it there"
        raise invalid("tool_choice", message)
    return allowed


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


def is_deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` objects and lists are nested. Looks no deeper than that."""
    level = [value]
    for _ in range(limit + 1):
        level = [v for v in level if isinstance(v, dict | list)]
        if not level:
            return False
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return True
