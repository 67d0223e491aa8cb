"""Sessions of agents from OpenTelemetry spans with `gen_ai.*` attributes: OTLP as JSON, or a list of plain spans.

A call to a model is a request. It follows the earlier calls whose answer stands in its messages; where no answer does,
it follows the calls that had ended when it began. Of those only the last ones count: a call that follows B, which
follows A, need not name A. So a call with several answers in its messages waits for all of them (fan-in).

Spans without messages tell the order by their times alone: calls that happened not to overlap seem to wait for each
other.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sojourn.interop.imported.otlp_file import SpanData, read_spans
from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.traces.plain import estimated_tokens
from sojourn.loadgen.traces.row import Head, Tally, TraceForm, TraceRow, Window, files_of
from sojourn.metrics.errors import InputError

CALLS = ("chat", "text_completion", "generate_content")  # operations; others are of agents and tools
PROMPT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
MESSAGES = ("gen_ai.input.messages", "gen_ai.prompt")
ANSWERS = ("gen_ai.output.messages", "gen_ai.output.text", "gen_ai.completion")
OTHER, EMPTY = "spans that call no model", "calls whose prompt has no recorded length and no text"


def _recognises(head: Head) -> bool:
    return bool({"spans", "resourceSpans"} & (head.first_object or {}).keys())


def _rows(path: Path, _window: Window, tally: Tally) -> Iterator[TraceRow]:
    for file in files_of(path):
        try:
            spans = read_spans(file)
        except InputError as error:
            raise ScenarioError(str(error)) from None
        calls: dict[str, list[_Call]] = {}
        for span in sorted(spans, key=lambda span: (span.begin_ns, span.end_ns)):
            if not _is_call(span):
                tally[OTHER] += 1
            elif (call := _Call(span)).prompt_tokens:
                calls.setdefault(call.session, []).append(call)
            else:
                tally[EMPTY] += 1
        for name, session in calls.items():
            yield from _session(f"{file.stem}.{name}" if path.is_dir() else name, session)


def _is_call(span: SpanData) -> bool:
    told = span.attributes
    operation = told.get("gen_ai.operation.name")
    return operation in CALLS or (operation is None and any(name in told for name in (*PROMPT_TOKENS, *MESSAGES)))


class _Call:
    """What one span says of its call."""

    def __init__(self, span: SpanData):
        told = span.attributes
        self.span = span
        self.session = str(told.get("gen_ai.conversation.id") or span.trace_id or "one")
        self.agent = str(told.get("gen_ai.agent.id") or told.get("gen_ai.agent.name") or "")
        self.messages = _messages(_first(told, MESSAGES))
        self.seen = "\n".join(_text(message) for message in self.messages)
        self.answer = "\n".join(filter(None, map(_text, _messages(_first(told, ANSWERS))))).strip()
        self.prompt_tokens = _count(told, PROMPT_TOKENS) or (estimated_tokens(self.seen) if self.seen.strip() else 0)
        most = told.get("gen_ai.request.max_tokens")
        known = _count(told, OUTPUT_TOKENS) or (estimated_tokens(self.answer) if self.answer else None)
        self.output_tokens = known or (int(most) if isinstance(most, int | float) and most >= 1 else None)

    @property
    def content(self) -> str:
        plain = [{"role": message.get("role") or "user", "content": _text(message)} for message in self.messages]
        return json.dumps(plain, ensure_ascii=False) if any(each["content"] for each in plain) else ""


def _session(name: str, calls: Sequence[_Call]) -> Iterator[TraceRow]:
    """`calls` in order of their begin."""
    begin_ns = calls[0].span.begin_ns
    earlier: list[set[int]] = []  # of each call: all that end before it, by their order of dependence
    for place, call in enumerate(calls):
        done = [each for each in range(place) if calls[each].span.end_ns <= call.span.begin_ns]
        named = [each for each in done if calls[each].answer and calls[each].answer in call.seen]
        after = _last_of(named or done, earlier)
        earlier.append({*after}.union(*(earlier[each] for each in after)))
        free_ns = max((calls[each].span.end_ns for each in after), default=begin_ns)
        yield TraceRow(
            call.span.begin_ns / 1e9, call.prompt_tokens, call.output_tokens, session_id=name,
            content=call.content, place=place, after=tuple(after), pause_s=(call.span.begin_ns - free_ns) / 1e9,
            agent=call.agent,
        )  # fmt: skip


def _last_of(places: Sequence[int], earlier: Sequence[set[int]]) -> list[int]:
    """Those that no other one of them waits for (transitive reduction)."""
    return [each for each in places if not any(each in earlier[other] for other in places)]


def _first(told: dict[str, Any], names: Sequence[str]) -> Any:
    return next((told[name] for name in names if told.get(name)), None)


def _count(told: dict[str, Any], names: Sequence[str]) -> int:
    found = _first(told, names)
    return int(found) if isinstance(found, int | float) and found > 0 else 0


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages of a JSON text, of a list, or of a plain text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return [{"role": "user", "content": value}]
    found = value if isinstance(value, list) else [value]
    return [each if isinstance(each, dict) else {"content": str(each)} for each in found if each]


def _text(message: dict[str, Any]) -> str:
    """Of the content of a message, or of its parts; calls of tools as JSON."""
    content = message.get("content", message.get("parts"))
    if isinstance(content, str):
        return content
    parts = [each for each in content or () if isinstance(each, dict)]
    texts = [str(each.get("content") or each.get("text") or each.get("result") or "") for each in parts]
    calls = message.get("tool_calls")
    return "\n".join(filter(None, [*texts, json.dumps(calls, ensure_ascii=False) if calls else ""]))


GENAI_SPANS = TraceForm(
    "spans", "JSON with resourceSpans (OTLP) or spans, whose attributes gen_ai.* tell the calls of agents; or a folder "
    "of such files", _recognises, _rows,
)  # fmt: skip
