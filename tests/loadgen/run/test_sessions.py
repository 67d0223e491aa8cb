"""Sessions, closed loops and patience against a server that says what it is told: who sends what, and when."""

import heapq
import json
from itertools import pairwise

import gevent
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.diagnosis.diagnose import diagnose
from sojourn.loadgen.client.outgoing import STOPPED, Ended
from sojourn.loadgen.client.pacing import Pacer
from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.prompts.conversation import TurnParts
from sojourn.loadgen.replies.answer_text import answer_of
from sojourn.loadgen.replies.reply import ReplyReader
from sojourn.loadgen.run.experiment import load_url
from sojourn.loadgen.run.run_files import begin_run
from sojourn.loadgen.scenario.arrivals import ClosedLoop
from sojourn.loadgen.scenario.scenario import Target
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.closed_loop import QUICK_PROMPT_TOKENS, QUICK_REQUESTS, loop_doubt
from sojourn.loadgen.schedule.ideal_prefix_hits import ideal_hit_rate
from sojourn.loadgen.schedule.request import chains_of
from sojourn.loadgen.schedule.shards import loop_of, part_of
from sojourn.metrics.results.load import latency_origin, load_notes
from tests.loadgen.scenarios import CHAT, replay, replayed, scenario
from tests.loadgen.scripted_server import Script, ScriptedServer

TALK = CHAT | {"session": {"turns": 3, "think_time_s": 0.05, "turn_tokens": 4}}
AGENT = CHAT | {"session": {"turns": 3, "tool_pause_s": 0, "tool_result_tokens": 6}}


