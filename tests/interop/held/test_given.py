"""Whatever bytes are given, they are read or refused in a sentence."""

import bz2
import gzip
import lzma
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.interop.held.given import Given
from sojourn.interop.held.registry import read_held
from sojourn.metrics.errors import InputError

LINE = "INFO 11-28 16:00:00 [loggers.py:257] Engine 000: Running: 3 reqs, Waiting: 4 reqs"
AT = 1_764_345_600_123_000_000  # 2025-11-28T16:00:00.123Z
CARRIED = {
    "compose": (f"vllm-1  | {LINE}", None),
    "kubectl": (f"[pod/vllm-0/server] {LINE}", None),
    "CRI": (f"2025-11-28T16:00:00.123Z stdout F {LINE}", AT),
    "docker logs -t": (f"2025-11-28T16:00:00.123000000Z {LINE}", AT),
    "docker json": (f'{{"log":"{LINE}\\n","stream":"stdout","time":"2025-11-28T16:00:00.123Z"}}', AT),
    "journalctl": (f"Nov 28 16:00:00 host vllm[123]: {LINE}", None),
    "journalctl -o short-iso": (f"2025-11-28T17:00:00.123+01:00 host vllm[123]: {LINE}", AT),
    "colours": (f"\x1b[32m{LINE}\x1b[0m", None),
}


@pytest.mark.parametrize("carried", CARRIED.values(), ids=CARRIED)
def test_a_line_is_the_same_whoever_carried_it(carried):
    text, ns = carried
    (line,) = Given(text.encode(), "log").lines
    assert (line.text, line.ns) == (LINE, ns)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_text_is_the_same_in_any_encoding_and_packing(encoding, pack):
    assert Given(pack(f"{LINE}\r\n{LINE}\r\n".encode(encoding)), "log").text == f"{LINE}\n{LINE}\n"


def test_a_packed_file_that_was_cut_off_says_so():
    cut = Given(gzip.compress((LINE + "\n").encode() * 5000)[:-20], "log")
    assert cut.text.startswith(LINE) and "cut off" in cut.problem


PACKED = st.sampled_from([b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"{", b"BZh9"])


@settings(deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=300)
       | st.tuples(PACKED, st.binary(max_size=60)).map(lambda parts: parts[0] + parts[1]))  # fmt: skip
def test_no_bytes_end_in_a_traceback(content):
    try:
        read_held(content, "file")
    except InputError as error:
        assert str(error).startswith("file")


def test_lines_beyond_the_most_are_said_to_be_left_out(monkeypatch):
    monkeypatch.setattr("sojourn.interop.held.given.MOST_LINES", 3)
    whole = "INFO 11-28 16:00:00 [x.py:1] vLLM API server version 0.11.0\n" * 3
    assert not any("only its beginning" in note for note in read_held(whole, "log")[0].notes)
    assert any("only its beginning is read" in note for note in read_held(whole + whole, "log")[0].notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n0.1,10,20\n", "is a trace of requests"),
        ('{"task": "why does it say Traceback (most recent call last)?"}\n', "JSON of no known tool"),
        ('{"throughput": 1}', "GuideLLM"), ("ts,phase,power_w\n1,a,2\n", "give a log, a page"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_with_what_to_give(text, words):
    with pytest.raises(InputError, match=re.escape(words)):
        read_held(text, "file")
