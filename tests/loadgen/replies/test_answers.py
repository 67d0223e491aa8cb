"""What counts as an answer: each shape of an error fails, each heartbeat is nothing, and a cut stream is no end."""

import gzip
import json
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.loadgen.replies.answer_text import answer_of
from sojourn.loadgen.replies.front import front_times
from sojourn.loadgen.replies.reply import NO_TOKEN, Reply
from tests.loadgen.replies.test_reply import CUTS, chunked, document, event, read

DONE = event(b"[DONE]")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"


def words(text: str, finish: str | None = None, **more) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more})


def usage(output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": output}})


ANSWER = (words("a"), words(" b"), words("", "stop"))

ERRORS = {
    "OpenAI": event({"error": {"message": "out of order", "code": 500}}),
    "a text": event({"error": "out of order"}),
    "a flag and a text beside it": event({"error": True, "message": "out of order"}),
    "a list of errors": event({"errors": [{"message": "out of order"}]}),
    "nested twice": event({"error": {"error": {"message": "out of order"}}}),
    "vLLM before 0.10": event({"object": "error", "message": "out of order", "code": 400}),
    "Anthropic": event({"type": "error", "error": {"type": "overloaded", "message": "out of order"}}),
    "FastChat": event({"text": "out of order", "error_code": 50001, "message": "out of order"}),
    "FastAPI": event({"detail": "out of order"}),
    "FastAPI, of a field": event({"detail": [{"loc": ["body"], "msg": "out of order"}]}),
    "a status and its text": event({"status": 503, "title": "out of order"}),
    "of a choice": event({"choices": [{"index": 0, "error": {"message": "out of order"}, "finish_reason": "error"}]}),
    "SGLang's finish reason": event({"choices": [{"index": 0, "delta": {}, "finish_reason":
                                     {"type": "abort", "message": "out of order"}}]}),
    "a named event": b"event: error\ndata: out of order\n\n",
    "a named event with JSON": b'event: error\ndata: {"message": "out of order", "code": 500}\n\n',
    "a named event with a comment": b"event: error\n: out of order\n\n",
    "llama.cpp until 2025": b'error: {"code": 400, "message": "out of order"}\n\n',
}  # fmt: skip


@pytest.mark.parametrize("shape", ERRORS)
@pytest.mark.parametrize("place", [0, 2])
def test_error_in_any_shape_fails_the_answer_with_the_server_s_words(shape, place):
    parts = [*ANSWER[:place], ERRORS[shape], *ANSWER[place:], usage(2), DONE]
    reply = read(chunked(*parts))
    assert reply.error is not None and "out of order" in reply.error


@pytest.mark.parametrize("shape", ERRORS)
@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_session_ends_at_the_same_failures_as_the_record_of_its_turn(shape, place):
    whole = chunked(*ANSWER[:place], ERRORS[shape], *ANSWER[place:], usage(2), DONE)
    answer, fault = answer_of(whole, "chat")
    assert answer == b"" and fault == read(whole).error


SAID = st.sampled_from([
    "error", '"error": {"message": "x"}', "event: error", "the abort failed", '"finish_reason": "error"', "\\", '"',
    '{"detail": "no"}', "\nerror: 1", '"code": 500', "cancel", "ü",
])  # fmt: skip


@given(st.lists(SAID, min_size=1, max_size=5), st.sampled_from([{}, {"error": None}, {"errors": []}, {"error": ""}]))
def test_words_of_an_answer_are_no_failure_and_are_not_read_in_full(said, beside):
    """Between two turns only what has a key of an error is decoded."""
    whole = chunked(*(words(text, **beside) for text in said), b": OPENROUTER PROCESSING\n\n", words("", "stop"), DONE)
    with patch("sojourn.loadgen.replies.answer_text.ReplyReader", side_effect=AssertionError("read in full")):
        answer, fault = answer_of(whole, "chat")
    assert fault == "" and json.loads(b'"' + answer + b'"') == "".join(said) == read(whole).text


def test_a_session_goes_on_with_the_answer_of_a_packed_reply():
    body = gzip.compress(b"".join((*ANSWER, DONE)))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
    assert answer_of(head + b"Content-Length: %d\r\n\r\n" % len(body) + body, "chat") == (b"a b", "")


@pytest.mark.parametrize("whole", [
    chunked(words("a"), words("b")),  # no end
    chunked(words("", "stop"), DONE),  # no token
    HEAD % b"text/html" + chunked(*ANSWER, DONE).partition(b"\r\n\r\n")[2],  # events under another type
    chunked(words("a", "stop")[:-9]),
])  # fmt: skip
def test_a_session_does_not_go_on_with_what_is_no_answer(whole):
    answer, fault = answer_of(whole, "chat")
    assert answer == b"" and fault


@pytest.mark.parametrize("shape", [name for name, data in ERRORS.items() if data.startswith(b"data: {")])
def test_error_as_a_document_with_status_200_fails_the_answer(shape):
    reply = read(document(200, ERRORS[shape].removeprefix(b"data: ").strip()))
    assert reply.error is not None and "out of order" in reply.error


@pytest.mark.parametrize(
    "reason",
    ["abort", "aborted", "error", "ERROR", "cancelled", "canceled", "internal_error", "engine_failure", "timeout",
     "insufficient_system_resource", "MALFORMED_FUNCTION_CALL", "server_shutdown", "service_unavailable"],
)  # fmt: skip
def test_finish_reason_of_a_failure_fails_the_answer(reason):
    reply = read(chunked(words("a"), words("", reason), usage(1), DONE))
    assert reply.error is not None and reason in reply.error


@pytest.mark.parametrize(
    "reason", ["stop", "length", "tool_calls", "function_call", "content_filter", "eos", "end_turn"]
)
def test_finish_reason_of_an_end_is_none(reason):
    reply = read(chunked(words("a"), words("", reason), usage(1), DONE))
    assert reply.error is None and reply.finished


BEATS = {
    "comment": b": keep-alive\n\n",
    "comment alone on its line": b":\n\n",
    "empty data": b"data:\n\n",
    "blank data": b"data:  \n\n",
    "comment as data": b"data: : keepalive\n\n",
    "OpenRouter": b": OPENROUTER PROCESSING\n\n",
    "ping": b"event: ping\ndata: ping\n\n",
    "ping with JSON": b'event: ping\ndata: {"type": "ping"}\n\n',
    "ping without data": b"event: ping\n\n",
    "a word": b"data: [PING]\n\n",
    "heartbeat": b"event: heartbeat\ndata: 17\n\n",
    "null": b"data: null\n\n",
    "nothing": b"data: {}\n\n",
    "role": words("", role=None),
    "no choice": event({"choices": []}),
    "usage of the prompt": usage(0),
    "blank lines": b"\n\n\n",
    "id and retry": b"id: 7\nretry: 100\n\n",
    "filter results": event({"choices": [], "prompt_filter_results": [{"index": 0}]}),
}


@pytest.mark.parametrize("beat", BEATS)
@given(sizes=CUTS, place=st.integers(0, 3))
def test_heartbeat_is_no_chunk_and_no_failure(beat, sizes, place):
    parts = [*ANSWER[:place], BEATS[beat], *ANSWER[place:], usage(2), DONE]
    reply = read(chunked(*parts), sizes)
    assert reply.error is None and reply.finished and reply.text == "a b"
    assert len(reply.chunk_ns) == 2 and reply.output_tokens == 2


def cut_off(*parts: bytes) -> bytes:
    """A stream whose connection is cut behind these parts: the last piece of the body does not come."""
    return chunked(*parts).removesuffix(b"0\r\n\r\n")


ENDS = {
    "[DONE]": (cut_off(words("a"), DONE), True),
    "[DONE] without its blank line": (chunked(words("a"), b"data: [DONE]"), True),
    "a finish reason and the end of the message": (chunked(words("a"), words("", "stop")), True),
    "a finish reason, then cut": (cut_off(words("a"), words("", "stop")), True),
    "a finish reason with each chunk, then cut": (cut_off(words("a", "stop"), words("b", "stop")), False),
    "a finish reason with each chunk, and the end": (chunked(words("a", "stop"), words("b", "stop")), True),
    "one of two choices": (chunked(words("a", "stop"), event({"choices": [{"index": 1, "text": "b"}]})), False),
    "cut within an event": (cut_off(words("a"), b'data: {"choi'), False),
    "the end of the message alone": (chunked(words("a")), False),
    "nothing": (chunked(), False),
}


@pytest.mark.parametrize("name", ENDS)
def test_stream_is_whole_by_its_last_event_or_by_a_finish_reason_that_no_text_follows(name):
    data, whole = ENDS[name]
    reply = read(data)
    assert reply.finished == whole and reply.error is None


@pytest.mark.parametrize(
    "data",
    [chunked(DONE), chunked(words(""), words("", "stop"), DONE), chunked(usage(0), DONE),
     document(200, b'{"choices": []}'), document(200, b'{"choices": [{"text": "", "finish_reason": "stop"}]}')],
)  # fmt: skip
def test_answer_without_a_token_is_failed(data):
    assert read(data).error == NO_TOKEN


def test_tokens_without_text_are_tokens():
    reply = read(chunked(words("", "length"), usage(3), DONE))
    assert reply.error is None and reply.output_tokens == 3 and reply.chunk_ns == []


def test_reasoning_tools_refusals_and_audio_are_tokens():
    deltas = [
        {"reasoning_content": "a"}, {"reasoning": "a"}, {"reasoning": {"content": "a"}}, {"thinking": "a"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "a"}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "a"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]},
        {"content": [{"type": "text", "text": "a"}]}, {"refusal": "a"}, {"audio": {"transcript": "a"}},
        {"function_call": {"name": "a"}}, {"tool_calls": [{"index": 0, "function": {"arguments": "a"}}]},
        {"tool_calls": [{"index": 0, "custom": {"input": "a"}}]},
    ]  # fmt: skip
    for delta in deltas:
        reply = read(chunked(event({"choices": [{"index": 0, "delta": delta}]}), DONE))
        assert reply.error is None and len(reply.chunk_ns) == 1 and reply.text == "a", delta


