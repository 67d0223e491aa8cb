"""Our client against a server that records what it truly did: the client's record must be the server's, one to one.

Both read one clock, so that a stamp of the client before the write of the server would be a fault of one of the two.
"""

import json
import subprocess
import sys
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from sojourn.loadgen.reference_server.instructions import ReferenceLog, ReplyTiming, ServedRequest
from sojourn.loadgen.target.endpoint import get, parse_base_url
from tests.loadgen.scenarios import replay, scenario

pytestmark = pytest.mark.server


@contextmanager
def reference_server(**timing):
    """A reference server as a process. Gives its address."""
    command = [sys.executable, "-m", "sojourn.loadgen.reference_server.server", json.dumps(timing)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


@pytest.fixture(scope="module")
def quick_server():
    """One server for the tests that ask for nothing else: each stream on its own, one token a chunk."""
    with reference_server(**QUICK) as url:
        yield url


def log_of(url: str) -> ReferenceLog:
    return msgspec.json.decode(get(parse_base_url(url), "/log")[1], type=ReferenceLog)


def answers_to(parsed, url: str) -> list[ServedRequest]:
    """What the server did for each record, in their order."""
    answers = {answer.request_id: answer for answer in log_of(url).requests}
    return [answers[record.request_id] for record in parsed.records]


QUICK = {"ttft_s": 0.03, "token_s": 0.005}


def requests(num_tokens: int = 24, count: int = 12, **blocks):
    klass = {"klass": "chat", "prompt_tokens": 13, "output_tokens": num_tokens}
    return scenario({"process": "constant", "rate_rps": 100, "count": count}, [klass], **blocks)


@pytest.mark.parametrize(
    ("api", "tokens_per_chunk", "in_step"),
    [("completions", 1, False), ("chat", 1, True), ("completions", 5, True), ("chat", 5, False)],
)
def test_every_chunk_is_stamped_after_its_write_in_order_and_counted(tmp_path, api, tokens_per_chunk, in_step):
    with reference_server(**QUICK, tokens_per_chunk=tokens_per_chunk, in_step=in_step) as url:
        parsed = replay(requests(target={"api": api}), url, tmp_path, model="reference")
        answers = answers_to(parsed, url)
    errors_ns = []
    for record, answer in zip(parsed.records, answers, strict=True):
        assert (record.status, answer.end) == ("ok", "ok")
        assert record.chunk_tokens == answer.tokens
        assert (record.prompt_tokens, record.output_tokens) == (answer.prompt_tokens, 24) and sum(answer.tokens) == 24
        assert record.sent_ns <= answer.read_ns
        errors_ns += (np.array(record.chunk_ns) - np.array(answer.write_ns)).tolist()
        assert np.all(np.diff(record.chunk_ns) >= 0)
    assert min(errors_ns) >= 0
    assert np.median(errors_ns) < 20e6  # beside whatever else this machine does; alone it is some 0.1 ms


def test_writes_are_never_early_and_keep_an_absolute_schedule(tmp_path, quick_server):
    parsed = replay(requests(), quick_server, tmp_path, model="reference", id_prefix="absolute")
    for answer in answers_to(parsed, quick_server):
        due_ns = np.array(answer.due_ns)
        assert np.all(np.array(answer.write_ns) >= due_ns)
        assert np.all(np.diff(due_ns) == 5_000_000)  # however late a write was, the next one is due when it was due
        assert due_ns[0] - answer.read_ns == 30_000_000


def test_streams_in_step_share_the_moments_of_their_writes(tmp_path):
    with reference_server(**QUICK, in_step=True) as url:
        replay(requests(), url, tmp_path, model="reference")
        log = log_of(url)
    due_ns = np.array([ns for answer in log.requests for ns in answer.due_ns])
    assert len(np.unique(due_ns % 5_000_000)) == 1
    assert all(30_000_000 <= answer.due_ns[0] - answer.read_ns < 35_000_000 for answer in log.requests)


@pytest.mark.parametrize("usage", ["continuous", "final", "none"])
def test_counts_are_the_servers_where_it_tells_them_and_absent_where_it_does_not(tmp_path, quick_server, usage):
    asked = requests(count=1, target={"usage": usage})
    record, *_ = replay(asked, quick_server, tmp_path, model="reference", id_prefix=usage).records
    assert record.output_tokens == (None if usage == "none" else 24)
    assert record.chunk_tokens == ([1] * 24 if usage == "continuous" else [])
    assert len(record.chunk_ns) == 24


def test_errors_and_resets_that_were_asked_for_are_the_clients_too(tmp_path):
    with reference_server(**QUICK, error_every=3, reset_every=4) as url:
        parsed = replay(requests(), url, tmp_path, model="reference")
        answers = answers_to(parsed, url)
    ends = [answer.end for answer in answers]
    assert sorted(ends) == ["error"] * 4 + ["ok"] * 6 + ["reset"] * 2
    assert [record.status for record in parsed.records] == ["ok" if end == "ok" else "error" for end in ends]
    assert [len(answer.tokens) for answer in answers if answer.end == "reset"] == [12, 12]
    resets = [record for record, end in zip(parsed.records, ends, strict=True) if end == "reset"]
    assert all(len(record.chunk_ns) <= 12 and "reset" in record.error.lower() for record in resets)


def test_reply_that_is_not_streamed_comes_when_its_last_token_would(tmp_path, quick_server):
    whole = requests(count=2, target={"stream": False}, objectives=[{"e2e_ms": 500, "source": "made up"}])
    parsed = replay(whole, quick_server, tmp_path, model="reference", id_prefix="whole")
    assert [record.output_tokens for record in parsed.records] == [24, 24]
    for answer in answers_to(parsed, quick_server):
        assert answer.due_ns[0] - answer.read_ns == 30_000_000 + 23 * 5_000_000


def test_stall_shows_in_full_in_the_latencies_of_the_requests_that_were_due_in_it(tmp_path):
    """A hundred requests a second, and a server that does nothing for a second. A client that waits for replies before
    it sends would see one slow request of a second; from the intended send, the sum of all is known in closed form."""
    arrivals = {"process": "constant", "rate_rps": 100, "count": 160}
    asked = scenario(arrivals, [{"klass": "chat", "prompt_tokens": 13, "output_tokens": 2}])
    with reference_server(**QUICK, stall_at_s=0.2, stall_s=1.0) as url:
        parsed = replay(asked, url, tmp_path, model="reference")
        ((from_ns, to_ns),) = log_of(url).stalls
        answers = answers_to(parsed, url)
    assert {record.status for record in parsed.records} == {"ok"}
    pairs = zip(parsed.records, answers, strict=True)
    stalled = [(record, answer) for record, answer in pairs if from_ns <= record.due_ns < to_ns]
    latencies_s = np.array([record.first_token_ns - record.due_ns for record, _ in stalled]) / 1e9
    closed_form_s = np.array([to_ns - record.due_ns for record, _ in stalled]) / 1e9 + QUICK["ttft_s"]
    assert len(stalled) >= 99 and (to_ns - from_ns) / 1e9 >= 1.0
    assert np.all(latencies_s >= closed_form_s)
    # some 53 s, and what the server itself took after the stall on a machine that does other work
    after_s = np.array([answer.write_ns[0] - to_ns for _, answer in stalled]) / 1e9 - QUICK["ttft_s"]
    assert latencies_s.sum() == pytest.approx(closed_form_s.sum() + after_s.sum(), rel=0.02)
    for answer in answers:  # its own time stood still, too
        if answer.read_ns < from_ns < answer.read_ns + 29_000_000:
            assert answer.due_ns[0] == answer.read_ns + 30_000_000 + (to_ns - from_ns)


def test_nobody_is_read_before_the_delay_of_a_slow_accept(tmp_path):
    with reference_server(**QUICK, accept_delay_s=0.2) as url:
        record, *_ = replay(requests(count=1), url, tmp_path, model="reference").records
        answer = log_of(url).requests[0]
    assert answer.read_ns - record.sent_ns > 0.15e9


def test_truth_that_cannot_be_kept_is_refused_by_its_field():
    assert ReplyTiming().fault() is None
    assert "token_s is 0; it must be at least 1e-06" in ReplyTiming(token_s=0).fault()
    assert "ttft_s is nan" in ReplyTiming(ttft_s=float("nan")).fault()