def by_session(server: ScriptedServer) -> dict[str, list[dict]]:
    """Requests of each session in the order of their turns, told by the ids that they were sent with."""
    seen = sorted(server.seen, key=lambda each: each["headers"]["x-request-id"])
    groups: dict[str, list[dict]] = {}
    for each, chain in zip(seen, range(len(seen)), strict=True):
        groups.setdefault(str(chain // 3), []).append(each)
    return groups


@pytest.mark.server
@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("klass", [TALK, AGENT])
@pytest.mark.parametrize("stream", [True, False])
def test_every_turn_carries_the_conversation_with_the_answers_that_the_server_gave(tmp_path, api, klass, stream):
    server = ScriptedServer(Script(first_token_s=0.005, gap_s=0.001)).start()
    objectives = [{"e2e_ms": 500, "source": "made up"}]
    chosen = scenario(
        {"process": "at_once", "count": 2}, [klass], target={"api": api, "stream": stream}, objectives=objectives
    )
    records = replay(chosen, server.url, tmp_path).records
    assert [(record.status, record.turn) for record in records] == [("ok", turn) for turn in (0, 1, 2)] * 2
    assert len({record.session_id for record in records}) == 2 and "" not in {record.session_id for record in records}
    answer = "w0 w1 w2 w3 w4 " if stream else "w0 w1 w2 w3 w4"
    for first, second, third in by_session(server).values():
        if api == "chat":
            said = [each["body"]["messages"] for each in (first, second, third)]
            assert [message["role"] for message in said[2]] == ["user", "assistant", "user", "assistant", "user"]
            assert said[1][:1] == said[0] and said[2][:3] == said[1]
            assert said[2][1]["content"] == said[2][3]["content"] == answer
        else:
            said = [each["body"]["prompt"] for each in (first, second, third)]
            assert said[1].startswith(said[0] + answer + " ") and said[2].startswith(said[1] + answer + " ")


@pytest.mark.server
def test_turn_is_due_when_the_answer_before_has_ended_and_the_pause_is_over(tmp_path):
    server = ScriptedServer(Script(first_token_s=0.02)).start()
    klass = TALK | {"session": {"turns": 4, "think_time_s": 0.12, "turn_tokens": 4}}
    records = replay(scenario({"process": "at_once", "count": 2}, [klass]), server.url, tmp_path).records
    for before, after in pairwise(records):
        if after.turn:
            assert after.due_ns - before.last_byte_ns == 120_000_000
            assert after.sent_ns >= after.due_ns


@pytest.mark.server
@pytest.mark.parametrize(
    ("script", "fault"),
    [({"status": 500}, "HTTP 500: scripted 500"), ({"error_after": 2}, "the core died"),
     ({"break_after": 2}, "the reply ended before its last event")],
)  # fmt: skip
def test_turn_that_fails_ends_its_session_and_the_rest_is_cancelled_with_the_reason(tmp_path, script, fault):
    server = ScriptedServer(Script(**script)).start()
    records = replay(scenario({"process": "at_once", "count": 2}, [TALK]), server.url, tmp_path).records
    assert [record.status for record in records] == ["error", "cancelled", "cancelled"] * 2
    assert records[1].error.startswith("not sent: turn 0 of its session failed: ")
    assert records[1].sent_ns is None and len(server.seen) == 2
    assert fault in records[1].error or "HTTP 500" in records[1].error


@pytest.mark.server
@pytest.mark.parametrize(("arrivals", "slots"), [
    ({"process": "concurrency", "in_flight": 3, "count": 12}, 3),
    ({"process": "users", "users": 4, "think_time_s": 0.05, "count": 12}, 4),
])  # fmt: skip
def test_closed_loop_never_has_more_in_flight_than_its_slots_and_uses_all_of_them(tmp_path, arrivals, slots):
    server = ScriptedServer(Script(first_token_s=0.03)).start()
    records = replay(scenario(arrivals), server.url, tmp_path).records
    assert [record.status for record in records] == ["ok"] * 12
    moments = sorted(
        [(record.sent_ns, 1) for record in records] + [(record.last_byte_ns, -1) for record in records],
        key=lambda moment: (moment[0], moment[1]),
    )
    in_flight = np.cumsum([step for _, step in moments])
    assert in_flight.max() == slots
    ends = [record.last_byte_ns for record in records]
    pause_ns = 50_000_000 if arrivals["process"] == "users" else 0
    later = [record.due_ns - pause_ns for record in records[slots:]]
    assert set(later) <= set(ends)  # due at the moment when a slot became free, or had thought


def test_users_begin_when_they_are_meant_to_however_soon_others_are_answered():
    """The first user is answered before the second begins: what he then asks is not what the second came for."""
    users = {"process": "users", "users": 4, "start_over_s": 40, "think_time_s": 1, "count": 12}
    chosen = scenario(users)
    schedule = build_schedule(chosen, 0, "t")
    wire = {request.index: b"" for request in schedule}
    pace = Pacer(schedule, wire, Target(timeout_s=9.0), chosen.arrivals.closed_loop, lambda *_: None, lambda *_: None)
    arrivals = pace.begin(0)
    first = next(arrivals)
    [again] = pace.follow(first, Ended(5, 5, 1, ""))
    assert again.due_ns == 5 + 10**9
    assert [outgoing.due_ns for outgoing in [first, *arrivals]] == [0, 10**10, 2 * 10**10, 3 * 10**10]


@pytest.mark.server
def test_closed_loop_begins_nothing_after_its_duration_nor_records_it(tmp_path):
    server = ScriptedServer(Script(first_token_s=0.1)).start()
    records = replay(
        scenario({"process": "concurrency", "in_flight": 2, "duration_s": 1, "count": 50}), server.url, tmp_path
    ).records
    begin = min(record.due_ns for record in records)
    assert 4 <= len(records) == len(server.seen) and {record.status for record in records} == {"ok"}
    assert max(record.due_ns for record in records) < begin + 1e9


@pytest.mark.server
def test_session_cut_by_the_duration_has_no_record_of_what_was_never_due(tmp_path):
    server = ScriptedServer(Script(first_token_s=0.1)).start()
    chosen = scenario({"process": "concurrency", "in_flight": 1, "duration_s": 1.2}, [TALK | {"session": {
        "turns": 100, "think_time_s": 0.1, "turn_tokens": 2}}])  # fmt: skip
    parsed = replay(chosen, server.url, tmp_path)
    assert {record.status for record in parsed.records} == {"ok"} and 2 <= len(parsed.records) < 12
    assert parsed.parsed.num_never_due > 80


def test_closed_loop_that_was_not_what_was_asked_for_says_so():
    timed, counted = {"process": "concurrency", "duration_s": 9}, {"process": "users", "count": 9}
    assert "used up before its duration_s was over, 40 of 43, so fewer" in loop_doubt(timed, 40, 3, ran_out=True)
    assert loop_doubt(timed, 40, 0, ran_out=False) is None and loop_doubt(counted, 9, 0, ran_out=True) is None
    assert loop_doubt(timed | {"count": 40}, 40, 0, ran_out=True) is None
    assert "3 of 9 requests of this closed loop never had their turn" in loop_doubt(counted, 6, 3, ran_out=False)
    assert loop_doubt({"process": "poisson", "count": 9}, 9, 0, ran_out=False) is None


SESSIONS = TALK | {"session": {
    "turns": {"distribution": "geometric", "mean_turns": 4, "max_turns": 50},
    "think_time_s": {"distribution": "exponential", "mean_s": 3}, "turn_tokens": 4,
}}  # fmt: skip
WHOLE_TURN = TurnParts("completions", b"", b"", b"", b"x", b"")
ANSWER = b'HTTP/1.1 200 OK\r\n\r\n{"choices": [{"text": "a", "finish_reason": "stop"}]}'
STEADY = {"process": "users", "users": 40, "think_time_s": 1}
IN_FLIGHT = {"process": "concurrency", "in_flight": 40}
THINKING = {"process": "users", "users": 40, "think_time_s": {"distribution": "lognormal", "median_s": 2, "sigma": 1}}


@pytest.mark.parametrize("klass", [CHAT, SESSIONS])
@pytest.mark.parametrize(("arrivals", "reply_s", "of"), [
    (IN_FLIGHT, 0.5, 1), (IN_FLIGHT, 0.8, 4), (THINKING, 0.1, 1), (THINKING, 3.0, 4), (STEADY, 0.1, 4),
])  # fmt: skip
def test_closed_loop_has_enough_built_for_short_replies_and_not_much_more(monkeypatch, klass, arrivals, reply_s, of):
    """Played by the pace of each process on a clock that is only counted."""
    monkeypatch.setattr("sojourn.loadgen.schedule.closed_loop.QUICK_REQUESTS", 0)
    chosen = scenario(arrivals | {"duration_s": 60}, [klass])
    schedule, loop = build_schedule(chosen, 3, "x"), chosen.arrivals.closed_loop
    played = [
        play(part_of(schedule, number, of, loop), loop_of(loop, number, of), round(reply_s * 1e9))
        for number in range(of)
    ]
    assert not any(ran_out for _, ran_out in played)
    if of == 1:
        assert len(schedule) < 3 * played[0][0] + 40  # sessions differ in length, and are built whole


@pytest.mark.parametrize("klass", [CHAT, CHAT | {"prompt_tokens": 20_000}])
def test_closed_loop_builds_enough_for_a_fast_server_and_little_more(klass):
    few, many = (scenario(IN_FLIGHT | {"in_flight": slots, "duration_s": 4}, [klass]) for slots in (3, 400))
    schedule = build_schedule(few, 3, "x")
    num_sent, ran_out = play(schedule, few.arrivals.closed_loop, round(0.02e9))
    long_prompts = klass["prompt_tokens"] * num_sent > QUICK_PROMPT_TOKENS
    assert ran_out == long_prompts and num_sent >= (100 if long_prompts else 600)
    schedule = build_schedule(many, 3, "x")
    assert len(schedule) <= (3_200 if long_prompts else QUICK_REQUESTS + 400)  # 3,200: replies of half a second


def play(part: list, loop: ClosedLoop, reply_ns: int) -> tuple[int, bool]:
    """How many requests are sent, each answered after `reply_ns`, and whether a slot found nothing more to send."""
    said: list[int] = []
    wire = {request.index: WHOLE_TURN if request.session_id else b"" for request in part}
    pace = Pacer(part, wire, Target(timeout_s=1.0), loop, cancel=None, ran_out=said.append)
    under_way = [(outgoing.due_ns, outgoing.index, outgoing) for outgoing in pace.begin(0)]
    heapq.heapify(under_way)
    num_sent = 0
    while under_way:
        due_ns, _, outgoing = heapq.heappop(under_way)
        num_sent += 1
        end_ns = due_ns + reply_ns
        for following in pace.follow(outgoing, Ended(end_ns, end_ns, 0, "", ((end_ns, ANSWER),))):
            heapq.heappush(under_way, (following.due_ns, following.index, following))
    return num_sent, bool(said)


@pytest.mark.server
def test_closed_loop_whose_requests_are_used_up_early_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("sojourn.loadgen.schedule.closed_loop.QUICK_REQUESTS", 0)
    server = ScriptedServer(Script(first_token_s=0.02)).start()
    done = replay(scenario({"process": "concurrency", "in_flight": 2, "duration_s": 0.6}), server.url, tmp_path)
    assert done.parsed.ran_out and len(done.records) == 4  # replies of half a second would take as many


@pytest.mark.server
def test_stopped_closed_loop_sends_nothing_more(tmp_path):
    server = ScriptedServer(Script(gap_s=0.05, num_tokens=100)).start()
    chosen = scenario({"process": "concurrency", "in_flight": 2, "count": 50}, [TALK])
    greenlet = gevent.spawn(lambda: replay(chosen, server.url, tmp_path))
    while len(server.seen) < 2:
        gevent.sleep(0.05)
    gevent.sleep(0.5)
    greenlet.kill()
    records = replayed(tmp_path).records
    assert len(server.seen) == 2
    assert [record.error for record in records if record.status == "cancelled"] == [STOPPED] * 2


@pytest.mark.server
@pytest.mark.parametrize("waits_for", ["first_token", "answer"])
def test_client_leaves_when_its_patience_ends(tmp_path, waits_for):
    server = ScriptedServer(Script(first_token_s=0.05, gap_s=0.1, num_tokens=8)).start()
    patient = CHAT | {"klass": "patient", "patience_s": 0.4, "patience_for": waits_for}
    short = CHAT | {"klass": "short", "patience_s": 0.01, "patience_for": waits_for}
    workload = {"each_arrival": "every_class", "classes": [patient, short]}
    chosen = scenario({"process": "at_once", "count": 1}, workload=workload, target={"api": "chat"})
    records = {record.klass: record for record in replay(chosen, server.url, tmp_path).records}
    assert (records["short"].status, records["short"].error) == ("cancelled", "left after its patience of 0.01 s")
    assert records["short"].first_token_ns is None
    if waits_for == "first_token":  # the answer takes longer than the patience, but its first token came in time
        assert records["patient"].status == "ok" and len(records["patient"].chunk_ns) == 8
    else:
        assert records["patient"].status == "cancelled" and 1 <= len(records["patient"].chunk_ns) < 8


def test_sessions_have_the_turns_pauses_and_patience_that_were_asked_for():
    klass = CHAT | {
        "patience_s": {"distribution": "uniform", "min_s": 1, "max_s": 3},
        "session": {
            "turns": {"distribution": "geometric", "mean_turns": 4, "max_turns": 1000},
            "think_time_s": {"distribution": "exponential", "mean_s": 5},
            "turn_tokens": {"distribution": "uniform", "min_tokens": 2, "max_tokens": 6},
        },
    }
    chosen = scenario({"process": "poisson", "rate_rps": 10, "count": 4000}, [klass])
    schedule = build_schedule(chosen, 0, "x")
    chains = chains_of(schedule)
    turns = np.array([len(chain) for chain in chains])
    later = [request for request in schedule if request.turn]
    pauses = np.array([request.pause_ns for request in later]) / 1e9
    # standard errors: a geometric of mean 4 has a deviation of 3.5; an exponential its mean. 5 of each.
    assert turns.mean() == pytest.approx(4, abs=5 * 3.5 / 4000**0.5)
    assert pauses.mean() == pytest.approx(5, rel=5 / len(later) ** 0.5)
    assert pauses.std() / pauses.mean() == pytest.approx(1, rel=0.05)
    assert {request.message_tokens for request in later} == {2, 3, 4, 5, 6}
    patience = np.array([request.patience_ns for request in schedule]) / 1e9
    assert patience.min() >= 1 and patience.max() <= 3 and patience.mean() == pytest.approx(2, abs=0.02)
    assert [request.index for request in schedule] == list(range(len(schedule)))
    for chain in chains[:50]:
        assert [request.turn for request in chain] == list(range(len(chain)))
        assert len({request.session_id for request in chain}) == 1
        assert chain[0].due_offset_ns is not None and {request.due_offset_ns for request in chain[1:]} <= {None}


def test_sessions_do_not_move_the_arrivals_classes_and_first_prompts_of_a_schedule():
    arrivals = {"process": "poisson", "rate_rps": 10, "count": 200}
    length = {"distribution": "uniform", "min_tokens": 3, "max_tokens": 90}
    plain = [CHAT | {"prompt_tokens": length}, CHAT | {"klass": "other"}]
    without = build_schedule(scenario(arrivals, plain), 4, "x")
    within = build_schedule(scenario(arrivals, [TALK | {"prompt_tokens": length}, plain[1]]), 4, "x")
    facts = ("due_offset_ns", "klass", "prompt_tokens", "max_tokens")
    assert [[getattr(request, name) for name in facts] for request in without] == [
        [getattr(request, name) for name in facts] for request in within if not request.turn
    ]


@pytest.mark.parametrize(
    ("klass", "sentence"),
    [({"session": {"turns": 2}}, "needs think_time_s and turn_tokens"),
     ({"session": {"turns": 2, "think_time_s": 1, "turn_tokens": 4, "tool_pause_s": 1, "tool_result_tokens": 1}},
      "give one pair"),
     ({"session": {"turns": 2, "think_time_s": 1, "tool_result_tokens": 4}}, "give one pair"),
     ({"patience_for": "answer"}, "has patience_for but no patience_s")],
)  # fmt: skip
def test_session_that_says_half_or_too_much_is_refused(klass, sentence):
    with pytest.raises(ValueError, match=sentence):
        scenario(classes=[CHAT | klass])


def test_closed_loop_that_may_need_too_many_requests_is_refused():
    longest = {"process": "concurrency", "in_flight": 100_000, "duration_s": 604_800}
    with pytest.raises(ScenarioError, match=r"at most 10000000 fit one run: shorten arrivals\.duration_s"):
        build_schedule(scenario(longest), 0, "x")


@settings(max_examples=60)
@given(st.lists(st.text(max_size=8), min_size=1, max_size=8), st.booleans(), st.data())
def test_answer_cut_out_of_the_bytes_is_the_text_that_the_cold_path_reads(pieces, ascii_only, data):
    """Whatever the text and wherever the frames are cut: the joined JSON pieces are the JSON of the joined pieces."""
    api = data.draw(st.sampled_from(["chat", "completions"]))
    events = []
    for piece in pieces:
        choice = {"delta": {"content": piece}} if api == "chat" else {"text": piece}
        events.append({"id": "x", "choices": [{"index": 0, **choice, "finish_reason": None}], "usage": {"a": 1}})
    events.append({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]})
    separators = data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    body = b"".join(
        b"data: " + json.dumps(event, ensure_ascii=ascii_only, separators=separators).encode("utf-8", "surrogatepass")
        + b"\n\n" for event in events
    ) + b"data: [DONE]\n\n"  # fmt: skip
    cut = data.draw(st.integers(1, len(body) - 1))
    frames = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:])) + b"0\r\n\r\n"
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + frames
    reader = ReplyReader()
    reader.feed(reply, 0)
    answer, fault = answer_of(reply, api)
    read = reader.end()
    assert fault == (read.error or "") and json.loads(b'"' + answer + b'"') == "".join(pieces) == read.text