def stream(counts: list[int | None], last: int | None = None, texts: list[str] | None = None) -> Reply:
    """Chunks with text, each with its count of usage, and a last usage without text."""
    parts = [
        words(text, **({} if count is None else {"usage": {"completion_tokens": count}}))
        for count, text in zip(counts, texts or ["ab"] * len(counts), strict=True)
    ]
    return read(chunked(*parts, words("", "stop"), *([] if last is None else [usage(last)]), DONE))


@pytest.mark.parametrize(
    ("counts", "last", "total", "of_chunks"),
    [
        ([None] * 5, 5, 5, []), ([None] * 5, 6, 6, []), ([None] * 5, None, None, []),  # whole, with an end token, none
        ([1, 2, 3, 4], 4, 4, [1] * 4), ([1, 2, 3, 4], None, 4, [1] * 4), ([3, 6, 9], 9, 9, [3] * 3),  # totals so far
        ([1, 2, 3, 4], 5, 5, [1] * 4), ([1, 1, 2, 3], 3, 3, [1, 0, 1, 1]), ([1, 2, 3, 4], 0, 4, [1] * 4),
        ([1] * 8, None, 8, [1] * 8), ([1] * 8, 8, 8, [1] * 8), ([1] * 8, 1, 8, [1] * 8),  # of each chunk alone
        ([3, 3, 3, 1], None, 10, [3, 3, 3, 1]), ([3, 3, 3, 1], 10, 10, [3, 3, 3, 1]),
        ([0] * 7 + [8], 8, 8, []), ([0] * 7 + [8], None, 8, []), ([0] * 8, 8, 8, []),  # zero until the end
        ([20] * 4, 20, 20, [5] * 4),  # the whole with every chunk
        ([20] * 4, None, None, []),  # the whole, or of each chunk: nobody can tell
        ([0] * 8, None, None, []), ([0] * 8, 0, None, []), ([None] * 40, 10, None, []),
        ([1, 2, 3, 9], 5, None, []), ([None, 5, None, None], None, None, []),
        ([None], 7, 7, [7]), ([None] * 2, 20, 20, [10, 10]),  # several tokens per chunk, spread by their text
    ],
)  # fmt: skip
def test_usage_is_believed_where_it_is_consistent_and_unknown_otherwise(counts, last, total, of_chunks):
    reply = stream(counts, last)
    assert (reply.output_tokens, reply.chunk_tokens) == (total, of_chunks)
    zeros_alone = not any(counts) and not last
    assert bool(reply.tokens.doubt) == (total is None and not (zeros_alone and None in counts))


