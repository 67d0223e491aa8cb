"""Sessions with sub-agents: read from public forms of trace, built, and paced on a clock that is only counted."""

import heapq
import json
from pathlib import Path

import pytest

from sojourn.loadgen.client.outgoing import Ended
from sojourn.loadgen.client.pacing import Pacer
from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.prompts.bodies import build_wire_requests
from sojourn.loadgen.prompts.conversation import PiecedBody
from sojourn.loadgen.scenario.scenario import Target
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.ideal_prefix_hits import ideal_hit_rate
from sojourn.loadgen.schedule.request import chains_of
from sojourn.loadgen.target.endpoint import parse_base_url
from sojourn.loadgen.traces.reader import read_trace
from tests.loadgen.run.test_sessions import ANSWER
from tests.loadgen.scenarios import scenario

MS = 1_000_000


def call(t: float, tokens: int, ids: range, **more) -> dict:
    return {"t": t, "type": "n", "in": tokens, "out": 3, "hash_ids": [*ids], "api_time": 1.0, **more}


def agent(t_end: float, duration_s: float, name: str, *requests: dict) -> dict:
    return {"t": t_end, "type": "subagent", "agent_id": name, "duration_ms": duration_s * 1e3, "requests": requests}


SESSION = {
    "id": "mini", "block_size": 8, "hash_id_scope": "local",
    "requests": [
        call(0.0, 20, range(1, 4), think_time=0.0),
        # Its end is told, as in the public files: it began 0.5 s after the answer above.
        agent(11.5, 10.0, "a", call(0.0, 9, range(50, 52), think_time=0.0),
              call(3.0, 17, range(50, 53), think_time=2.0)),
        agent(5.0, 3.0, "b", call(0.0, 8, range(50, 51), think_time=0.0),
              agent(2.5, 1.0, "deep", call(0.0, 8, range(70, 71)))),
        call(14.0, 30, range(1, 5), think_time=13.0),
        call(16.0, 31, range(1, 5), think_time=1.0),
    ],
}  # fmt: skip
PLACES = [((), 0.0), ((0,), 0.5), ((1,), 2.0), ((0,), 1.0), ((3,), 0.5), ((2, 4), 2.5), ((5,), 1.0)]


def spans(*calls: tuple) -> dict:
    return {"spans": [
        {"trace_id": "t", "span_id": name, "name": "chat", "start_time": f"2026-01-01T00:00:{begin:09.6f}",
         "end_time": f"2026-01-01T00:00:{end:09.6f}",
         "attributes": {"gen_ai.operation.name": "chat", "gen_ai.output.text": f"answer {name}",
                        "gen_ai.input.messages": json.dumps([{"role": "user", "content": text}])}}
        for name, begin, end, text in calls
    ]}  # fmt: skip


def write(folder: Path, document: dict, name: str = "mini.json", **layout) -> Path:
    file = folder / name
    file.write_text(json.dumps(document, **layout), encoding="utf-8")
    return file


@pytest.mark.parametrize("indent", [None, 2])
def test_session_of_kv_cache_tester_is_read_with_its_forks_and_joins(tmp_path, indent):
    found = read_trace(write(tmp_path, SESSION, indent=indent))
    rows = sorted(found.rows, key=lambda row: row.place)
    assert found.form.name == "agents" and found.block_tokens == 8
    assert [(row.after, pytest.approx(row.pause_s)) for row in rows] == PLACES
    assert [row.agent for row in rows] == ["", "a", "a", "b", "b.deep", "", ""]
    assert rows[0].hash_ids == rows[5].hash_ids[:3] and not {*rows[0].hash_ids} & {1, 2, 3}  # another file's 1 is not


def test_call_waits_for_the_answers_in_its_messages_and_not_for_a_call_that_only_ended_before(tmp_path):
    document = spans(
        ("one", 0, 1, "go"), ("two", 2, 5, "from answer one"), ("three", 2, 4, "from answer one"),
        ("alone", 2, 3, "from answer one"), ("join", 6, 7, "has answer one, answer two and answer three"),
    )  # fmt: skip
    rows = sorted(read_trace(write(tmp_path, document)).rows, key=lambda row: row.place)
    assert [(row.after, row.pause_s) for row in rows] == [
        ((), 0.0), ((0,), 1.0), ((0,), 1.0), ((0,), 1.0), ((2, 3), 1.0)
    ]  # fmt: skip
    assert json.loads(rows[0].content) == [{"role": "user", "content": "go"}]


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"block_size": 8, "requests": [{"t": "x"}], "id": "a"}, "is not a session with block_size and requests"),
        (SESSION | {"requests": [call(0, 20, range(1, 9))]}, "at 0 s has 8 hash_ids, but its prompt of 20 tokens is 3"),
        ({"spans": [{"span_id": "a"}]}, "is no file of OTLP traces"),
        ({"spans": []}, "holds no span"),
    ],
)
def test_file_that_cannot_be_read_is_refused_in_a_sentence(tmp_path, document, sentence):
    with pytest.raises(ScenarioError, match=sentence):
        read_trace(write(tmp_path, document))


def agents(file: Path, slots: int, **more):
    klass = {
        "klass": "agent", "from_file": str(file), "content": "blocks", "ignore_eos": True,
        "prompt_tokens": {"distribution": "trace", "min_tokens": 1, "max_tokens": 100},
        "output_tokens": {"distribution": "trace", "min_tokens": 1, "max_tokens": 9}, "session": {"recorded": True},
    }  # fmt: skip
    return scenario({"process": "concurrency", "in_flight": slots, "count": 2}, [klass | more])


