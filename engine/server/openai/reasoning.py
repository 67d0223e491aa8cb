"""Fields about reasoning → the template's variables, and the grammar that lets the model reason before it answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sojourn.engine.sampling import Grammar
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.tools import ToolPlan
from sojourn.engine.token.text.reasoning import Reasoning
from sojourn.engine.token.text.template import ChatTemplate

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn reasoning on and off
_ANYTHING = Grammar("lark", "start: /(?s:.*)/")


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """How the output of a call is read: as calls of tools, behind reasoning, or as plain text where both are None."""

    tools: ToolPlan | None = None
    reasoning: Reasoning | None = None

    def shown_token_ids(self, added_tokens: Mapping[str, int]) -> frozenset[int]:
        """Special tokens that mark reasoning or calls: the text must show them."""
        shown = self.tools.shown_token_ids if self.tools is not None else frozenset()
        if self.reasoning is not None:
            shown |= set(self.reasoning.format.tokens(added_tokens).values())
        return shown


PLAIN = TurnPlan()


def effort_variables(effort: Effort | None, template: ChatTemplate, *, reasons: bool) -> dict[str, Any]:
    """The template's variables for this effort. Raises ApiError 400 where the template cannot say it.

    `reasons`: the model has a format of reasoning.
    """
    if effort is None:
        return {}
    if effort != "none":
        if "reasoning_effort" in template.variables:
            return {"reasoning_effort": effort}
        message = f"`reasoning_effort`={effort!r} is not supported: this model's chat template reads no such variable"
        raise invalid("reasoning_effort", f"{message}; leave it out, or send 'none'", "unsupported_parameter")
    if switched := switch_variables(template, on=False):
        return switched
    if reasons:
        message = "`reasoning_effort`='none' is not supported: this model's chat template cannot turn reasoning off"
        raise invalid("reasoning_effort", f"{message}; leave it out", "unsupported_parameter")
    return {}


def variables_to_set(asked: dict[str, Any], template: ChatTemplate, *, reasons: bool) -> dict[str, Any]:
    """What a request sets, without a switch that turns off what the model does not do: clients send it to all."""
    if reasons:
        return asked
    known = template.variables
    return {name: v for name, v in asked.items() if name in known or name not in _SWITCHES or v is not False}


def switch_variables(template: ChatTemplate, *, on: bool) -> dict[str, Any]:
    """The variable that turns reasoning on or off; none where the template reads none."""
    return next(({name: on} for name in _SWITCHES if name in template.variables), {})


def behind_reasoning(
    wanted: tuple[Grammar, str] | None, plan: TurnPlan, budget: int | None, added_tokens: Mapping[str, int]
) -> tuple[Grammar, str] | None:
    """The grammar of an output that may reason first, in at most `budget` tokens, and the field that asks for it.

    Raises ApiError 400 for a budget that cannot be kept.
    """
    reasoning = plan.reasoning
    if reasoning is None or (wanted is None and budget is None):
        return wanted
    if budget is not None and reasoning.format.closer not in added_tokens:
        message = f"`thinking_token_budget` needs {reasoning.format.closer!r} as one token, and this model has none"
        raise invalid("thinking_token_budget", f"{message}; leave it out", "unsupported_parameter")
    if wanted is None:
        wanted = (_ANYTHING if plan.tools is None else plan.tools.beside(None), "thinking_token_budget")
    grammar, param = wanted
    return msgspec.structs.replace(grammar, head=reasoning.grammar_head(added_tokens, budget)), param