@given(st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=30), st.integers(0, 300))
def test_spread_tokens_are_at_least_one_per_chunk_and_sum_to_the_total(texts, more):
    tokens = stream([None] * len(texts), len(texts) + more, texts).tokens
    assert tokens.total == len(texts) + more
    assert not tokens.of_chunks or (sum(tokens.of_chunks) == tokens.total and min(tokens.of_chunks) >= 1)


def body(kind: bytes, content: bytes, *headers: bytes) -> bytes:
    head = (HEAD % kind).removesuffix(b"\r\n") + b"".join(header + b"\r\n" for header in headers)
    return head + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)


WHOLE = b"".join((*ANSWER, usage(2), DONE))


@given(CUTS)
def test_byte_order_mark_is_dropped(sizes):
    assert read(body(b"text/event-stream", b"\xef\xbb\xbf" + WHOLE), sizes).text == "a b"
    answer = json.dumps({"choices": [{"text": "a", "finish_reason": "stop"}]}).encode()
    assert read(body(b"application/json", b"\xef\xbb\xbf" + answer), sizes).text == "a"


@pytest.mark.parametrize("encoding", [b"gzip", b"GZIP", b"x-gzip"])
def test_packed_body_is_unpacked(encoding):
    reply = read(body(b"text/event-stream", gzip.compress(WHOLE), b"Content-Encoding: " + encoding))
    assert reply.error is None and reply.text == "a b" and reply.finished


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (body(b"text/plain", WHOLE), "content-type text/plain"),
        (body(b"text/html", b"<html>login</html>"), "content-type text/html"),
        (body(b"text/event-stream", WHOLE, b"Content-Encoding: br"), "content-encoding: br"),
        (body(b"text/event-stream", WHOLE, b"Content-Encoding: gzip"), "content-encoding"),
        (b"HTTP/1.1 307 X\r\nLocation: http://other/\r\nContent-Length: 0\r\n\r\n", "location"),
    ],
)
def test_header_that_is_to_blame_is_named(data, names):
    assert names in read(data).error