def sent_at(chosen, reply_ns: int = 100 * MS) -> tuple[list, dict[int, int], dict[int, bytes]]:
    """The schedule; by index the due times, each answered after `reply_ns`; and the bytes that were sent."""
    schedule = build_schedule(chosen, 0, "t")
    wire = build_wire_requests(chosen, 0, schedule, parse_base_url("http://127.0.0.1:1"), "m", "tiny-model")
    pace = Pacer(schedule, wire, Target(), chosen.arrivals.closed_loop, lambda *_: None, lambda *_: None)
    waiting = [(outgoing.due_ns, outgoing.index, outgoing) for outgoing in pace.begin(0)]
    heapq.heapify(waiting)
    due, sent = {}, {}
    while waiting:
        due_ns, index, outgoing = heapq.heappop(waiting)
        due[index], sent[index], end_ns = due_ns, outgoing.wire, due_ns + reply_ns
        for each in pace.follow(outgoing, Ended(end_ns, end_ns, 0, "", ((end_ns, ANSWER),))):
            heapq.heappush(waiting, (each.due_ns, each.index, each))
    return schedule, due, sent


def test_recorded_session_forks_joins_and_pauses_as_the_trace_and_shares_its_blocks(tmp_path):
    _, due, sent = sent_at(agents(write(tmp_path, SESSION), 1))
    ms = [due[index] // MS for index in range(7)]
    assert ms == [0, 600, 2700, 1100, 1700, 5300, 6400]  # the join is 2.5 s after the last end, at 2.8 s
    assert due[7] == due[6] + 100 * MS  # the slot's next session
    prompts = [json.loads(sent[index].partition(b"\r\n\r\n")[2])["prompt"].split() for index in range(7)]
    assert [len(prompt) for prompt in prompts] == [20, 9, 17, 8, 8, 30, 31]
    assert prompts[5][:20] == prompts[0] and prompts[2][:9] == prompts[1] and prompts[3] == prompts[1][:8]
    assert b"x-session-id: t-s000000.b.deep\r\n" in sent[4] and b"x-session-id: t-s000000\r\n" in sent[5]


@pytest.mark.parametrize("salt", ["session", "none"])
def test_salted_sessions_share_nothing_with_another_session(tmp_path, salt):
    chosen = agents(write(tmp_path, SESSION), 2, salt=salt)
    schedule = build_schedule(chosen, 0, "t")
    found = ideal_hit_rate(chosen.workload, schedule, range(14), 1)
    within = ideal_hit_rate(chosen.workload, schedule[:7], range(7), 1)
    assert (found["ideal_hit_tokens"] == 2 * within["ideal_hit_tokens"]) == (salt == "session")


def test_session_ends_before_a_prompt_above_the_bounds(tmp_path):
    bounds = {"distribution": "trace", "min_tokens": 1, "max_tokens": 20}
    schedule = build_schedule(agents(write(tmp_path, SESSION), 1, prompt_tokens=bounds), 0, "t")
    assert [request.prompt_tokens for request in schedule[:6]] == [20, 9, 17, 8, 8, 20]
    with pytest.raises(ScenarioError, match="no session whose first prompt has at most 5 tokens"):
        build_schedule(agents(write(tmp_path, SESSION), 1, prompt_tokens=bounds | {"max_tokens": 5}), 0, "t")


def test_drawn_session_waits_for_all_of_its_sub_agents_and_keeps_its_own_conversation():
    klass = {
        "klass": "agent", "prompt_tokens": 12, "output_tokens": 4, "shared_prefix_tokens": 4, "salt": "session",
        "content": "random",
        "session": {
            "turns": 3, "tool_pause_s": 0.05, "tool_result_tokens": 5,
            "sub_agents": {"share": 1, "agents": 2, "turns": 2, "prompt_tokens": 9},
        },
    }  # fmt: skip
    schedule, due, sent = sent_at(scenario({"process": "concurrency", "in_flight": 1, "count": 2}, [klass]))
    first, second = chains_of(schedule)
    assert [(request.session_id.removeprefix("t-s000000"), request.turn) for request in first] == [
        ("", 0), (".0", 0), (".0", 1), (".1", 0), (".1", 1), ("", 1),
        (".2", 0), (".2", 1), (".3", 0), (".3", 1), ("", 2),
    ]  # fmt: skip
    assert [due[request.index] // MS for request in first[:6]] == [0, 150, 300, 150, 300, 450]
    assert first[5].message_tokens == 10  # a result of each
    bodies = [json.loads(sent[index].partition(b"\r\n\r\n")[2])["prompt"] for index in range(11)]
    assert bodies[5].startswith(bodies[0]) and bodies[10].startswith(bodies[5]) and bodies[2].startswith(bodies[1])
    assert bodies[0].split()[:4] == bodies[1].split()[:4]  # the prefix of the session
    assert {request.shared_prefix for request in first} == {0} and {each.shared_prefix for each in second} == {1}


def test_prompts_of_a_session_share_the_memory_of_their_blocks(tmp_path):
    chosen = agents(write(tmp_path, SESSION), 1)
    schedule = build_schedule(chosen, 0, "t")
    wire = build_wire_requests(chosen, 0, schedule, parse_base_url("http://127.0.0.1:1"), "m", "tiny-model")
    assert isinstance(wire[0], PiecedBody) and wire[0].pieces[0] is wire[5].pieces[0]
