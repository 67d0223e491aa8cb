"""One schedule on several processes: every request is sent once, or reported as not sent."""

import json
import os
import signal
import subprocess
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import gevent
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.prompts.bodies import build_wire_requests
from sojourn.loadgen.run.distributed import ENDED, PART, READY, START, MasterReplay, WorkerReplay, clock_shift
from sojourn.loadgen.run.experiment import load_url
from sojourn.loadgen.run.replay import Plan, StartedRun, prepare_part
from sojourn.loadgen.scenario.arrivals import ClosedLoop
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.request import chains_of, save_schedule, schedule_digest
from sojourn.loadgen.schedule.shards import DONE, LOST, Shard, doubts_about, loop_of, part_of, read_shards
from sojourn.loadgen.target.endpoint import parse_base_url
from sojourn.loadgen.target.processes import load_command
from sojourn.metrics.errors import ExperimentError
from sojourn.metrics.exit_codes import Ended
from sojourn.metrics.machine.host import boot_id
from sojourn.metrics.run.directory import RunDirectory
from tests.loadgen.run.test_experiment import scenario_file, wait_for
from tests.loadgen.scenarios import CHAT, scenario
from tests.loadgen.scripted_server import Script, ScriptedServer

FOUR = 4
TALK = CHAT | {"klass": "talk", "session": {"turns": 2, "think_time_s": 0, "turn_tokens": 4}}


def start_four(folder: Path, chosen, url: str) -> tuple[subprocess.Popen, list[str]]:
    command = load_command(scenario_file(folder, chosen), url, folder / "run", {"processes": FOUR})
    output = (folder / "load.log").open("w")
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder), command


@pytest.mark.server
def test_four_workers_send_the_schedule_exactly_once_from_one_start(tmp_path):
    server = ScriptedServer().start()
    chosen = scenario({"process": "constant", "rate_rps": 60, "count": 61}, measure={"warmup_requests": 2})
    load, _ = start_four(tmp_path, chosen, server.url)
    assert load.wait(60) in (0, Ended.NOT_VALID), (tmp_path / "load.log").read_text()  # a busy machine sends late
    run = RunDirectory.open(tmp_path / "run")
    client = run.table("client")
    assert sorted(seen["headers"]["x-request-id"] for seen in server.seen) == sorted(client.request_id)
    assert len(client) == 63 and set(client.status) == {"ok"}
    due = client.sort_values("request_id").due_ns.tolist()[2:]
    assert {round((after - before) / 1e5) for before, after in pairwise(due)} <= {166, 167}
    assert (client.sent_ns >= client.due_ns).all()
    parts = run.meta()["load_processes"]
    assert [part["requests"] for part in parts] == [18, 15, 15, 15] and {part["state"] for part in parts} == {DONE}
    assert not any("processes" in reason for reason in run.meta()["invalid_reasons"])
    starts = pq.read_table(run.path / "client_raw.parquet", filters=[("index", "==", -1)]).column("ns").to_pylist()
    assert len(starts) == FOUR and len(set(starts)) == 1


@pytest.mark.server
def test_requests_of_a_killed_worker_are_missing_and_nobody_sends_them_again(tmp_path):
    """One worker is killed in the middle, and another one comes late: it has no part."""
    server = ScriptedServer(Script(gap_s=0.02)).start()
    load, command = start_four(tmp_path, scenario({"process": "constant", "rate_rps": 40, "count": 120}), server.url)
    wait_for(lambda: len(server.seen) >= 20)
    os.kill(psutil.Process(load.pid).children()[0].pid, signal.SIGKILL)
    words = [word for word in command if word != "--headless"]
    at = words.index("--processes")
    late = subprocess.Popen([*words[:at], *words[at + 2 :], "--worker"], stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, cwd=tmp_path)  # fmt: skip
    try:
        assert load.wait(60) == Ended.NOT_VALID, (tmp_path / "load.log").read_text()
    finally:
        late.kill()
    told = (tmp_path / "load.log").read_text()
    assert "(index 4) reported as ready" in told
    assert "the run is not valid: 1 of 4 load processes" in told and f"sojourn diagnose {tmp_path / 'run'}" in told
    run = RunDirectory.open(tmp_path / "run")
    client, sent = run.table("client"), Counter(seen["headers"]["x-request-id"] for seen in server.seen)
    assert len(client) == client.request_id.nunique() == 120 and set(sent.values()) == {1}
    assert set(client.status) == {"ok", "missing"}
    missing = (client.status == "missing").sum()
    assert 120 // FOUR - 15 <= missing <= 120 // FOUR  # what it had sent, but for its last second, is recorded
    lost = [part for part in run.meta()["load_processes"] if part["state"] == LOST]
    assert len(lost) == 1 and lost[0]["requests"] == 30
    assert run.meta()["valid"] is False
    assert any(reason.startswith("1 of 4 load processes did not reach") for reason in run.meta()["invalid_reasons"])
    assert f"{missing} of 120 scheduled requests" in " ".join(run.meta()["invalid_reasons"])


