"""Clients that stop reading: the memory that they cost, the delay of others, and the end of their calls."""

import argparse
import time

from bench.torture.client import Answers, Call, Loop, call_all, calling, completion, percentile
from bench.torture.memory import MIB
from bench.torture.promises import Outcome, main
from bench.torture.server import Server, serving, wait_until

FRONT_MIB = 2  # of the front for each reader: what uvicorn and the kernel hold of an answer
RATIO = 1.1  # p99 of the gaps beside the readers to that without them
SEND_SECONDS = 12
SWEEP_SECONDS = 4  # for the server to find out, on a busy machine
DRAIN_SECONDS = 3


def well_behaved(server: Server, seconds: float) -> Answers:
    body = completion(64, prompt_tokens=16)
    return call_all(server.url, loops=[Loop(Call(body, group="well"), 4, seconds)])


def gaps(*phases: Answers) -> list[float]:
    return [gap for phase in phases for answer in phase.answers for gap in answer.gaps_ms]


def slow_calls(count: int) -> list[Call]:
    """Each answer is 150 kB and more: far above what the kernel and uvicorn hold for one connection."""
    return [
        Call(completion(400, seed=index, logprobs=20), stall_after=2, receive_buffer=1, timeout_s=120, group="slow")
        for index in range(count)
    ]


def decoded(server: Server) -> bool:
    return server.metric("sojourn_request_running") == 0 == server.metric("sojourn_request_waiting")


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Readers that stall, beside clients that read."""
    count, seconds = (8, 3.0) if arguments.short else (32, 5.0)
    options = ("--send-seconds", str(SEND_SECONDS), "--drain-seconds", str(DRAIN_SECONDS))
    with serving("--max-num-seqs", "64", *options) as server:
        well_behaved(server, 1)
        alone = well_behaved(server, seconds)
        before = server.usage().rss_bytes
        with calling(server.url, slow_calls(count), seconds=90):
            started = time.monotonic()
            wait_until(lambda: decoded(server) and time.monotonic() - started > 1, 30, 0.1)
            decoding_s = time.monotonic() - started
            beside = well_behaved(server, seconds)
            grown = (server.usage().rss_bytes - before) / MIB
            outcome.below(f"memory of the front with {count} stalled readers", grown, FRONT_MIB * count, "MiB more")
            ends = wait_until(lambda: server.usage().num_fds < 24 + count // 2, SEND_SECONDS + 60, 0.2)
            waited = time.monotonic() - started
            outcome.check("stalled readers are disconnected", ends is not None, f"after {waited:.1f} s")
            bound = decoding_s + SEND_SECONDS + SWEEP_SECONDS + seconds
            outcome.below("... within send_seconds after their last read", waited, bound, "s",
                          f"decoding took {decoding_s:.1f} s, send_seconds is {SEND_SECONDS}")  # fmt: skip
        again = well_behaved(server, seconds)
        failed = [answer for phase in (alone, beside, again) for answer in phase.answers if answer.end != "done"]
        outcome.check("no other stream fails", not failed, f"{len(failed)} of {len(beside.answers)} beside them")
        base, found = percentile(gaps(alone, again), 99), percentile(gaps(beside), 99)
        ratio = found / base if base and found else None
        outcome.below("p99 gap of others beside readers whose decoding has ended", ratio, RATIO, "times that alone",
                      f"{base:.2f} → {found:.2f} ms, {beside.lag}" if ratio else "")  # fmt: skip
        terminate(outcome, server, count)


def terminate(outcome: Outcome, server: Server, count: int) -> None:
    with calling(server.url, slow_calls(count), seconds=60):
        wait_until(lambda: server.metric("sojourn_request_running") > 0, 10)
        time.sleep(1)
        started = time.monotonic()
        server.send_signal(15)
        code = server.wait(60)
        took = time.monotonic() - started
        outcome.check("SIGTERM beside stalled readers ends with exit code 0", code == 0, f"exit code {code}")
        # uvicorn gives open connections five more seconds after the drain.
        outcome.below("... in the drain time and the farewell", took, DRAIN_SECONDS + 8, "s")
        left = server.group()
        outcome.check("... and leaves no process", not left, f"{len(left)} left")


if __name__ == "__main__":
    main("slow_readers", run)
