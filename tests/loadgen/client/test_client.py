"""The client against a server whose delays are known. Sleeps never end early, so lower bounds are exact; upper bounds
leave 150 ms to a machine that does other work, unless something says otherwise."""

import gevent
import numpy as np
import pytest

from sojourn.loadgen.client import dispatcher as client
from sojourn.loadgen.client.event_log import CLOSED, event_files
from sojourn.loadgen.record.parse import events_by_request
from tests.loadgen.scenarios import replay, replayed, scenario
from tests.loadgen.scripted_server import Script, ScriptedServer

pytestmark = pytest.mark.server

NOISE_S = 0.15


def latencies_s(parsed) -> np.ndarray:
    return np.array([(record.first_token_ns - record.due_ns) / 1e9 for record in parsed.records])


def test_delay_of_a_stalled_server_shows_in_full_from_the_intended_time(tmp_path):
    """Ten requests a second, and a server silent from 0.5 to 1.5 s: a closed loop would see one slow request."""
    script = Script(first_token_s=0.02, gap_s=0.001, stall_from_s=0.5, stall_to_s=1.5)
    server = ScriptedServer(script).start()
    parsed = replay(scenario({"process": "constant", "rate_rps": 10, "count": 20}), server.url, tmp_path)
    since_first = np.array([record.due_ns - server.first_ns for record in parsed.records]) / 1e9
    ideal = np.full(len(since_first), script.first_token_s)
    stalled = (since_first >= script.stall_from_s) & (since_first < script.stall_to_s)
    ideal[stalled] = script.stall_to_s - since_first[stalled] + script.first_token_s
    excess = latencies_s(parsed) - ideal
    assert stalled.sum() >= 9
    # a request due just before the stall may be caught by it between its arrival and its first token
    surely = (since_first < script.stall_from_s - 0.15) | (since_first > script.stall_to_s) | stalled
    assert (excess[surely] > -0.03).all() and np.median(excess) < NOISE_S
    assert latencies_s(parsed)[stalled].mean() > 0.4  # the mean of a stall of 1 s, met at a random moment, is 0.5 s


def test_requests_are_sent_on_time_while_others_are_in_flight(tmp_path):
    server = ScriptedServer(Script(first_token_s=0.5, num_tokens=1)).start()
    parsed = replay(scenario({"process": "constant", "rate_rps": 50, "count": 40}), server.url, tmp_path)
    arrived = np.sort([seen["arrived_ns"] for seen in server.seen])
    due = np.array([record.due_ns for record in parsed.records])
    assert (arrived >= due).all()
    assert np.median(arrived - due) / 1e9 < 0.05
    assert arrived[-1] < parsed.records[0].last_byte_ns + 0.4e9  # all were sent within 0.8 s, none waited for another


def test_gaps_between_tokens_are_those_of_the_server(tmp_path):
    server = ScriptedServer(Script(first_token_s=0.1, gap_s=0.03, num_tokens=10)).start()
    record = replay(scenario({"process": "at_once", "count": 1}), server.url, tmp_path).records[0]
    gaps = np.diff(record.chunk_ns) / 1e9
    assert record.status == "ok" and record.chunk_tokens == [1] * 10
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 10, 3)
    assert 0.1 <= (record.first_token_ns - record.sent_ns) / 1e9 < 0.1 + NOISE_S
    assert gaps.sum() > 0.03 * 9 - 0.05  # the first token may have been read late, which shortens the sum
    assert np.median(gaps) == pytest.approx(0.03, abs=0.02)


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ({"break_after": 2}, "error", "the stream ended before its last event"),
        ({"error_after": 2}, "error", "the core died"),
        ({"status": 429}, "error", "HTTP 429: scripted 429"),
        ({"hang": True}, "timeout", "no complete reply within target.timeout_s, 1 s from when it was due"),
        ({"keep_open": True}, "ok", None),
        ({"usage": False}, "ok", None),
    ],
)
def test_each_way_a_reply_can_end_has_its_status(tmp_path, script, status, error):
    server = ScriptedServer(Script(**script)).start()
    parsed = replay(scenario(target={"timeout_s": 1}), server.url, tmp_path)
    assert [(record.status, record.error) for record in parsed.records] == [(status, error)] * 3
    assert [len(record.chunk_ns) for record in parsed.records] == [{"break_after": 2, "error_after": 2, "status": 0,
        "hang": 0}.get(next(iter(script)), 5)] * 3  # fmt: skip
    if status == "ok":
        events = [event for _, events in events_by_request(event_files(tmp_path)) for event in events]
        ends = [ns - parsed.records[0].due_ns for _, ns, kind, _ in events if kind == CLOSED]
        assert len(ends) == 3 and max(ends) < 0.9e9  # by itself, not by the timeout of a second


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_reply_that_is_not_streamed_is_read_too(tmp_path, api):
    server = ScriptedServer().start()
    whole = scenario(target={"api": api, "stream": False}, objectives=[{"e2e_ms": 500, "source": "made up"}])
    parsed = replay(whole, server.url, tmp_path)
    assert {(record.status, record.output_tokens) for record in parsed.records} == {("ok", 5)}


def test_server_that_vanishes_is_an_error_of_every_request(tmp_path, monkeypatch):
    server = ScriptedServer().start()
    monkeypatch.setattr(client, "first_that_connects", lambda endpoint: (2, ("127.0.0.1", 1)))  # nobody listens there
    records = replay(scenario(), server.url, tmp_path).records
    assert {record.status for record in records} == {"error"} and "refused" in records[0].error


def test_prelude_is_answered_before_the_schedule_starts(tmp_path):
    server = ScriptedServer().start()
    parsed = replay(scenario(measure={"warmup_requests": 2}), server.url, tmp_path)
    first, second, *rest = parsed.records
    assert first.last_byte_ns <= second.due_ns and second.last_byte_ns <= min(record.due_ns for record in rest)
    assert len(rest) == 3


def test_stopped_replay_cancels_what_is_in_flight_and_keeps_what_was_stamped(tmp_path):
    server = ScriptedServer(Script(gap_s=0.05, num_tokens=100)).start()
    times = {"process": "times", "times_s": [0, 0.1, 5]}
    greenlet = gevent.spawn(lambda: replay(scenario(times), server.url, tmp_path))
    while len(server.seen) < 2:
        gevent.sleep(0.05)
    gevent.sleep(0.8)
    greenlet.kill()
    records = replayed(tmp_path).records
    assert [record.status for record in records] == ["cancelled", "cancelled", "missing"]
    assert len(records[0].chunk_ns) > 5
