"""The answer that a conversation continues with: the text of a reply, cut out of its bytes, still JSON-escaped.

It runs between two turns, beside timed requests, so nothing is decoded: the pieces of a streamed JSON string, joined,
are the JSON string of the whole. Reasoning and tool calls are left out. Only a reply that may have failed is read in
full.
"""

import re
from types import SimpleNamespace

import httptools

from loadgen.replies.reply import ReplyReader

_STRING = rb'[^"\\]*(?:\\.[^"\\]*)*'
TEXT_KEYS = {
    "chat": re.compile(rb'"content"\s*:\s*"(%s)"' % _STRING, re.DOTALL),
    "completions": re.compile(rb'"text"\s*:\s*"(%s)"' % _STRING, re.DOTALL),
}
_LAST_EVENT = b"\ndata: [DONE]"
_MAY_FAIL = re.compile(rb"error|abort|cancel|fail|\n:|content-encoding", re.IGNORECASE)
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')
# What `reply.py` counts as text: the first of it ends a client's wait for a first token.
FIRST_TEXT = re.compile(
    rb'(?:"(?:text|content|refusal|reasoning(?:_content|_text)?|thinking(?:_content)?|arguments|input|transcript)"|"function"\s*:\s*\{[^}]*"name")\s*:\s*"[^"]'
)


def answer_of(reply: bytes, api: str) -> tuple[bytes, str]:
    """The text of a complete HTTP reply, JSON-escaped, and why the reply failed: "" if it did not."""
    parts: list[bytes] = []
    parser = httptools.HttpResponseParser(SimpleNamespace(on_body=parts.append))
    try:
        parser.feed_data(reply)
        body = b"".join(parts)
        finished = body.rstrip().endswith(_LAST_EVENT) or _FINISHED.search(body)  # the first costs nothing
        doubtful = parser.get_status_code() != 200 or not finished or _MAY_FAIL.search(body)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        body, doubtful = b"", True
    if doubtful:
        reader = ReplyReader()
        reader.feed(reply, 0)
        read = reader.end()
        if read.error or not read.finished:
            return b"", read.error or "the reply ended before its last event"
    return b"".join(TEXT_KEYS[api].findall(body)), ""
