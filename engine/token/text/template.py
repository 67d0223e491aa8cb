"""Chat messages → prompt, by the checkpoint's own template: the text that transformers makes, within bounds."""

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from sojourn.engine.token.text import reasoning
from sojourn.engine.token.text.template_processes import Busy, TooMuchWork, template_processes
from sojourn.engine.token.text.template_sources import SPECIAL, special_tokens, template_sources
from sojourn.engine.token.tools.calls import ToolFormat, format_of
from sojourn.metrics.errors import InputError, ModelError

log = logging.getLogger(__name__)
CPU_SECONDS = 2.0  # that one rendering may take: a chat of 1,000 messages takes some 0.01
LOADING_SECONDS = 1.0  # likewise, to compile a template and to render a word with it
LOADING_CHARACTERS = 1_000_000  # what a word may be rendered to at most
_REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing; templates know it by either name

# Marks where the last message ends. The blank is gone where the template trims messages: then the text before it is
# trimmed, too. Capitals, since some templates write messages so; 26 characters, as many as transformers' own mark has.
_END_OF_MESSAGE, _BLANK = f"END_OF_MESSAGE_{secrets.token_hex(6)[:11].upper()}", " "

# What a template may be given by name, but never by a request: our own, and Jinja's.
_RESERVED = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template",
    "raise_exception", "strftime_now", "namespace", "range", "dict", "cycler", "joiner", "lipsum", *SPECIAL,
}  # fmt: skip

_USER: dict[str, Any] = {"role": "user", "content": "a"}
_NONE = {"type": "object", "properties": {}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "a", "parameters": _NONE}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "PROBED", "arguments": "{}"}}
_RESULT = {"role": "tool", "content": "a", "tool_call_id": _CALL["id"], "name": "PROBED"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
# Messages and tools of which any template of chats can render some.
_SMALL_CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([_USER], None),
    ([_USER | {"content": ""}], None),
    ([{"role": "system", "content": "a"}, _USER], None),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], None),
    ([_USER, {"role": "assistant", "content": "a"}, _USER], None),
    ([_USER], [_TOOL]),
    ([_USER, _CALLED, _RESULT], [_TOOL]),
]


class TemplateError(InputError):
    """Messages that the model's template refuses, or a model without one."""


class OutputTooLong(TemplateError):
    """The prompt passes the bound that it was rendered with."""


class TemplatesBusy(TemplateError):
    """No process could render in time."""


class TemplateFault(TemplateError):
    """The template fails on these messages, and other messages would not help."""


class TooMuchToRender(TemplateError):
    """The template takes more time or memory than it may."""


