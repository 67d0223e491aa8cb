"""One reply: its stamped bytes → text chunks, token counts, errors. The cold path."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools

from sojourn.loadgen.replies import document as documents
from sojourn.loadgen.replies.document import MAX_ERROR_CHARACTERS, ReplyFault
from sojourn.loadgen.replies.front import FrontTimes, front_times
from sojourn.loadgen.replies.sse import BYTE_ORDER_MARK, Event, SseDecoder
from sojourn.loadgen.replies.usage import Tokens, counted

NOT_FOLLOWED = "only 307 and 308 within one server are followed, some in a row: give the address that answers"
NO_TOKEN = "the answer has no token"
EVENT_FIELDS = (b"data", b"event", b"error", b"id", b"retry", b":")
GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
PACKED = {b"gzip", b"x-gzip", b"deflate"}


@dataclass(slots=True)
class Reply:
    """The part of a reply that was read. Events of one read share its stamp."""

    status_code: int | None = None
    error: str | None = None
    complete: bool = False  # HTTP says that the message is whole
    finished: bool = False  # the answer is: [DONE], a finish reason, or a JSON document
    text: str = ""
    chunk_ns: list[int] = field(default_factory=list)
    reasons: bool = False  # it has reasoning apart from its answer; `<think>` within the text is text
    first_answer_ns: int | None = None  # of text that is no reasoning
    sizes: list[int] = field(default_factory=list)  # bytes of each chunk's text
    told: list[int | None] = field(default_factory=list)  # output tokens of the usage beside each chunk of text
    last_told: int | None = None  # of a usage after all text
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    front: FrontTimes | None = None
    is_stream: bool = False

    @property
    def tokens(self) -> Tokens:
        """The output tokens, and those of each chunk, as far as the server's usage is consistent."""
        return counted(self.told, self.last_told, self.sizes)

    @property
    def output_tokens(self) -> int | None:
        return self.tokens.total

    @property
    def chunk_tokens(self) -> list[int]:
        """New tokens in each chunk; [] where nobody tells them, and a chunk stands for a token."""
        return self.tokens.of_chunks


def unpacker(encoding: bytes) -> Callable[[bytes], bytes] | None:
    """What unpacks a body of this header content-encoding; None where it is not packed. Raises ReplyFault."""
    encoding = encoding.lower().strip()
    if encoding in PACKED:
        return zlib.decompressobj(GZIP_OR_ZLIB).decompress
    if encoding in (b"", b"identity"):
        return None
    raise ReplyFault(f"the reply has the header content-encoding: {encoding.decode('latin-1')}, which is not read")