def test_ideal_hit_rate_of_sessions_counts_the_conversation_that_a_cache_would_have():
    klass = CHAT | {
        "prompt_tokens": 100, "output_tokens": 30, "shared_prefix_tokens": 64,
        "session": {"turns": 3, "think_time_s": 1, "turn_tokens": 20},
    }  # fmt: skip
    chosen = scenario({"process": "at_once", "count": 2}, [klass])
    schedule = build_schedule(chosen, 0, "x")
    found = ideal_hit_rate(chosen.workload, schedule, range(6), 16)
    # prompts of 100, 150 and 200 tokens, and the second session finds the prefix of the first: blocks of 16
    assert found["prompt_tokens"] == 2 * (100 + 150 + 200)
    assert found["ideal_hit_tokens"] == (0 + 128 + 176) + (64 + 128 + 176)
    in_turns = sorted(schedule, key=lambda request: request.turn)  # both sessions at the same time: the same is found
    assert ideal_hit_rate(chosen.workload, in_turns, range(6), 16) == found
    cut = ideal_hit_rate(chosen.workload, in_turns[:4], {2, 3, 4}, 16)  # one turn of each is not sent, one not measured
    assert (cut["prompt_tokens"], cut["ideal_hit_tokens"]) == (100 + 150, 64 + 128)


