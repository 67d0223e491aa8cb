"""The core is killed, stopped or dies again and again; the front is killed: what clients see, and for how long."""

import argparse
import os
import signal
import statistics
import time

from bench.torture.client import DONE, ERROR, Call, calling, completion
from bench.torture.promises import Outcome, TortureError, main
from bench.torture.server import Server, serving, wait_until

STREAMS = 16
ENOUGH_DEATHS = 1000  # so that no number of kills makes the server give up
SPARE_SECONDS = 15  # until a spare waits after a start
NOTICE, KILL = 5.0, 10.0  # settings of the server for a core that is stopped


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Kills and stops cores and fronts under load, and measures the end of streams and the time to serve again."""
    kills(outcome, rounds=2 if arguments.short else 5, spare=True)
    if not arguments.short:
        kills(outcome, rounds=5, spare=False)
    stopped(outcome)
    given_up(outcome)
    front_killed(outcome)


def streams() -> list[Call]:
    return [Call(completion(3500, seed=seed), group="streams") for seed in range(STREAMS)]


def wait_running(server: Server) -> None:
    if wait_until(lambda: server.metric("sojourn_request_running") >= STREAMS, 30, 0.1) is None:
        raise TortureError("the calls do not run")


def kills(outcome: Outcome, rounds: int, *, spare: bool) -> None:
    name = "kill -9 of the core" + ("" if spare else ", without a spare")
    told, ends, unready, recoveries = 0, [], [], []
    with serving("--max-core-deaths", str(ENOUGH_DEATHS), "--spare-core" if spare else "--no-spare-core") as server:
        for _ in range(rounds):
            time.sleep(SPARE_SECONDS if spare else 1)
            with calling(server.url, streams()) as client:
                wait_running(server)
                begin = time.monotonic()
                os.kill(server.core_pid(), signal.SIGKILL)
                unready.append(wait_until(lambda: server.status("/ready") == 503, 10, 0.01))
                if wait_until(lambda: server.status("/ready") == 200, 60) is None:
                    raise TortureError("the server does not serve again")
                recoveries.append(time.monotonic() - begin)
                answers = client.wait().answers
            told += sum(answer.end == ERROR and answer.code == "engine_core_died" for answer in answers)
            ends += [answer.ended_s - begin for answer in answers]
    outcome.check(
        f"{name}: every stream ends with an error event", told == rounds * STREAMS, f"{told} of {rounds * STREAMS}"
    )
    outcome.below(f"{name}: the last error event", max(ends), 1, "s")
    outcome.below(f"{name}: /ready says 503", None if None in unready else max(unready), 1, "s")
    each = ", ".join(f"{seconds:.2f}" for seconds in recoveries)
    outcome.below(
        f"{name}: serving again", max(recoveries), 5, "s", f"median {statistics.median(recoveries):.2f}; {each}"
    )


def stopped(outcome: Outcome) -> None:
    options = ("--core-silence-seconds", f"{NOTICE:g}", "--core-hung-seconds", f"{KILL:g}")
    name = "kill -STOP of the core"
    with serving(*options) as server, calling(server.url, streams()) as client:
        wait_running(server)
        begin = time.monotonic()
        os.kill(server.core_pid(), signal.SIGSTOP)
        noticed = wait_until(lambda: server.status("/ready") == 503, 60)
        answer = server.get("/ready")
        outcome.below(f"{name}: /ready says 503", noticed, NOTICE + 1.5, "s", answer.json()["detail"] if answer else "")
        silence = server.metric("sojourn_telemetry_core_silence_seconds")
        outcome.check(f"{name}: /metrics says how long it is silent", silence > NOTICE, f"{silence:.1f} s")
        ends = [answer.ended_s - begin for answer in client.wait().ended(ERROR)]
        outcome.check(
            f"{name}: every stream ends with an error event", len(ends) == STREAMS, f"{len(ends)} of {STREAMS}"
        )
        outcome.below(f"{name}: the core is killed", max(ends, default=None), KILL + 2.5, "s")
        again = wait_until(lambda: server.status("/ready") == 200, 60)
        outcome.below(f"{name}: serving again", again, 5, "s", "after the last stream ended")


def given_up(outcome: Outcome) -> None:
    with serving("--max-core-deaths", "2") as server:
        os.kill(server.core_pid(), signal.SIGKILL)
        wait_until(lambda: server.status("/ready") == 503, 10)
        server.wait_ready()
        os.kill(server.core_pid(), signal.SIGKILL)
        code = server.wait(20)
        outcome.check("too many deaths: the server gives up with exit code 1", code == 1, code)
        sentence = "died 2 times within 60 s" in server.text() and "Traceback" not in server.text()
        outcome.check("too many deaths: a sentence says so", sentence, server.text().strip().splitlines()[-1])


def front_killed(outcome: Outcome) -> None:
    for name, wait_ready in (("while it loads", False), ("under load", True)):
        with serving(wait_ready=wait_ready) as server:
            if not wait_ready and wait_until(server.core_pid, 60) is None:
                raise TortureError("no core is started")
            with calling(server.url or "http://127.0.0.1:9", streams() if wait_ready else []) as client:
                if wait_ready:
                    wait_running(server)
                begin = time.monotonic()
                server.send_signal(signal.SIGKILL)
                gone = wait_until(lambda: not server.group(), 20)
                outcome.below(f"kill -9 of the front {name}: no process is left", gone, 1, "s")
                answers = client.wait().answers
                open_ends = [answer for answer in answers if answer.end in (DONE, "timeout")]
                last = max((answer.ended_s - begin for answer in answers), default=0)
                outcome.check(f"kill -9 of the front {name}: streams are cut", not open_ends, f"after {last:.2f} s")


if __name__ == "__main__":
    main("core_death", run)
