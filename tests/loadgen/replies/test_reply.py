"""What a reply says does not depend on how its bytes were cut, and what is wrong with it is told."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sojourn.loadgen.client.connection import Exchange
from sojourn.loadgen.client.event_log import (
    BYTES,
    CANCELLED,
    CLOSED,
    DISPATCHED,
    NO_REQUEST,
    SENT,
    STARTED,
    write_events,
)
from sojourn.loadgen.client.outgoing import Outgoing
from sojourn.loadgen.replies.reply import Reply, ReplyReader
from sojourn.loadgen.replies.sse import SseDecoder
from sojourn.loadgen.scenario.scenario import Target
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.request import save_schedule
from tests.loadgen.scenarios import log_of, replayed, scenario

TEXTS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), min_size=1, max_size=6)
CUTS = st.lists(st.integers(1, 40), max_size=60)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, position = [], 0
    for size in sizes:
        pieces.append(data[position : position + size])
        position += size
    return [piece for piece in [*pieces, data[position:]] if piece]


def events(pieces: list[bytes]) -> list[str]:
    decoder = SseDecoder()
    return [event.data for piece in pieces for event in decoder.feed(piece) if event.data]


def chunked(*parts: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def event(content) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def text_event(text: str, total: int | None = None, **choice) -> bytes:
    usage = {} if total is None else {"usage": {"prompt_tokens": 3, "completion_tokens": total}}
    return event({"choices": [{"text": text, **choice}], **usage})


def read(data: bytes, sizes: list[int] = ()) -> Reply:
    """The reply; every piece is stamped with its number, from 1 on."""
    reader = ReplyReader()
    for stamp, piece in enumerate(cut(data, list(sizes)), start=1):
        reader.feed(piece, stamp)
    return reader.end()


def document(status: int, content: bytes) -> bytes:
    return (
        b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(content))
        + content
    )


@given(st.lists(TEXTS, max_size=4), st.sampled_from([b"\n", b"\r\n", b"\r"]), CUTS, st.booleans())
def test_any_cut_of_the_stream_gives_the_events_that_were_sent(texts, newline, sizes, with_comments):
    noise = b": ping" + newline + b"event: x" + newline + newline if with_comments else b""
    lines = [b"".join(b"data: " + line.encode() + newline for line in text) for text in texts]
    stream = b"".join(noise + line + newline for line in lines)
    assert events(cut(stream, sizes)) == ["\n".join(text) for text in texts]


@given(st.text("dat: x\r\n").map(str.encode), CUTS)
def test_any_cut_of_anything_gives_what_the_whole_gives(stream, sizes):
    assert events(cut(stream, sizes)) == events([stream])


def test_data_of_several_lines_is_one_event():
    assert events([b"data: a\ndata:b\nid: 7\n\ndata\n\n"]) == ["a\nb"]


@given(TEXTS, CUTS)
def test_any_cut_of_a_reply_gives_its_text_and_its_token_counts(texts, sizes):
    parts = [text_event(text, 2 * number) for number, text in enumerate(texts, start=1)]
    reply = read(chunked(*parts, event(b"[DONE]")), sizes)
    assert reply.text == "".join(texts) and reply.chunk_tokens == [2] * len(texts)
    assert reply.finished and reply.complete and reply.error is None
    assert reply.chunk_ns == sorted(reply.chunk_ns) and len(reply.chunk_ns) == len(texts)


def test_chunk_is_stamped_when_its_last_byte_was_read():
    first, second = text_event("a"), text_event("b")
    data = chunked(first, second)
    end_of_first = data.index(b"\n\n") + 2
    reply = read(data, [end_of_first - 1, 1])
    assert reply.chunk_ns == [2, 3]
    assert read(data).chunk_ns == [1, 1]  # both in one read: one stamp


def test_role_alone_and_empty_text_are_no_first_token():
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    content = event({"choices": [{"delta": {"content": "hi"}}]})
    data = chunked(role, content)
    assert read(data, [data.index(content) - 5]).chunk_ns == [2]
    assert read(chunked(event({"choices": [{"delta": {"reasoning_content": "hm"}}]}))).text == "hm"


def test_tokens_without_text_are_counted_with_the_next_text():
    reply = read(chunked(text_event("a", 1), text_event("", 2), text_event("é", 3)))
    assert reply.chunk_tokens == [1, 2]


def test_tokens_of_a_chunk_are_estimated_where_the_server_tells_their_total_alone():
    last = event({"choices": [], "usage": {"completion_tokens": 9}})
    reply = read(chunked(text_event("ab", 1), text_event("abcdef"), last))
    assert reply.output_tokens == 9 and reply.chunk_tokens == [3, 6] and reply.tokens.source == "estimated"


def test_usage_of_the_last_chunk_counts():
    last = {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    }
    reply = read(chunked(text_event("a"), text_event("b", finish_reason="stop"), event(last)))
    assert (reply.prompt_tokens, reply.output_tokens, reply.cached_tokens, reply.finished) == (5, 2, 4, True)


def test_error_event_is_the_reply_s_error_and_keeps_what_came_before():
    reply = read(chunked(text_event("a"), event({"error": {"message": "the core died"}}), event(b"[DONE]")))
    assert reply.error == "the core died" and reply.text == "a"


def test_http_error_is_told_with_its_status_and_message():
    assert read(document(429, b'{"error": {"message": "full"}}')).error == "HTTP 429: full"
    assert read(document(422, b'{"detail": "no such field"}')).error == "HTTP 422: no such field"
    assert read(document(502, b"<html>bad gateway</html>")).error == "HTTP 502: <html>bad gateway</html>"


def test_reply_that_is_not_streamed_is_one_chunk():
    content = {
        "choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 2},
    }
    reply = read(document(200, json.dumps(content).encode()))
    assert (reply.text, reply.output_tokens, len(reply.chunk_ns), reply.finished) == ("hello", 2, 1, True)


def test_what_is_not_json_and_what_is_not_http_are_errors():
    assert "not a JSON object" in read(chunked(event(b"{broken"))).error
    assert "not a JSON object" in read(document(200, b"hello")).error
    assert "not an HTTP reply" in read(b"SSH-2.0-OpenSSH\r\n").error
    assert read(chunked(event({"error": None, "choices": []}))).error is None


def unsized(content: bytes) -> bytes:
    """A document without a length: it ends where the connection does."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + content


