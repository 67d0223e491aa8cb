"""One reply: its stamped bytes → text chunks, token counts, errors. The cold path."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools

from metrics.errors import ServerError

MAX_ERROR_CHARACTERS = 300
LARGEST_COUNT = 2**63 - 1  # what a column of the tables holds
_LINE_END = re.compile(rb"\r\n|\n|\r")


class ReplyFault(ServerError):
    """A reply that does not follow OpenAI's API, with a sentence that says where."""


@dataclass(slots=True)
class Reply:
    """The part of a reply that was read. Events of one read share its stamp."""

    status_code: int | None = None
    error: str | None = None
    complete: bool = False  # HTTP says that the message is whole
    finished: bool = False  # the answer is: [DONE], a finish reason, or a JSON document
    text: str = ""
    chunk_ns: list[int] = field(default_factory=list)
    totals: list[int | None] = field(default_factory=list)  # output tokens so far, with each chunk of text
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def chunk_tokens(self) -> list[int]:
        """New tokens in each chunk; [] unless every chunk has its total, and no total decreases.

        The running usage of the server counts the tokens of a chunk, never its text. They share the stamp of their
        chunk.
        """
        if not self.totals or None in self.totals:
            return []
        new = [after - before for before, after in zip([0, *self.totals], self.totals, strict=False)]
        return new if min(new) >= 0 else []


class SseDecoder:
    """Server-sent events after the WHATWG HTML standard, 9.2: bytes, however they were cut, → the data of each event.
    Other fields than `data` are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_carriage_return = False

    def feed(self, chunk: bytes) -> list[str]:
        """The data of each event that this chunk completes, in order.

        An event is given out at its blank line, even if a line feed may still belong to it: it is dropped then.
        """
        if self._after_carriage_return and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_carriage_return = False
        content = self._rest + chunk
        events, position = [], 0
        for end in _LINE_END.finditer(content):
            line = content[position : end.start()]
            position = end.end()
            if line:
                self._field(line)
            elif self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        self._rest = content[position:]
        self._after_carriage_return = position == len(content) and content.endswith(b"\r")
        return events

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))


class ReplyReader:
    """Reads one HTTP reply, streamed or not. httptools calls the `on_…` methods."""

    def __init__(self) -> None:
        self.reply = Reply()
        self._parser = httptools.HttpResponseParser(self)
        self._sse: SseDecoder | None = None
        self._document = b""
        self._now_ns = 0

    def feed(self, data: bytes, now_ns: int) -> None:
        """Takes bytes that were read at `now_ns`. Bytes that are not HTTP become the reply's error."""
        self._now_ns = now_ns
        if not self.reply.complete:
            self._blame_the_reply(lambda: self._parser.feed_data(data))

    def end(self) -> Reply:
        """The reply once the connection is closed: a body without a length ends there."""
        self._blame_the_reply(self._finish_document)
        return self.reply

    def _blame_the_reply(self, read: Callable[[], None]) -> None:
        """An exception of the reader is the reply's error: one odd reply must not cost the others their records."""
        try:
            read()
        except httptools.HttpParserCallbackError as error:  # raised in one of the `on_…` methods
            self._fail(str(error.__context__) if isinstance(error.__context__, ReplyFault) else _unreadable(error))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not an HTTP reply: {error}")
        except ReplyFault as error:
            self._fail(str(error))
        except Exception as error:
            self._fail(_unreadable(error))

    def _fail(self, error: str) -> None:
        """The first error counts. JSON may have half a surrogate pair, which no table can hold: it becomes `?`."""
        self.reply.error = self.reply.error or error.encode("utf-8", "replace").decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type" and b"text/event-stream" in value.lower():
            self._sse = SseDecoder()

    def on_headers_complete(self) -> None:
        self.reply.status_code = self._parser.get_status_code()
        if self.reply.status_code != 200:
            self._sse = None

    def on_body(self, body: bytes) -> None:
        if self._sse is None:
            self._document += body
            return
        for event in self._sse.feed(body):
            self._take_event(event)

    def on_message_complete(self) -> None:
        self.reply.complete = True
        self._finish_document()

    def _take_event(self, event: str) -> None:
        if event == "[DONE]":
            self.reply.finished = True
        else:
            self._take_document("an event", event)

    def _finish_document(self) -> None:
        document, self._document = self._document, b""
        code = self.reply.status_code
        if code is None or self._sse is not None:
            return
        if code != 200:
            self._fail(f"HTTP {code}: {_document_message(document)}")
        elif document:
            self._take_document("the reply", document)
            self.reply.finished = self.reply.error is None

    def _take_document(self, name: str, document: str | bytes) -> None:
        """Takes text and counts of tokens of an event or of a whole reply."""
        content = _json(document)
        if not isinstance(content, dict):
            shown = document if isinstance(document, str) else document.decode("utf-8", "replace")
            self._fail(f"{name} is not a JSON object: {shown[:MAX_ERROR_CHARACTERS]!r}")
            return
        if content.get("error"):
            self._fail(_message(content))
            return
        usage = _part(content, "usage", dict)
        prompt, output = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        cached = _count(_part(usage, "prompt_tokens_details", dict), "cached_tokens")
        self.reply.prompt_tokens = prompt if prompt is not None else self.reply.prompt_tokens
        self.reply.output_tokens = output if output is not None else self.reply.output_tokens
        self.reply.cached_tokens = cached if cached is not None else self.reply.cached_tokens
        for choice in _entries(content, "choices"):
            if choice.get("finish_reason"):
                self.reply.finished = True
            text = _text_of(choice)
            if text:
                self.reply.text += text
                self.reply.chunk_ns.append(self._now_ns)
                self.reply.totals.append(output)


