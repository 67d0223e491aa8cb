"""The answer that a conversation continues with: the text of a reply, cut out of its bytes, still JSON-escaped.

It runs between two turns, beside timed requests, so the events of a stream are not decoded: the pieces of a streamed
JSON string, joined, are the JSON string of the whole. Reasoning and tool calls are left out. What is no stream that
ends with its last event, has a key of an error, or has no text is read in full, as its record will be.
"""

import re
import zlib

import httptools

from sojourn.loadgen.replies.document import CODES, FAILED, MESSAGES, ReplyFault
from sojourn.loadgen.replies.reply import ReplyReader, unpacker

_STRING = rb'[^"\\]*(?:\\.[^"\\]*)*'
TEXT_KEYS = {
    "chat": re.compile(rb'"content"\s*:\s*"(%s)"' % _STRING, re.DOTALL),
    "completions": re.compile(rb'"text"\s*:\s*"(%s)"' % _STRING, re.DOTALL),
}
_LAST_EVENT = b"\ndata: [DONE]"
_EMPTY = rb'(?!\s*(?:null|false|0|""|\{\}|\[\])\s*[,}])'
# Each stands for a rule of `failure` or of the events' names. Where no failure follows, the whole reader says so.
_KEYS = re.compile(
    rb'"(?:(?:errors?|error_code)"\s*:%s|(?:object|type)"\s*:\s*"error"|finish_reason"\s*:\s*(?:\{|"[^"]*(?i:%s))'
    rb'|(?:%s)"\s*:\s*["\[]|(?:%s)"\s*:\s*[45]\d\d\b)'
    % (_EMPTY, *("|".join(words).encode() for words in (FAILED, MESSAGES, CODES)))
)
_LINES = re.compile(rb"[\r\n](?:error:|event:[^\r\n]*(?i:error|exception))")


def _may_fail(body: bytes) -> bool:
    """Whether a stream has a key or an event of an error. A quote within a text stands behind a backslash."""
    keys = (body[found.start() - 1 : found.start()] != b"\\" for found in _KEYS.finditer(body))
    return any(keys) or _LINES.search(b"\n" + body) is not None


class _Body:
    """What httptools reports of a reply."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.headers: dict[bytes, bytes] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)


def answer_of(reply: bytes, api: str) -> tuple[bytes, str]:
    """The text of a complete HTTP reply, JSON-escaped, and why the reply failed: "" if it did not."""
    found = _Body()
    parser = httptools.HttpResponseParser(found)
    try:
        parser.feed_data(reply)
        unpack = unpacker(found.headers.get(b"content-encoding", b""))
        body = b"".join(found.parts) if unpack is None else unpack(b"".join(found.parts))
    except (httptools.HttpParserError, httptools.HttpParserUpgrade, ReplyFault, zlib.error):
        body = b""
    answer = b"".join(TEXT_KEYS[api].findall(body))
    streams = b"text/event-stream" in found.headers.get(b"content-type", b"").lower()
    whole = streams and parser.get_status_code() == 200 and body.rstrip().endswith(_LAST_EVENT)
    if not whole or not answer or _may_fail(body):
        reader = ReplyReader()
        reader.feed(reply, 0)
        read = reader.end()
        if read.error or not read.finished:
            return b"", read.error or "the reply ended before its last event"
    return answer, ""
