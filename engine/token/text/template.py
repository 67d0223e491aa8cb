"""Chat messages → prompt, by the checkpoint's own template, in a sandbox with bounds on its work and its output."""

import json
import re
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import minijinja

from engine.token.checkpoint import read_json
from engine.token.text import reasoning
from engine.token.tools.calls import ToolFormat, format_of
from metrics.errors import InputError, ModelError

FUEL = 1_000_000  # instructions that one rendering may take: a chat of 1,000 messages takes some 20,000
PROBE_CHARACTERS = 1_000_000  # what a short chat may be rendered to at most, when the template is loaded
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_END_OF_MESSAGE = "\ue000end of message\ue001"  # marks where the last message ends, of characters in private use
_BLANK = " "  # after the mark: gone where the template trims messages, and then the text before it is trimmed, too

# What a template may be given by name, but never by a request: our own, and minijinja's.
_RESERVED = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template",
    "raise_exception", "strftime_now", "namespace", "range", "dict", "debug", "cycler", "joiner", "lipsum", *_SPECIAL,
}  # fmt: skip


class TemplateError(InputError):
    """Messages that the model's template refuses, or a model without one."""


class OutputTooLong(TemplateError):
    """The prompt passes the bound that it was rendered with."""


class ChatTemplate:
    """Renders messages. Templates come from the checkpoint only, never from a request.

    `clock` tells the date to templates that write it. Raises ModelError for a template that cannot be used.
    """

    def __init__(self, folder: Path, clock: Callable[[], datetime] = datetime.now):
        sources = _sources(folder)
        config = read_json(folder, "tokenizer_config.json")
        self._special = {key: _content(config.get(key)) for key in _SPECIAL}
        self._budget = threading.local()  # .left: characters that the rendering of this thread may still write
        self._environment = minijinja.Environment(
            fuel=FUEL, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True, pycompat=True,
            finalizer=self._emitted,
        )  # fmt: skip
        self._environment.add_function("raise_exception", _raise)
        self._environment.add_function("strftime_now", lambda form: clock().strftime(form))
        self._environment.add_filter("tojson", self._to_json)
        for name, source in sources.items():
            self._add(name, source)
        self._names = {False: "default" if "default" in sources else None}
        self._names[True] = "tool_use" if "tool_use" in sources else self._names[False]
        with_tools = sources.get(self._names[True], "")
        self.exists = self._names[False] is not None
        self.knows_tools = "tools" in self._read_by(self._names[True])
        self.tool_format: ToolFormat | None = format_of(with_tools)
        self.reasoning_format = reasoning.format_of(sources.get(self._names[False], ""))
        self.variables = frozenset(self._read_by(*self._names.values()) - _RESERVED)  # that a request may set
        self._without_developer = not any("developer" in source for source in sources.values())
        self._arguments_as_text = "▁call▁begin" in with_tools and not _ARGUMENTS_TO_JSON.search(with_tools)
        self._probe()

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
        name = self._names[bool(tools)]
        if name is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        messages = [self._as_read(message) for message in messages]
        if continue_final_message:
            messages[-1] = messages[-1] | {"content": (messages[-1].get("content") or "") + _END_OF_MESSAGE + _BLANK}
            add_generation_prompt = False
        self._budget.left = max_characters
        values = {**(variables or {}), "messages": messages, "tools": tools or None, **self._special}
        try:
            text = self._environment.render_template(name, add_generation_prompt=add_generation_prompt, **values)
        except TemplateError:
            raise
        except Exception as error:  # of any kind: a template may call Python's own objects, as it likes
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise TemplateError(f"the model's chat template refuses these messages: {first}") from None
        if not continue_final_message:
            return text
        text, mark, rest = text.rpartition(_END_OF_MESSAGE)
        if not mark:
            raise TemplateError("the model's chat template does not show the last message, so it cannot be continued")
        return text if rest.startswith(_BLANK) else text.rstrip()

    def _add(self, name: str, source: str) -> None:
        try:
            self._environment.add_template(name, _GENERATION.sub(_block_of_generation, source))
        except minijinja.TemplateError as error:
            first = str(error).splitlines()[0]
            raise ModelError(f"the checkpoint's chat template cannot be read: {first}; correct it") from None

    def _read_by(self, *names: str | None) -> set[str]:
        """Names that templates read and do not set."""
        known = {name for name in names if name is not None}
        return set().union(*(self._environment.undeclared_variables_in_template(name) for name in known))

    def _as_read(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as this template takes it.

        `developer` is the system to models that were not trained on that word. Templates read the arguments of earlier
        calls as objects, but for those that write them as they are.
        """
        if message["role"] == "developer" and self._without_developer:
            message = message | {"role": "system"}
        if not message.get("tool_calls") or self._arguments_as_text:
            return message
        calls = [
            call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return message | {"tool_calls": calls}

    def _probe(self) -> None:
        """A template that writes without end, or takes all its fuel, for a word is refused before it is served."""
        for messages in ([{"role": "user", "content": "a"}], [{"role": r, "content": "a"} for r in ("system", "user")]):
            try:
                size = len(self.render(messages, max_characters=PROBE_CHARACTERS)) if self.exists else 0
            except OutputTooLong:
                size = PROBE_CHARACTERS + 1
            except TemplateError as error:
                if "fuel" in str(error):
                    raise ModelError(f"the checkpoint's chat template does not end: {error}; correct it") from None
                continue  # it wants other messages than these
            if size > PROBE_CHARACTERS:
                message = f"the checkpoint's chat template writes over {PROBE_CHARACTERS:,} characters for one word"
                raise ModelError(f"{message}; correct it")

    def _emitted(self, value: Any) -> Any:
        if isinstance(value, str):
            self._spend(len(value))
        return value

    def _spend(self, characters: int) -> None:
        self._budget.left -= characters
        if self._budget.left < 0:
            raise OutputTooLong("the model's chat template makes these messages longer than the model can read")

    def _to_json(self, value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        """JSON as transformers writes it for templates: not escaped for HTML, and with a blank after , and :."""
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
        self._spend(len(text) if len(text) > 10_000 else 0)  # counted again where it is written; bounds what is not
        return text


def _sources(folder: Path) -> dict[str, str]:
    """The checkpoint's templates by name: `default`, and `tool_use` where it has one of its own for tools."""
    found = read_json(folder, "tokenizer_config.json").get("chat_template")
    found = read_json(folder, "chat_template.json").get("chat_template", found)
    named = {item["name"]: item["template"] for item in found} if isinstance(found, list) else {"default": found}
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            named[name] = file.read_text(encoding="utf-8")
    return {name: source for name, source in named.items() if name in ("default", "tool_use") and source}


# {% generation %} marks what a model is trained on. It changes no text, and minijinja does not know it.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_ARGUMENTS_TO_JSON = re.compile(r"arguments['\"\])]*\s*\|\s*tojson|arguments['\"\])]* is (string|mapping)")


def _block_of_generation(found: re.Match[str]) -> str:
    return f"{{%{found[1]} {'endif' if found[2] else 'if true'} {found[3]}%}}"


def _content(token: Any) -> str:
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _raise(message: str) -> None:
    raise TemplateError(f"the model's chat template refuses these messages: {message}")