class ReplyReader:
    """Reads one HTTP reply, streamed or not. httptools calls the `on_…` methods."""

    def __init__(self) -> None:
        self.reply = Reply()
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._unpack: Any = None
        self._sse: SseDecoder | None = None
        self._beginning = True  # no byte of the body tells yet whether it has events
        self._document = b""
        self._now_ns = 0
        self._ended: dict[Any, bool] = {}  # choice → whether its last chunk had a finish reason
        self._goes_on = False  # text came after a finish reason: these reasons end nothing
        self._done = False

    def feed(self, data: bytes, now_ns: int) -> None:
        """Takes bytes that were read at `now_ns`. Bytes that are not HTTP become the reply's error."""
        self._now_ns = now_ns
        if not self.reply.complete:
            self._blame_the_reply(lambda: self._parser.feed_data(data))

    def end(self) -> Reply:
        """The reply once the connection is closed: a body without a length ends there."""
        self._blame_the_reply(self._finish)
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
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        code = self._parser.get_status_code()
        if 100 <= code < 200:  # informational: the answer follows
            return
        self.reply.status_code = code
        self.reply.front = front_times(self._headers)
        self._unpack = unpacker(self._headers.get(b"content-encoding", b""))

    def on_body(self, body: bytes) -> None:
        if self._unpack is not None:
            try:
                body = self._unpack(body)
            except zlib.error as error:
                raise ReplyFault(f"the body is not what its header content-encoding says: {error}") from None
        if self._sse is None:
            self._document += body
            if not self._beginning or self.reply.status_code != 200:
                return
            self._look_at_beginning()
            if self._sse is None:
                return
            body, self._document = self._document, b""
        for event in self._sse.feed(body):
            self._take_event(event)

    def _look_at_beginning(self) -> None:
        """Whether the body has events. Its first bytes tell, since servers send errors as JSON under
        text/event-stream too. Raises ReplyFault for events under another type, which other clients do not read."""
        begin = self._document.removeprefix(BYTE_ORDER_MARK).lstrip()[:16]
        if not begin or BYTE_ORDER_MARK.startswith(begin):
            return
        says_events = b"text/event-stream" in self._headers.get(b"content-type", b"").lower()
        names = begin.split(b":")[0] or b":"
        if begin[:1] not in b"{[<" and (says_events or names in EVENT_FIELDS):
            if self._type():
                raise ReplyFault(f"the reply has events under another header than text/event-stream:{self._type()}")
            self._sse = SseDecoder()
            self.reply.is_stream = True
        self._beginning = self._sse is None and any(field.startswith(begin) for field in EVENT_FIELDS)

    def on_message_complete(self) -> None:
        if self.reply.status_code is None:  # an informational one
            self._headers = {}
            return
        self.reply.complete = True
        self._finish()

    def _finish(self) -> None:
        if self._sse is not None:
            for event in self._sse.end():
                if event.is_error or event.data == "[DONE]" or self.reply.complete:
                    self._take_event(event)
        else:
            self._finish_document()
        self.reply.finished = self._is_finished()
        if self.reply.finished and not self.reply.chunk_ns and not self.reply.last_told:
            self._fail(NO_TOKEN)

    def _is_finished(self) -> bool:
        """By [DONE], or by the finish reason of each choice. Reasons that more text followed need the end of the HTTP
        message as well."""
        if self.reply.error is not None:
            return self._done
        ended = bool(self._ended) and all(self._ended.values())
        return self._done or (ended and (self.reply.complete or not self._goes_on))

    def _take_event(self, event: Event) -> None:
        if event.is_error:
            said = event.error or event.data
            self._fail(_said(said) or event.comment or event.name)
        elif event.data.strip() == "[DONE]":
            self._done = self.reply.finished = True
        elif not event.is_heartbeat:
            self._take_document("an event", event.data)

    def _finish_document(self) -> None:
        content, self._document = self._document.removeprefix(BYTE_ORDER_MARK), b""
        code = self.reply.status_code
        if code is None or self._done:
            return
        if code != 200:
            to = self._headers.get(b"location") if 300 <= code < 400 else None
            where = f"redirected by the header location to {to.decode('latin-1')}; {NOT_FOLLOWED}; " if to else ""
            self._fail(f"HTTP {code}: {where}{_said(content) or 'no body'}")
        elif content.strip():
            self._take_document("the reply", content)
            self._done = self.reply.error is None

    def _take_document(self, name: str, content: str | bytes) -> None:
        """Takes text and counts of tokens of an event or of a whole reply."""
        try:
            found = documents.parse(content)
        except ValueError:
            found = None
        else:
            if found in (None, "", []):  # nothing but a sign of life
                return
        if not isinstance(found, dict):
            self._fail(f"{name} is not a JSON object{self._type()}: {_decoded(content)[:MAX_ERROR_CHARACTERS]!r}")
            return
        if error := documents.failure(found):
            self._fail(error)
            return
        output = self._take_usage(found)
        for choice in documents.entries(found, "choices"):
            index = choice.get("index", 0)
            reasoning, *answer = documents.texts(choice)
            text = reasoning + "".join(answer)
            self.reply.reasons |= bool(reasoning)
            if any(answer) and self.reply.first_answer_ns is None:
                self.reply.first_answer_ns = self._now_ns
            if text:
                self._goes_on = self._goes_on or self._ended.get(index, False)
                self.reply.text += text
                self.reply.sizes.append(len(text.encode("utf-8", "replace")))
                self.reply.chunk_ns.append(self._now_ns)
                self.reply.told.append(output)
                self.reply.last_told = None
            self._ended[index] = documents.finishes(choice) or (not text and self._ended.get(index, False))
        self.reply.finished = self._is_finished()

    def _take_usage(self, content: dict[str, Any]) -> int | None:
        """The output tokens of a document's usage, if it has any. A later count of 0 hides no earlier one."""
        reply, usage = self.reply, documents.part(content, "usage", dict)
        prompt, output = documents.count(usage, "prompt_tokens"), documents.count(usage, "completion_tokens")
        cached = documents.count(documents.part(usage, "prompt_tokens_details", dict), "cached_tokens")
        reply.prompt_tokens = prompt or reply.prompt_tokens
        reply.cached_tokens = cached if cached is not None else reply.cached_tokens
        reply.last_told = output or reply.last_told
        return output

    def _type(self) -> str:
        kind = self._headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip()
        return "" if kind in ("", "text/event-stream", "application/json") else f" (content-type {kind})"


def _said(content: str | bytes) -> str:
    """The message of an error: of a JSON document of any shape, or the beginning of a text."""
    try:
        found = documents.parse(content)
    except ValueError:
        return _decoded(content)[:MAX_ERROR_CHARACTERS]
    if isinstance(found, dict):
        return documents.message(found.get("error") or found, found)
    return documents.message(found)


def _decoded(content: str | bytes) -> str:
    return content if isinstance(content, str) else content.decode("utf-8", "replace")


def _unreadable(error: Exception) -> str:
    return f"the reply cannot be read: {(error.__context__ or error)!r}"[:MAX_ERROR_CHARACTERS]