@pytest.mark.parametrize("form", [lambda content: chunked(event(content)), unsized, lambda c: document(200, c)])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"choices": [null]}', "`choices` of the reply has the entry None, but should have objects"),
        (b'{"choices": {"text": "a"}}', "`choices` of the reply is {'text': 'a'}, but should be a list"),
        (b'{"usage": [1]}', "`usage` of the reply is [1], but should be an object"),
        (b'{"usage": {"prompt_tokens": "7"}}', "`usage.prompt_tokens` of the reply is '7', but should be a number of"),
        (b'{"usage": {"completion_tokens": true}}', "`usage.completion_tokens` of the reply is True"),
        (b'{"usage": {"prompt_tokens": 9999999999999999999}}', "`usage.prompt_tokens` of the reply is 9999999999"),
        (b'{"choices": [{"delta": {"content": ["a"]}}]}', "`content` of the reply is ['a'], but should be text"),
        (b'{"choices": [{"delta": {"tool_calls": [{"function": {"arguments": 1}}]}}]}', "`arguments` of the rep"),
        (b'{"error": {"message": "bad \\ud800"}}', "bad ?"),
        (b'{"error": "\\udfff"}', "?"),
    ],
)  # fmt: skip
def test_content_of_another_type_is_told_by_its_name(form, content, sentence):
    assert read(form(content)).error.startswith(sentence)


KEYS = ("error", "choices", "usage", "completion_tokens", "delta", "text", "message", "x")
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
)  # fmt: skip
FORMS = (unsized, lambda c: document(200, c), lambda c: document(500, c), lambda c: chunked(event(c)), bytes)


SAID = st.sampled_from(["", None, "a", '"', "\\", "{}"])
CALL = st.fixed_dictionaries({}, optional={"name": SAID, "arguments": SAID})
DELTA = st.fixed_dictionaries({"role": st.just("assistant")}, optional={
    "content": SAID, "reasoning": SAID, "reasoning_content": SAID,
    "tool_calls": st.lists(st.fixed_dictionaries({"id": st.just("c"), "function": CALL}), max_size=2),
})  # fmt: skip


