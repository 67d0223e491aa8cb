"""SIGTERM and SIGINT under load: a drain that ends well, one that runs out, and a second signal in every state."""

import argparse
import os
import signal
import time
from pathlib import Path

from bench.torture.client import DONE, ERROR, Answers, Call, calling, completion
from bench.torture.promises import Outcome, TortureError, main
from bench.torture.server import Server, serving, temporary_folder, wait_until
from sojourn.metrics.run.directory import RunDirectory

STREAMS, WHOLE = 12, 4
LONG = 3500  # tokens: more than a server of this size computes for all streams before the second signal
TERM, INT = signal.SIGTERM, signal.SIGINT
END_SECONDS = 2.0  # of the promise, after the second signal
# Name, signals, and what the core does meanwhile.
SECOND = [
    ("SIGTERM twice", (TERM, TERM), "computes"),
    ("SIGINT twice", (INT, INT), "computes"),
    ("SIGTERM, then SIGINT", (TERM, INT), "computes"),
    ("SIGINT, then SIGTERM twice", (INT, TERM, TERM), "computes"),
    ("SIGTERM twice, core stopped", (TERM, TERM), "stopped"),
    ("SIGTERM twice, core loading", (TERM, TERM), "loading"),
]

# Readers that stall, with more in their way than the kernel and the server take.
STALLED = [
    Call(
        completion(5, seed=seed, prompt_tokens=300, logprobs=20, echo=True),
        group="stalled", stall_after=1, receive_buffer=1, timeout_s=5,
    )
    for seed in range(100, 102)
]  # fmt: skip


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Sends signals to servers under load, and measures how each stream, process and run directory ends."""
    drain(outcome)
    drain_that_runs_out(outcome)
    for name, signals, state in SECOND[:1] + SECOND[4:] if arguments.short else SECOND:
        second_signal(outcome, name, signals, state)


def long_calls(tokens: int = LONG) -> list[Call]:
    return [
        Call(completion(tokens, stream=index < STREAMS, seed=index), group="streams" if index < STREAMS else "whole")
        for index in range(STREAMS + WHOLE)
    ]


def drain(outcome: Outcome) -> None:
    with serving() as server, calling(server.url, long_calls(100)) as client:
        wait_running(server)
        server.send_signal(TERM)
        answers, code = client.wait(), server.wait(30)
        ended = len(answers.ended(DONE))
        outcome.check("SIGTERM: open requests end well", ended == STREAMS + WHOLE, f"{ended} of {STREAMS + WHOLE}")
        left(outcome, "SIGTERM", server, code, expected=0)


def drain_that_runs_out(outcome: Outcome) -> None:
    with serving("--drain-seconds", "1") as server, calling(server.url, long_calls()) as client:
        wait_running(server)
        server.send_signal(TERM)
        answers, code = client.wait(), server.wait(30)
        told(outcome, "a drain that runs out", answers)
        left(outcome, "a drain that runs out", server, code, expected=0)


def second_signal(outcome: Outcome, name: str, signals: tuple[int, ...], state: str) -> None:
    with temporary_folder() as folder:
        run_dir = folder / "run"
        with serving("--run-dir", str(run_dir), wait_ready=state != "loading") as server:
            if state == "loading":
                if wait_until(lambda: "listens on" in server.text() and server.core_pid(), 60) is None:
                    raise TortureError("the server does not listen")
                seconds, code = send(server, signals, pause_s=0.01)
            else:
                with calling(server.url, [*long_calls(), *STALLED]) as client:
                    wait_running(server)
                    if state == "stopped":
                        signal_core(server)
                    seconds, code = send(server, signals)
                    told(outcome, name, client.wait())
            outcome.below(f"{name}: the server ends", seconds, END_SECONDS, "s")
            # The first signal ends a server that loads at once.
            ended_before = state == "loading" and code == 0
            left(outcome, name, server, code, expected=0 if ended_before else 128 + signals[1])
        if state != "loading":
            outcome.check(f"{name}: the run directory reads", *readable(run_dir))


def send(server: Server, signals: tuple[int, ...], pause_s: float = 0.5) -> tuple[float | None, int | None]:
    """Seconds from the second signal to the end, and the exit code."""
    server.send_signal(signals[0])
    time.sleep(pause_s)
    begin = time.monotonic()
    server.send_signal(signals[1])
    for more in signals[2:]:
        time.sleep(0.1)
        if server.process.poll() is None:
            server.send_signal(more)
    code = server.wait(30)
    return (None if code is None else time.monotonic() - begin), code


def signal_core(server: Server) -> None:
    os.kill(server.core_pid(), signal.SIGSTOP)


def wait_running(server: Server) -> None:
    """Until every call has reached the core, and some have a token."""
    if wait_until(lambda: server.metric("sojourn_request_running") >= STREAMS, 30, 0.1) is None:
        raise TortureError("the calls do not run")


def told(outcome: Outcome, name: str, answers: Answers) -> None:
    """Every stream has an error event, and a call that has not begun its answer has 503."""
    streams = [answer for answer in answers.of("streams") if answer.end == ERROR]
    whole = [answer for answer in answers.of("whole") if answer.status == 503]
    outcome.check(f"{name}: every stream gets its error event", len(streams) == STREAMS, f"{len(streams)} of {STREAMS}")
    outcome.check(f"{name}: every other call gets 503", len(whole) == WHOLE, f"{len(whole)} of {WHOLE}")


def left(outcome: Outcome, name: str, server: Server, code: int | None, expected: int) -> None:
    outcome.check(f"{name}: exit code {expected}", code == expected, code)
    wait_until(lambda: not server.group(), 1)
    outcome.check(f"{name}: no process is left", not server.group(), f"{len(server.group())} left")
    outcome.check(f"{name}: no traceback", "Traceback" not in server.text(), server.text().count("Traceback"))


def readable(run_dir: Path) -> tuple[bool, str]:
    """Whether all requests are in a run directory that nothing remains open of."""
    rows = len(RunDirectory.open(run_dir).table("requests"))
    sent = STREAMS + WHOLE + len(STALLED)
    return rows == sent, f"{rows} of {sent} requests"


if __name__ == "__main__":
    main("signals", run)
