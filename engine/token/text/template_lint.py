"""Chat templates that defeat a prefix cache. Each is rendered twice with one thing changed; where do the texts part?

What a template writes depends on what it is given: the checks find what these messages, tools and times show.
"""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sojourn.engine.token.text.template import ChatTemplate, TemplateError
from sojourn.metrics.memory.prompt_lint.finding import HIGH, MEDIUM, Finding, Severity

_SYSTEM = "You answer questions about the sea in short sentences. " * 8
_USER, _OTHER_USER = "How deep is the harbour?", "Which fish live there?"
_ANSWER = "Twelve metres at low tide."
_NOW = datetime(2026, 11, 23, 10, 20, 30)
_STEPS = (("second", timedelta(seconds=1)), ("minute", timedelta(minutes=1)), ("day", timedelta(days=1)))


def lint_template(folder: Path) -> list[Finding]:
    """Worst first. Nothing is said of a model without a template. Raises ModelError for one that cannot be used."""
    template = ChatTemplate(folder, clock=lambda: _NOW)
    if not template.exists:
        return []
    checks = (_time(folder), _system_last(template), _tools_first(template), _history(template))
    found = [finding for finding in checks if finding is not None]
    return sorted(found, key=lambda finding: ("high", "medium", "low").index(finding.severity))


def _time(folder: Path) -> Finding | None:
    for unit, step in _STEPS:
        first, later = (_rendered(ChatTemplate(folder, clock=lambda now=now: now), _chat(_USER))
                        for now in (_NOW, _NOW + step))  # fmt: skip
        if first is not None and later is not None and first != later:
            same = _same(first, later)
            lost = 1 - same / len(first)
            says = f"the template writes the time, which changes each {unit}, at character {same:,} of {len(first):,}: "
            return _finding(
                "high" if lost >= HIGH else "medium", "template_time", f"{says}nothing behind it is shared any longer",
                "write it at the end of the system prompt, or let the client send it with the last message", lost,
            )  # fmt: skip
    return None


def _system_last(template: ChatTemplate) -> Finding | None:
    """Of two chats with one system prompt, what stands before the end of that prompt must not differ."""
    first, second = (_rendered(template, _chat(user)) for user in (_USER, _OTHER_USER))
    if first is None or second is None or _SYSTEM.strip() not in first:
        return None
    same, end = _same(first, second), first.index(_SYSTEM.strip()) + len(_SYSTEM.strip())
    if same >= end:
        return None
    return _finding(
        "high", "template_system", f"the user's message stands before the system prompt, at character {same:,}: chats "
        "with one system prompt share nothing of it", "write the system prompt first", 1 - same / end,
    )  # fmt: skip


def _tools_first(template: ChatTemplate) -> Finding | None:
    if not template.knows_tools:
        return None
    first, other = (_rendered(template, _chat(_USER), tools=[_tool(name)]) for name in ("depth", "weather"))
    if first is None or other is None or _SYSTEM.strip() not in first:
        return None
    same, end = _same(first, other), first.index(_SYSTEM.strip()) + len(_SYSTEM.strip())
    if same >= end:
        return None
    return _finding(
        "medium", "template_tools", f"the tools stand before the system prompt, at character {same:,}: chats with "
        "other tools, or the same in another order, share nothing of the system prompt",
        "write the tools behind the system prompt; send the same tools in the same order in all requests",
        1 - same / end,
    )  # fmt: skip


def _history(template: ChatTemplate) -> Finding | None:
    """A later turn of a conversation must begin with the earlier one, as it was sent."""
    turns = [*_chat(_USER), {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _OTHER_USER}]
    first, later = _rendered(template, _chat(_USER)), _rendered(template, turns)
    if first is None or later is None or later.startswith(first):
        return None
    same = _same(first, later)
    share = 1 - same / len(first)
    severity: Severity = "high" if share >= HIGH else "medium" if share >= MEDIUM else "low"
    return _finding(
        severity, "template_history", f"a later turn writes the earlier ones differently from character {same:,} of "
        f"{len(first):,}: {first[same : same + 40]!r} becomes {later[same : same + 40]!r}",
        "write each message the same whatever follows it", share,
    )  # fmt: skip


def _finding(severity: Severity, key: str, says: str, fix: str, share: float) -> Finding:
    return Finding(severity=severity, key=key, subject="chat template", says=says, fix=fix, share=share)


def _chat(user: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": user}]


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": parameters}}


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """None where the template refuses these messages, such as a system prompt."""
    try:
        return template.render(messages, **options)
    except TemplateError:
        return None


def _same(one: str, other: str) -> int:
    """Characters with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