@given(count=st.integers(1, 60), of=st.integers(1, 9), warmup=st.integers(0, 3))
def test_parts_of_a_schedule_make_the_schedule(count, of, warmup):
    chosen = scenario({"process": "at_once", "count": count}, measure={"warmup_requests": warmup})
    schedule = build_schedule(chosen, 0, "t")
    parts = [part_of(schedule, number, of, None) for number in range(of)]
    assert sorted(request.index for part in parts for request in part) == list(range(len(schedule)))
    sizes = [sum(not request.prelude for request in part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and not any(request.prelude for part in parts[1:] for request in part)


def test_requests_that_a_trace_says_are_of_one_session_are_parted_like_all_others(tmp_path):
    """Only the turns of our own sessions hang on one another."""
    file = tmp_path / "one-session.jsonl"
    file.write_text("".join(f'{{"at_s": {at_s}, "prompt_tokens": 5, "session_id": "s"}}\n' for at_s in range(40)))
    talk = CHAT | {"klass": "talk", "weight": 3, "session": {"turns": 3, "think_time_s": 1, "turn_tokens": 4}}
    chosen = scenario({"process": "trace", "file": str(file), "duration_s": 99}, [CHAT, talk])
    schedule = build_schedule(chosen, 0, "t")
    parts = [part_of(schedule, number, FOUR, None) for number in range(FOUR)]
    assert [len(chains_of(part)) for part in parts] == [10] * FOUR and {request.turn for request in schedule} == {
        0,
        1,
        2,
    }
    assert sorted(chain[0].index for part in parts for chain in chains_of(part)) == [
        chain[0].index for chain in chains_of(schedule)
    ]


@given(slots=st.integers(1, 40), of=st.integers(1, 9), rounds=st.integers(1, 4))
def test_part_of_a_closed_loop_has_as_many_requests_as_its_slots_have_of_all(slots, of, rounds):
    of = min(of, slots)
    schedule = build_schedule(scenario({"process": "concurrency", "in_flight": slots, "count": rounds * slots}), 0, "t")
    loop = ClosedLoop(slots, None)
    for number in range(of):
        assert len(part_of(schedule, number, of, loop)) == rounds * loop_of(loop, number, of).slots


@given(slots=st.integers(1, 40), of=st.integers(1, 9))
def test_slots_of_a_closed_loop_are_shared_or_refused(slots, of):
    loop = ClosedLoop(slots, 2.0)
    if slots < of:
        with pytest.raises(ScenarioError, match=f"keep {slots} at a time, fewer than the {of} processes"):
            loop_of(loop, 0, of)
        return
    parts = [loop_of(loop, number, of) for number in range(of)]
    assert sum(part.slots for part in parts) == slots and all(part.slots and part.duration_s == 2.0 for part in parts)


@pytest.mark.server
@pytest.mark.slow
def test_load_with_processes_is_one_run_that_says_how_to_repeat_it(tmp_path):
    """A closed loop: three slots on two processes."""
    server = ScriptedServer(Script(first_token_s=0.05)).start()
    chosen = scenario({"process": "concurrency", "in_flight": 3, "count": 12})
    run = load_url(chosen, server.url, tmp_path / "run", processes=2)
    meta, client = run.meta(), run.table("client")
    assert set(client.status) == {"ok"} and len(server.seen) == len(client) == 12
    assert meta["command"][-4:] == ["--processes", "2", "--seed", "0"]
    assert [part["requests"] for part in meta["load_processes"]] == [8, 4]  # as the slots are
    starts, ends = client.sent_ns.to_numpy(), client.last_byte_ns.to_numpy()
    assert max(((starts <= moment) & (ends > moment)).sum() for moment in starts) <= 3
    with pytest.raises(ScenarioError, match="start at most 3 processes"):
        load_url(chosen, server.url, tmp_path / "other", processes=4)
    assert not (tmp_path / "other").exists()


class ScriptedRunner:
    """Locust's runner as a script: `answer` says what a message to a worker, or from one, is followed by."""

    def __init__(self, *workers: str):
        self.clients = SimpleNamespace(all=[SimpleNamespace(id=worker, state="running") for worker in workers])
        self.heard, self.sent, self.answer = {}, [], lambda *_: None

    def register_message(self, word, listener):
        self.heard[word] = listener

    def say(self, word: str, worker: str, **said):
        self.heard[word](None, SimpleNamespace(node_id=worker, data=said))

    def send_message(self, word, said, worker=""):
        self.sent.append((word, worker, said))
        self.answer(word, worker, said)


def started_run(run_dir: Path, **arrivals) -> StartedRun:
    chosen = scenario({"process": "at_once", "count": 4} | arrivals)
    schedule = build_schedule(chosen, 0, "t")
    save_schedule(run_dir, schedule, chosen)
    plan = Plan(chosen.model_dump(mode="json", exclude_none=True), 0, "t", "http://h", "m", None, str(run_dir),
                schedule_digest(schedule))  # fmt: skip
    return StartedRun(plan, schedule, None, None)


def test_worker_that_is_missed_at_the_start_is_not_waited_for_when_it_comes_back(tmp_path):
    runner, started = ScriptedRunner("a", "b"), started_run(tmp_path)
    master, (_, late) = MasterReplay(runner), runner.clients.all

    def answer(word, worker, said):
        if word == PART:
            runner.say(READY, worker, id_prefix="t", clock_uncertainty_ms=None)
            late.state = "missing"
        elif word == START:
            late.state = "running"
            runner.say(ENDED, worker, id_prefix="the run before", whole=False, failure="it is nobody's failure now")
            runner.say(ENDED, worker, id_prefix="t", whole=True, failure="")

    runner.answer = answer
    with gevent.Timeout(5):
        master.run(started)
    assert [(word, worker) for word, worker, _ in runner.sent] == [(PART, "a"), (PART, "b"), (START, "a")]
    assert {shard.worker: shard.state for shard in read_shards(tmp_path)} == {"a": DONE, "b": LOST}


def test_worker_of_an_older_version_that_refuses_its_part_is_heard(tmp_path):
    runner, started = ScriptedRunner("old"), started_run(tmp_path)
    master = MasterReplay(runner)
    runner.answer = lambda word, worker, _: runner.say(ENDED, worker, whole=False, failure="what is schedule_digest?")
    with gevent.Timeout(5), pytest.raises(ExperimentError, match="what is schedule_digest"):
        master.run(started)


def test_worker_that_still_writes_answers_that_it_takes_no_part(tmp_path):
    runner, started = ScriptedRunner(), started_run(tmp_path)
    worker = WorkerReplay(runner, lambda *_: None)
    worker._sending = gevent.spawn(gevent.sleep, 5)
    runner.say(PART, "", plan=asdict(started.plan), number=0, of=1, boot_id=boot_id())
    worker._sending.kill()
    assert [(word, said["id_prefix"], said["whole"]) for word, _, said in runner.sent] == [(ENDED, "t", False)]
    assert "still writes what it recorded" in runner.sent[0][2]["failure"]


def test_worker_whose_trace_is_another_one_is_refused(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"at_s": at_s, "prompt_tokens": 8, "output_tokens": 4} for at_s in range(4)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    started = started_run(tmp_path / "run", process="trace", file=str(trace), duration_s=9, count=None)
    trace.write_text("\n".join(map(json.dumps, [*rows[:-1], rows[-1] | {"at_s": 3.5}])))
    with pytest.raises(ExperimentError, match=r"makes another schedule .* than the master .* the same files of traces"):
        prepare_part(started.plan, 0, 1, lambda *_: None)


@pytest.mark.parametrize("classes", [
    [CHAT, CHAT | {"klass": "shared", "shared_prefix_tokens": 4, "num_shared_prefixes": 2}],
    [CHAT | {"content": "random"}, TALK],
])  # fmt: skip
def test_request_has_the_same_bytes_whoever_writes_it(classes):
    chosen = scenario({"process": "at_once", "count": 24}, classes, measure={"warmup_requests": 3})
    schedule = build_schedule(chosen, 5, "t")
    asked = (chosen, 5, schedule, parse_base_url("http://h"), "m", None)
    whole = build_wire_requests(*asked)
    parts = [build_wire_requests(*asked, part_of(schedule, number, 3, None)) for number in range(3)]
    assert {index: wire for part in parts for index, wire in part.items()} == whole
    assert sum(map(len, parts)) == len(whole) == len(schedule)


@given(
    shift_ns=st.integers(-(10**12), 10**12),
    ways=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=30),
)
def test_clocks_are_compared_within_the_uncertainty_that_is_told(shift_ns, ways):
    now, rounds = 10**15, []
    for there, back in ways:
        rounds.append((now, now + there + shift_ns, now + there + back))
        now += there + back + 1_000
    found_ns, uncertainty_ms = clock_shift(rounds)
    assert abs(found_ns - shift_ns) <= uncertainty_ms * 1e6 + 1


@pytest.mark.parametrize(("states", "doubted"), [([DONE, DONE], 0), ([DONE, LOST], 1), ([], 0)])
def test_only_a_part_that_did_not_end_is_doubted(states, doubted):
    assert len(doubts_about([Shard(number, "w", 5, state) for number, state in enumerate(states)])) == doubted