class ChatTemplate:
    """Renders messages, in another process. Templates come from the checkpoint only, never from a request.

    `clock` tells the date to templates that write it. Raises ModelError for a template that cannot be used.
    """

    def __init__(self, folder: Path, clock: Callable[[], datetime] = datetime.now):
        self._sources, self._special, self._clock = template_sources(folder), special_tokens(folder), clock
        self._names = {False: "default" if "default" in self._sources else None}
        self._names[True] = "tool_use" if "tool_use" in self._sources else self._names[False]
        used = {name: self._read_by(self._sources[name]) for name in self._names.values() if name is not None}
        with_tools = self._sources.get(self._names[True] or "", "")
        self.exists = bool(used)
        self.knows_tools = "tools" in used.get(self._names[True], ())
        self.tool_format: ToolFormat | None = format_of(with_tools)
        self.reasoning_format = reasoning.format_of(self._sources.get(self._names[False] or "", ""))
        # Those that a request may set.
        self.variables = frozenset(set().union(*used.values()) - _RESERVED - set(self._special))
        self._without_developer = not any("developer" in self._sources[name] for name in used)
        self._arguments_as_text = "▁call▁begin" in with_tools and not _ARGUMENTS_TO_JSON.search(with_tools)
        for name in used:
            self._try_out(name)
        forms = {role: self._forms(role) for role in ("system", "user", "assistant", "tool")}
        self._reads_parts = {role for role, (_, as_parts) in forms.items() if as_parts}
        self._needs_parts = {role for role, (as_text, as_parts) in forms.items() if as_parts and not as_text}
        alone = {name: value for name, value in _CALLED.items() if name != "content"}
        self._calls_need_content = self.knows_tools and (
            not self._shows("PROBED", [_USER, alone, _RESULT]) and self._shows("PROBED", [_USER, _CALLED, _RESULT])
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        max_characters: int = 2**40,
    ) -> str:
        """The prompt for the assistant's next turn, or up to the end of a last message that is to be continued.

        `variables` are among `self.variables`. Raises TemplateError with a sentence.
        """
        name = self._names[tools is not None]
        if name is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        if not messages:
            raise TemplateError("a chat without messages has no prompt; send at least one")
        messages = [self._as_read(message) for message in messages]
        end = None
        if continue_final_message:
            if "content" not in self._sources[name]:
                raise TemplateError(_NOT_SHOWN)
            messages[-1], end = _marked(messages[-1])
            add_generation_prompt = False
            max_characters += len(_END_OF_MESSAGE + _BLANK)
        values = {"messages": messages, "tools": tools, "documents": None, **self._special, **(variables or {})}
        values["add_generation_prompt"] = add_generation_prompt
        try:
            text = self._rendered(name, values, max_characters=max_characters, cpu_seconds=CPU_SECONDS)
        except TemplatesBusy:
            raise
        except TemplateError as error:
            raise type(error)(f"the model's chat template refuses these messages: {error}") from None
        return text if end is None else _up_to_mark(text, end)

    def adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message of a client, for models that were not trained on all that clients send.

        `developer` is the system to those that do not know the word. Where a template fails on calls without content,
        or does not show them, the content is an empty text. Parts are one text to a template that does not read them,
        and a text is a part to one that shows nothing else.
        """
        role, content = message.get("role"), message.get("content")
        if role == "developer" and self._without_developer:
            role = "system"
            message = message | {"role": role}
        if isinstance(content, list) and role not in self._reads_parts:
            message = message | {"content": "".join(str(part.get("text", "")) for part in content)}
        elif isinstance(content, str) and role in self._needs_parts:
            message = message | {"content": [{"type": "text", "text": content}]}
        if message.get("tool_calls") and message.get("content") is None and self._calls_need_content:
            message = message | {"content": ""}
        return message

    def _as_read(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as templates read it: nothing that is null, reasoning by all its names, and arguments as objects,
        but for templates that write the text as it is."""
        message = {name: value for name, value in message.items() if value is not None}
        thoughts = next((message[name] for name in _REASONING if name in message), None)
        if thoughts is not None:
            message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
        calls = message.get("tool_calls")
        if isinstance(calls, list) and not self._arguments_as_text:
            message["tool_calls"] = [_with_objects(call) for call in calls]
        return message

    def _rendered(self, name: str, values: dict[str, Any], *, max_characters: int, cpu_seconds: float) -> str:
        now = self._clock().isoformat()
        answer = _ask(
            source=self._sources[name], values=values, now=now, max_characters=max_characters, cpu_seconds=cpu_seconds
        )
        if "text" in answer:
            return answer["text"]
        if answer["kind"] == "long":
            raise OutputTooLong("they become longer than the model can read")
        raise (TemplateFault if answer["kind"] == "broken" else TemplateError)(answer["error"])

    def _read_by(self, source: str) -> set[str]:
        """Names that a template reads and does not set. Raises ModelError for one that is none."""
        try:
            answer = _ask(source=source, cpu_seconds=LOADING_SECONDS)
        except TooMuchToRender as error:
            raise ModelError(f"the checkpoint's chat template cannot be compiled: {error}; correct it") from None
        except TemplatesBusy as error:
            raise ModelError(f"the checkpoint's chat template was not compiled: {error}") from None
        if "reads" not in answer:
            raise ModelError(f"the checkpoint's chat template cannot be read: {answer['error']}; correct it")
        return set(answer["reads"])

    def _try_out(self, name: str) -> None:
        """Raises ModelError for a template that writes or works without end for a word, or is broken in every chat.
        One that refuses each small chat may take others: that is said."""
        errors = [self._error(name, {"messages": messages, "tools": tools}) for messages, tools in _SMALL_CHATS]
        if all(isinstance(error, TemplateFault) for error in errors):
            raise ModelError(f"the checkpoint's chat template fails on every chat: {errors[0]}; correct it")
        if all(errors):
            log.warning("the checkpoint's chat template refuses all small chats: %s; chats may get 400", errors[0])

    def _error(self, name: str, values: dict[str, Any]) -> TemplateError | None:
        """What the template says against a chat; None where it renders it."""
        values = {"documents": None, "add_generation_prompt": True, **self._special, **values}
        try:
            self._rendered(name, values, max_characters=LOADING_CHARACTERS, cpu_seconds=LOADING_SECONDS)
        except OutputTooLong:
            message = f"the checkpoint's chat template writes over {LOADING_CHARACTERS:,} characters for one word"
            raise ModelError(f"{message}; correct it") from None
        except TooMuchToRender as error:
            raise ModelError(f"the checkpoint's chat template does not end: {error}; correct it") from None
        except TemplatesBusy as error:
            raise ModelError(f"the checkpoint's chat template was not tried: {error}") from None
        except TemplateError as error:
            return error
        return None

    def _forms(self, role: str) -> tuple[bool, bool]:
        """Whether messages of a role are shown whose content is a text, and likewise parts."""
        before = {"assistant": [_USER], "tool": [_USER, _CALLED]}.get(role, [])
        after = [] if role == "user" else [_USER]
        shown = []
        for content in ("SHOWN", [{"type": "text", "text": "SHOWN"}]):
            message = _RESULT | {"content": content} if role == "tool" else {"role": role, "content": content}
            shown.append(self._shows("SHOWN", [*before, message, *after]))
        return shown[0], shown[1]

    def _shows(self, word: str, messages: list[dict[str, Any]]) -> bool:
        """Whether a chat is rendered, with the word in it, and with no part as Python or JSON writes it."""
        tools = [_TOOL] if any("tool_calls" in message for message in messages) else None
        try:
            text = self.render(messages, tools=tools, max_characters=LOADING_CHARACTERS)
        except TemplateError:
            return False
        return word in text and not re.search("""['"]type['"]: ['"]text['"]""", text)