def _text_of(choice: dict[str, Any]) -> str:
    """The text that a choice adds: text, content, reasoning, name or arguments of a tool; "" for a role alone."""
    message = _part(choice, "delta", dict) or _part(choice, "message", dict) or choice
    text = _part(message, "reasoning_content", str) or _part(message, "reasoning", str)
    text += _part(message, "content", str) or _part(message, "text", str)
    calls = _entries(message, "tool_calls")
    named = [_part(call, "function", dict) for call in calls]
    return text + "".join(_part(function, "name", str) + _part(function, "arguments", str) for function in named)


def _part(block: dict[str, Any], key: str, kind: type) -> Any:
    """A value of a JSON object; an empty one where it is absent or null. Raises ReplyFault if it is something else."""
    value = block.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ReplyFault(f"`{key}` of the reply is {_shown(value)}, but should be {_KINDS[kind]}")
    return value


def _entries(block: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = _part(block, key, list)
    for entry in entries:
        if not isinstance(entry, dict):
            raise ReplyFault(f"`{key}` of the reply has the entry {_shown(entry)}, but should have objects")
    return entries


def _count(usage: dict[str, Any], key: str) -> int | None:
    """A number of tokens; None where the server tells none."""
    value = usage.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise ReplyFault(f"`usage.{key}` of the reply is {_shown(value)}, but should be a number of tokens")
    return value


_KINDS = {dict: "an object", list: "a list", str: "text"}


def _shown(value: Any) -> str:
    return repr(value)[:MAX_ERROR_CHARACTERS]


def _unreadable(error: Exception) -> str:
    return f"the reply cannot be read: {(error.__context__ or error)!r}"[:MAX_ERROR_CHARACTERS]


def _json(document: str | bytes) -> Any:
    """The value of a JSON document; None where it is none, or nested deeper than Python reads."""
    try:
        return json.loads(document)
    except (ValueError, RecursionError):
        return None


def _message(content: dict[str, Any]) -> str:
    error = content.get("error", content)
    if isinstance(error, dict):
        error = error.get("message") or error
    return str(error)[:MAX_ERROR_CHARACTERS]


def _document_message(document: bytes) -> str:
    """The message of an error document: OpenAI's error.message, FastAPI's detail, or its beginning."""
    content = _json(document)
    if isinstance(content, dict):
        return _message(content) if "error" in content else str(content.get("detail", content))[:MAX_ERROR_CHARACTERS]
    return document[:MAX_ERROR_CHARACTERS].decode("utf-8", "replace") or "no body"
