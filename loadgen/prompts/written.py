"""The prompts of a scenario or a trace as they would be sent, for whoever reads them and sends nothing."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sojourn.loadgen.prompts.bodies import PromptWriter
from sojourn.loadgen.prompts.build import Prompt, PromptSource
from sojourn.loadgen.prompts.exact_words import Encoder
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.loadgen.traces.row import TraceRow


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """A text, or the messages of a chat. In a session the answers are left out: nobody knows them before the run."""

    klass: str
    content: str | list[dict[str, Any]]


def prompts_of_scenario(scenario: Scenario, seed: int, encoder: Encoder | None, most: int) -> list[WrittenPrompt]:
    """The first `most` prompts behind the prelude. Raises ScenarioError."""
    writer = PromptWriter(scenario, PromptSource(seed, encoder))
    histories: dict[str, list[dict[str, Any]]] = {}
    written: list[WrittenPrompt] = []
    for request in build_schedule(scenario, seed, "lint"):
        if len(written) == most:
            break
        if request.prelude:
            writer.skip(request)
            continue
        messages = _messages(writer.prompt(request), scenario.target.api == "chat")
        if request.session_id:
            messages = histories[request.session_id] = [*_history(histories, request), *messages]
        written.append(WrittenPrompt(request.klass, _content(messages, scenario.target.api == "chat")))
    return written


def prompts_of_trace(rows: Iterable[TraceRow], most: int) -> Iterator[WrittenPrompt]:
    """The recorded texts of a trace; rows without one are left out."""
    for number, row in enumerate(row for row in rows if row.content):
        if number == most:
            return
        yield WrittenPrompt(row.klass, json.loads(row.content))


def _history(histories: dict[str, list[dict[str, Any]]], request: ScheduledRequest) -> list[dict[str, Any]]:
    return histories.get(request.session_id, []) if request.turn else []


def _messages(prompt: Prompt | list[dict[str, Any]], is_chat: bool) -> list[dict[str, Any]]:
    if isinstance(prompt, list):
        return prompt
    if not is_chat:
        return [{"role": "user", "content": prompt.text}]
    system = [{"role": "system", "content": prompt.prefix}] if prompt.prefix else []
    return [*system, {"role": "user", "content": prompt.body}]


def _content(messages: list[dict[str, Any]], is_chat: bool) -> str | list[dict[str, Any]]:
    return messages if is_chat else " ".join(message["content"] for message in messages)