_NOT_SHOWN = "the model's chat template does not show the last message, so it cannot be continued"
_ARGUMENTS_TO_JSON = re.compile(r"arguments['\"\])]*\s*\|\s*tojson|arguments['\"\])]* is (string|mapping)")


def _ask(**request: Any) -> dict[str, Any]:
    """Raises TemplateError where there is no answer."""
    try:
        return template_processes().ask(**request)
    except TooMuchWork:
        bounds = f"{request['cpu_seconds']:g} s of CPU time, or more than 1 GiB of memory"
        raise TooMuchToRender(f"it takes more than {bounds}") from None
    except Busy:
        raise TemplatesBusy("the processes that render chat templates are busy, or cannot start; try again") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"they hold what JSON cannot say: {error}") from None


def _with_objects(call: Any) -> Any:
    try:
        return call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
    except (KeyError, TypeError, ValueError, RecursionError):
        return call  # already an object, or nothing that could be one


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A message whose content ends with the mark, and what stands before it: the last text of several parts."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + _END_OF_MESSAGE + _BLANK}, content
    for index in reversed(range(len(content) if isinstance(content, list) else 0)):
        part = content[index]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            marked = part | {"text": part["text"] + _END_OF_MESSAGE + _BLANK}
            return message | {"content": [*content[:index], marked, *content[index + 1 :]]}, part["text"]
    raise TemplateError("the last message has no text, so it cannot be continued")


def _up_to_mark(text: str, end: str) -> str:
    before, mark, rest = text.rpartition(_END_OF_MESSAGE)
    if not mark or end.strip() not in text:
        raise TemplateError(_NOT_SHOWN)
    before = before if rest.startswith(_BLANK) else before.rstrip()
    return before.replace(_END_OF_MESSAGE + _BLANK, "").replace(_END_OF_MESSAGE, "")  # of one that is shown twice