@given(DELTA, st.sampled_from([(",", ":"), (", ", ": ")]))
@example({"tool_calls": [{"function": {"arguments": "", "name": "weather"}}]}, (",", ":"))
def test_patience_and_ttft_agree_on_what_a_first_token_is(delta, separators):
    event = {"id": "x", "model": "name", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    data = b"data: " + json.dumps(event, separators=separators).encode() + b"\n\n"
    assert leaves_by_patience(data) != bool(read(HEAD + data).chunk_ns)


@pytest.mark.parametrize("delta", [
    {"reasoning_details": [{"type": "reasoning.encrypted", "data": "gAAA"}]},
    {"reasoning_details": [{"type": "reasoning.summary", "summary": "first"}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "x"}]}, {"type": "text", "text": "hm"}]},
    {"audio": {"data": "UklGRg"}}, {"tool_calls": [{"custom": {"name": "c", "input": "x"}}]},
    {"function_call": {"name": "weather"}}, {"reasoning": {"content": "hm"}},
])  # fmt: skip
def test_patience_ends_at_each_shape_of_a_first_text(delta):
    data = event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    assert not leaves_by_patience(data) and not leaves_by_patience(data, cut_at=len(data) // 2)


@pytest.mark.parametrize("data", [
    b": ping\n\n", event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
    event({"object": "chat.completion.chunk", "content": "not of a choice", "choices": []}),
    event({"choices": [{"index": 0, "delta": {"tool_calls": [{"id": "text", "type": "function"}]}}]}),
])  # fmt: skip
def test_patience_does_not_end_at_what_is_no_text(data):
    assert leaves_by_patience(data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def leaves_by_patience(data: bytes, cut_at: int = 0) -> bool:
    """Whether a client that waits a second for the first token would still leave after these bytes."""
    exchange = Exchange(Outgoing(0, 0, b"", Target(), patience_ns=10**9), 0)
    exchange.sent_ns = 0
    for piece in (HEAD + data[:cut_at], data[cut_at:]):
        exchange.feed(piece, 7)
    return exchange.deadline()[1] == CANCELLED


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(FORMS), ANY_JSON.map(lambda v: json.dumps(v).encode()) | st.binary()),
                min_size=1, max_size=4))  # fmt: skip
@example([(unsized, b"[" * 200_000)])
@example([(bytes, b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")])
def test_no_reply_whatever_it_is_costs_another_request_its_record(odd):
    replies = [form(content) for form, content in odd] + [document(200, b'{"choices": [{"text": "good"}]}')]
    chosen = scenario({"process": "at_once", "count": len(replies)})
    recorded = [(NO_REQUEST, 0, STARTED, b"")]
    for index, data in enumerate(replies):
        recorded += [
            (index, 1, DISPATCHED, b""), (index, 2, SENT, b""), (index, 3, BYTES, data), (index, 4, CLOSED, b""),
        ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        save_schedule(Path(folder), build_schedule(chosen, 0, "t"), chosen)
        write_events(Path(folder), log_of(recorded), 0)
        records = replayed(Path(folder)).records
    assert len(records) == len(replies) and records[-1].status == "ok"


def test_first_token_of_the_answer_is_told_apart_from_that_of_the_reasoning():
    thoughts = [event({"choices": [{"delta": {"reasoning_content": "hm"}}]})] * 2
    answer, both = ({"content": "so"}, {"reasoning": "hm", "content": "so"})
    for last, reasons in ((answer, True), (both, True)):
        reader = ReplyReader()
        parts = [*thoughts, event({"choices": [{"delta": last}]})]
        for now_ns, piece in enumerate(parts):
            head = chunked()[:-5] if not now_ns else b""
            reader.feed(head + b"%x\r\n%s\r\n" % (len(piece), piece), now_ns)
        assert (reader.reply.chunk_ns[0], reader.reply.first_answer_ns, reader.reply.reasons) == (0, 2, reasons)
    plain = read(chunked(text_event("so")))
    assert plain.first_answer_ns is not None and not plain.reasons
