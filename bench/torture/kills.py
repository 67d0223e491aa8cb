"""kill -9 of the core, the front and the load generator at random moments under load.

After each kill: no stream without an end, no orphan, the server serves again, the run directories can be read. At the
end: each call that a client saw begin has exactly one usage record.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from bench.torture.client import Answer, Call, Loop, calling, completion
from bench.torture.promises import Outcome, TortureError, main
from bench.torture.run_files import check_client_run, check_server_run
from bench.torture.server import Server, descendants, living, serving, start_session, wait_until
from bench.torture.usage_records import unmatched

VICTIMS = ("core", "front", "load generator")
READY_SECONDS = 60  # core_death measures the promise of 5 s; here the server must serve again at all
ORPHAN_SECONDS = 10
CALL_SECONDS = 20  # a call without an end by then waits for ever
OUTPUT_TOKENS = 80
RESTARTS = "sojourn_telemetry_core_restarts_total"
SCENARIO = """\
name: kills
description: a load that outlasts each kill
target: {timeout_s: 20}
arrivals: {process: poisson, rate_rps: 15, duration_s: 60}
workload: {classes: [{klass: chat, prompt_tokens: 32, output_tokens: 24, ignore_eos: true}]}
objectives: [{ttft_ms: 1000, source: "no objective is judged here"}]
"""


class Kill(msgspec.Struct):
    """One kill and what was found after it. `faults` is empty where every promise held."""

    number: int
    victim: str
    delay_s: float
    faults: list[str] = []
    answers: dict[str, int] = {}  # how the calls ended for their clients
    last_end_s: float = 0.0  # from the kill of core or front to the end of the last call that was open then
    serving_again_s: float | None = None
    unsent_names: int = 0  # calls that ended before the first byte of an answer


class State(msgspec.Struct):
    """All kills so far, so that a later call can go on; `seen` are names of calls that got at least a status."""

    seed: int
    kills: list[Kill] = []
    seen: dict[str, str] = {}  # name → how it ended for its client, and the status
    doubtful: list[str] = []  # names of calls without a status: they have one record or none


class Life:
    """One life of the server, and its folders."""

    def __init__(self, folder: Path, number: int):
        self.run_dir = folder / f"server-{number}"
        options = ["--run-dir", str(self.run_dir), "--max-waiting", "100000", "--max-core-deaths", "1000"]
        options += ["--usage-dir", str(folder / "usage")]
        self._stack = contextlib.ExitStack()
        self.server: Server = self._stack.enter_context(serving(*options))

    def end(self) -> list[str]:
        """Ends it in order. Returns faults."""
        faults = []
        if self.server.process.poll() is None:
            self.server.send_signal(signal.SIGTERM)
            code = self.server.wait(60)
            if code != 0:
                faults.append(f"SIGTERM: exit code {code}")
        self._stack.close()
        return faults + check_server_run(self.run_dir)


def load_of(url: str, folder: Path) -> tuple[subprocess.Popen, Path]:
    """The project's own load generator against the server, in a session of its own."""
    run_dir = Path(tempfile.mkdtemp(prefix="load-", dir=folder)) / "run"
    scenario = run_dir.parent / "kills.yaml"
    scenario.write_text(SCENARIO)
    command = [sys.executable, "-m", "sojourn", "load", str(scenario), "--base-url", url, "--model", "tiny-model"]
    return start_session([*command, "--run-dir", str(run_dir)], run_dir.parent / "load.log"), run_dir


def loops(number: int, until_s: float) -> list[Loop]:
    """Streams, whole answers, clients that leave, and calls that are refused. Their names are unique, also where a
    process that goes on repeats a kill."""

    def loop(kind: str, width: int, body: dict, **call) -> Loop:
        named = Call(body, name=f"k{number}.{os.getpid()}-{kind}", group=kind, timeout_s=CALL_SECONDS, **call)
        return Loop(named, width, until_s, pause_s=0.05)

    return [
        loop("stream", 6, completion(OUTPUT_TOKENS)),
        loop("whole", 3, completion(OUTPUT_TOKENS, stream=False, seed=2)),
        loop("leave", 2, completion(400, seed=3), leave_after=4),
        loop("bad", 1, completion(-1, seed=4)),
    ]


def strike(life: Life, load: subprocess.Popen | None, victim: str) -> tuple[float, list]:
    """Kills the victim. Returns the moment, and the processes that must end with it."""
    if victim == "load generator":
        with_it = descendants(load.pid)
        pid = load.pid
    elif victim == "front":
        with_it = descendants(life.server.front_pid)
        pid = life.server.front_pid
    else:
        with_it, pid = [], life.server.core_pid()
        if pid is None:
            raise TortureError("there is no core to kill")
    moment = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return moment, with_it


def open_at(answers: list[Answer], moment: float) -> list[Answer]:
    return [answer for answer in answers if answer.sent_s <= moment < answer.ended_s]


def serves_again(server: Server, restarts: float) -> bool:
    """After the front has noticed the death: it counts a restart."""
    with contextlib.suppress(TortureError):
        return server.status("/ready", 2) == 200 and server.metric(RESTARTS) > restarts
    return False