def test_error_under_the_type_of_a_stream_is_told():
    assert read(body(b"text/event-stream", b'{"error": {"message": "no worker"}}')).error == "no worker"


@given(CUTS)
def test_informational_answers_are_skipped(sizes):
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    reply = read(early + body(b"text/event-stream", WHOLE), sizes)
    assert reply.error is None and reply.text == "a b" and reply.status_code == 200 and reply.complete


@given(CUTS, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.sampled_from(sorted(ERRORS)))
def test_the_way_bytes_are_cut_never_changes_the_verdict(sizes, newline, shape):
    stream = b"".join((*ANSWER[:2], ERRORS[shape], DONE)).replace(b"\n", newline)
    whole, pieces = (read(body(b"text/event-stream", stream), cuts) for cuts in ((), sizes))
    assert (whole.error, whole.text, whole.finished) == (pieces.error, pieces.text, pieces.finished)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({b"x-litellm-overhead-duration-ms": b"None"}, None),
        ({b"x-litellm-overhead-duration-ms": b"-3"}, None),
        ({b"x-litellm-overhead-duration-ms": b"nan", b"x-litellm-response-duration-ms": b"5"}, None),
        ({b"x-litellm-overhead-duration-ms": b"2.5"}, (2.5, None)),
        ({b"x-litellm-overhead-duration-ms": b"2.5", b"x-litellm-response-duration-ms": b"12"}, (2.5, 12.0)),
    ],
)
def test_a_front_s_headers_count_only_as_durations(headers, expected):
    assert front_times(headers) == expected