@pytest.mark.parametrize(
    ("arrivals", "klass", "loop", "words"),
    [({"process": "concurrency", "in_flight": 3, "count": 9}, CHAT, "closed", "closed loop: 3 in flight"),
     ({"process": "users", "users": 2, "think_time_s": 1, "count": 9}, TALK, "closed", "closed loop: 2 users"),
     ({"process": "at_once", "count": 9}, TALK, "open, closed within a session", "sessions begin as an open load"),
     ({"process": "ramp", "start_rps": 1, "end_rps": 5, "duration_s": 9}, CHAT, "open", "the rate was meant to change"),
     ({"process": "at_once", "count": 9}, CHAT, "open", None)],
)  # fmt: skip
def test_run_says_which_loop_it_was_and_its_diagnosis_repeats_it(tmp_path, arrivals, klass, loop, words):
    run = begin_run(tmp_path / "run", scenario(arrivals, [klass]), 0, {})
    meta = run.meta()
    assert meta["arrivals"]["loop"] == loop
    assert [sentence.startswith(words) for sentence in load_notes(meta)] == ([True] if words else [])
    assert ("closed loop" in latency_origin(meta)) is (loop == "closed")
    assert load_notes(meta) == [told for told in diagnose(run).warnings if told in load_notes(meta)]


@pytest.mark.server
@pytest.mark.slow
def test_two_processes_share_a_closed_loop_and_no_session_is_torn_apart(tmp_path):
    server = ScriptedServer(Script(first_token_s=0.03)).start()
    chosen = scenario({"process": "concurrency", "in_flight": 4, "count": 12}, [TALK])
    run = load_url(chosen, server.url, tmp_path / "run", processes=2)
    client = run.table("client")
    assert set(client.status) == {"ok"} and len(client) == len(server.seen) == 36
    assert [list(turns) for _, turns in client.sort_values("turn").groupby("session_id").turn] == [[0, 1, 2]] * 12
    moments = sorted([(ns, 1) for ns in client.sent_ns] + [(ns, -1) for ns in client.last_byte_ns])
    assert np.cumsum([step for _, step in moments]).max() <= 4