def one_kill(life: Life, kill: Kill, folder: Path, state: State) -> None:
    """Load, a kill at a random moment, and what became of it."""
    server = life.server
    load, run_dir = load_of(server.url, folder) if kill.victim == "load generator" else (None, None)
    try:
        if load is not None and wait_until(lambda: any(run_dir.glob("**/*")) or load.poll() is not None, 30) is None:
            kill.faults.append("the load generator did not begin in 30 s")
        with calling(server.url, loops=loops(kill.number, kill.delay_s + 2.0), seconds=CALL_SECONDS + 60) as client:
            wait_until(lambda: server.metric("sojourn_request_running") > 0, 10)
            time.sleep(kill.delay_s)
            restarts = server.metric(RESTARTS)
            moment, with_it = strike(life, load, kill.victim)
            if wait_until(lambda: not living(with_it), ORPHAN_SECONDS) is None:
                kill.faults.append(f"{len(living(with_it))} orphans after {ORPHAN_SECONDS} s")
            if kill.victim == "core":
                kill.serving_again_s = wait_until(lambda: serves_again(server, restarts), READY_SECONDS)
                if kill.serving_again_s is None:
                    kill.faults.append(f"not ready again in {READY_SECONDS} s")
            found = client.wait()
        for answer in found.answers:
            state.seen[answer.name] = f"{answer.end} {answer.status or 0}"
            if answer.status is None:
                state.doubtful.append(answer.name)
        kill.answers = dict(Counter(answer.end for answer in found.answers))
        if endless := found.ended("timeout"):
            kill.faults.append(f"{len(endless)} calls had no end in {CALL_SECONDS} s")
        if kill.victim != "load generator":
            kill.last_end_s = max((answer.ended_s - moment for answer in open_at(found.answers, moment)), default=0.0)
        elif failed := found.ended("cut", "error"):
            kill.faults.append(f"{len(failed)} calls of others failed")
        if load is not None:
            load.wait()
            kill.faults += check_client_run(run_dir)
    finally:
        if load is not None and load.poll() is None:
            load.kill()
            load.wait()


def torment(outcome: Outcome, state: State, count: int, folder: Path, file: Path | None) -> None:
    draw = random.Random(state.seed)
    plan = [(draw.choice(VICTIMS), draw.uniform(0.0, 2.5)) for _ in range(count)]
    life, lives = None, len(list(folder.glob("server-*")))
    try:
        for number in range(len(state.kills), count):
            kill = Kill(number, *plan[number])
            if life is None:
                started = time.monotonic()
                life, lives = Life(folder, lives), lives + 1
                if state.kills and state.kills[-1].victim == "front":
                    state.kills[-1].serving_again_s = time.monotonic() - started
            try:
                one_kill(life, kill, folder, state)
            except TortureError as error:
                kill.faults.append(str(error)[:500])
            if kill.victim == "front" or life.server.process.poll() is not None:
                ended, life = life, None
                if kill.victim != "front":
                    kill.faults.append(f"the server ended with {ended.server.process.returncode}")
                kill.faults += ended.end()
            state.kills.append(kill)
            if kill.faults:
                print(f"kill {number}, {kill.victim} after {kill.delay_s:.2f} s: {'; '.join(kill.faults)}", flush=True)
            if file is not None:
                file.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1))
    finally:
        if life is not None:
            for fault in life.end():
                outcome.check("the last server ends in order", False, fault)
    judge(outcome, state, folder)


def judge(outcome: Outcome, state: State, folder: Path) -> None:
    kills = state.kills
    victims = ", ".join(f"{count} {name}" for name, count in Counter(kill.victim for kill in kills).items())
    faults = [(kill, fault) for kill in kills for fault in kill.faults]
    ends = sum((Counter(kill.answers) for kill in kills), Counter())
    for text, mark in (
        ("no stream without an end", "no end"), ("no orphan process", "orphan"), ("the server serves again", "ready"),
        ("every run directory can be read and compacted", "run directory"),
    ):  # fmt: skip
        found = [f"kill {kill.number} ({kill.victim}): {fault}" for kill, fault in faults if mark in fault]
        outcome.check(text, not found, f"{len(found)} faults in {len(kills)} kills ({victims}) {found[:3] or ''}")
        faults = [(kill, fault) for kill, fault in faults if mark not in fault]
    found = [f"kill {kill.number} ({kill.victim}): {fault}" for kill, fault in faults]
    outcome.check("nothing else goes wrong", not found, found[:5] or f"{sum(ends.values())} calls: {dict(ends)}")
    _judge_ends(outcome, kills)
    lost, double, wrong = unmatched(folder / "usage", state.seen, set(state.doubtful), OUTPUT_TOKENS)
    outcome.check("no lost usage record", not lost, f"{len(lost)} of {len(state.seen):,} calls {lost[:3] or ''}")
    outcome.check("no usage record twice", not double, f"{len(double)} {double[:3] or ''}")
    outcome.check("records agree with what clients saw", not wrong, f"{len(wrong)} do not {wrong[:3] or ''}")


def _judge_ends(outcome: Outcome, kills: list[Kill]) -> None:
    last = max((kill.last_end_s for kill in kills if kill.victim != "load generator"), default=0.0)
    outcome.check("open calls end after the kill of core or front", last < CALL_SECONDS, f"the last after {last:.2f} s")
    again = [kill.serving_again_s for kill in kills if kill.victim == "core" and kill.serving_again_s is not None]
    if again:
        outcome.check(
            "/ready after the kill of the core",
            True,
            f"median {sorted(again)[len(again) // 2]:.1f} s, longest {max(again):.1f} s",
        )


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Kills at random moments; `--state FILE` keeps what was found and goes on from there."""
    count = arguments.kills or (6 if arguments.short else 200)
    file = arguments.state
    state = State(arguments.seed)
    if file is not None and file.exists():
        state = msgspec.json.decode(file.read_bytes(), type=State)
    with contextlib.ExitStack() as stack:
        if file is not None:
            folder = file.resolve().with_suffix(".folders")
            folder.mkdir(exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torture-kills-")))
        torment(outcome, state, count, folder, file)


if __name__ == "__main__":
    main(
        "kills", run, kills={"type": int, "help": "how many; 200, or 6 with --short"},
        seed={"type": int, "default": 21}, state={"type": Path, "metavar": "FILE", "help": "keep the results here"},
    )  # fmt: skip
