"""Clients that leave: in the middle of a stream, of an upload, of the queue. Nothing of them may stay."""

import argparse
import socket

from bench.torture.client import Call, call_all, completion
from bench.torture.memory import MIB, growth_of_second_half, read
from bench.torture.promises import Outcome, main
from bench.torture.server import Server, serving, wait_until

GROWTH_MIB = 8  # of a process over the second half of the rounds
FREE_SECONDS = 2
KV_BLOCKS = 640  # 32 calls of 264 tokens fit


def aborted(count: int, seed: int) -> list[Call]:
    """A third leaves after its first text, a third in the middle, a third before anything comes."""
    calls = []
    for index in range(count):
        leave, timeout_s = (1, 60.0) if index % 3 == 0 else (12, 60.0) if index % 3 == 1 else (None, 0.03)
        body = completion(200, seed=seed * 100_000 + index, prompt_tokens=64)
        calls.append(Call(body, at_s=index * 0.005, leave_after=leave, timeout_s=timeout_s))
    return calls


def leave_during_upload(server: Server, count: int) -> None:
    for _ in range(count):
        with socket.create_connection(server.address, timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b'Content-Length: 5000\r\n\r\n{"model": "tiny-model", "prompt": "'
            )


def idle(server: Server) -> bool:
    blocks = server.samples("sojourn_memory_kv_blocks")
    active = sum(value for labels, value in blocks.items() if "active" in labels)
    return active == server.metric("sojourn_request_running") == server.metric("sojourn_request_waiting") == 0


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Clients that leave early, thousands of them."""
    rounds, count = (6, 60) if arguments.short else (10, 400)
    # A KV pool takes memory as it fills: this one is full after the first rounds.
    pool = ("--num-kv-blocks", str(KV_BLOCKS))
    with serving("--max-num-seqs", "32", "--max-waiting", "100000", *pool) as server:
        readings, slowest, left = [], 0.0, 0
        for number in range(rounds):
            answers = call_all(server.url, aborted(count, number), keep_events=False)
            left += len(answers.ended("left", "timeout"))
            freed = wait_until(lambda: idle(server), 20)
            slowest = max(slowest, 20.0 if freed is None else freed)
            readings.append(read(server))
        outcome.check("the clients leave early", left >= rounds * count * 0.9, f"{left} of {rounds * count}")
        outcome.below("blocks, running and waiting are 0 after the last client has left", slowest, FREE_SECONDS, "s")
        for process in ("front", "core"):
            rss = [getattr(reading, f"{process}_rss_bytes") / MIB for reading in readings]
            grown = growth_of_second_half(range(rounds), rss)
            shown = " → ".join(f"{value:.0f}" for value in rss[:: max(1, rounds // 5)])
            outcome.below(f"memory of the {process} levels off", grown, GROWTH_MIB, "MiB in the second half", shown)
            fds = [getattr(reading, f"{process}_fds") for reading in readings]
            outcome.check(f"descriptors of the {process} come back", fds[-1] <= fds[0] + 2, f"{fds[0]} → {fds[-1]}")
        leave_during_upload(server, 50)
        wait_until(lambda: idle(server), 5)
        outcome.check("no traceback where clients leave, also during an upload", "Traceback" not in server.text(),
                      f"{server.text().count('Traceback')} tracebacks")  # fmt: skip
        outcome.check("the server serves on", server.status("/ready") == 200, server.status("/ready"))


if __name__ == "__main__":
    main("aborts", run)
