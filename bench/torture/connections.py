"""Connections that give nothing: half heads, half bodies, huge heads, and more of them than there are descriptors."""

import argparse
import contextlib
import resource
import select
import socket
import time
from collections.abc import Iterator

from bench.torture.client import Call, Loop, calling, completion
from bench.torture.memory import MIB
from bench.torture.promises import Outcome, main
from bench.torture.server import Server, serving

HEAD_SECONDS, BODY_IDLE_SECONDS = 3, 3
LATE_SECONDS = 5  # of a deadline: a refusal lingers for two, and the machine is busy
HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
HALF_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 4000000"
    b'\r\n\r\n{"model": "tiny-model", "prompt": "'
)


@contextlib.contextmanager
def opened(server: Server, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    """Connections that have sent `first`; those that the server does not take are left out."""
    found = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(server.address, timeout=5)
                found.append(connection)
                connection.sendall(first)
        yield found
    finally:
        for connection in found:
            connection.close()


def closed_after(connections: list[socket.socket], seconds: float) -> tuple[int, float]:
    """How many the server closed within that time, and the seconds until the last of them."""
    started, last = time.monotonic(), 0.0
    waiting = dict.fromkeys(connections)
    poll = select.poll()
    by_number = {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, select.POLLIN)
    while waiting and time.monotonic() - started < seconds:
        for number, _ in poll.poll(200):
            connection = by_number[number]
            try:
                ended = not connection.recv(65_536)
            except OSError:
                ended = True
            if ended and connection in waiting:
                poll.unregister(number)
                del waiting[connection]
                last = time.monotonic() - started
    return len(connections) - len(waiting), last


def stalls(outcome: Outcome, count: int) -> None:
    options = ("--head-seconds", str(HEAD_SECONDS), "--body-idle-seconds", str(BODY_IDLE_SECONDS))
    with serving(*options) as server:
        fds = server.usage().num_fds
        stream = Loop(Call(completion(48), group="well"), 2, 3 * (HEAD_SECONDS + LATE_SECONDS))
        with calling(server.url, loops=[stream]) as client:
            for name, first, limit in (
                ("half heads", HALF_HEAD, HEAD_SECONDS),
                ("half bodies", HALF_BODY, BODY_IDLE_SECONDS),
            ):
                before = server.usage().rss_bytes
                with opened(server, count, first) as connections:
                    closed, last = closed_after(connections, limit + 20)
                    grown = (server.usage().rss_bytes - before) / MIB
                outcome.check(f"{name}: the server closes all", closed == count, f"{closed} of {count}")
                outcome.below(f"{name}: closed after", last if closed else None, limit + LATE_SECONDS, "s")
                outcome.below(f"{name}: memory of the front for {count}", grown, 64, "MiB more")
            answers = client.wait()
        failed = [answer for answer in answers.answers if answer.end != "done"]
        outcome.check("streams beside them do not fail", not failed, f"{len(failed)} of {len(answers.answers)}")
        time.sleep(1)
        now = server.usage().num_fds
        outcome.check("descriptors come back", now <= fds + 3, f"{fds} → {now}")
        outcome.check("no traceback", "Traceback" not in server.text(), server.text().count("Traceback"))


def crowd(outcome: Outcome, count: int, soft: int, hard: int | None) -> None:
    """More connections than file descriptors. `hard` None: the process may raise its limit."""

    def limits() -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or most))

    name = f"{count} idle connections, {soft} descriptors" + ("" if hard else " that may be raised")
    with serving("--head-seconds", "60", limits=limits) as server, opened(server, count, b""):
        time.sleep(0.5)
        times = []
        for _ in range(5):
            started = time.monotonic()
            with calling(server.url, [Call(completion(4, stream=False), timeout_s=10)]) as client:
                answer = client.wait().answers[0]
            times.append((answer.ended_s - answer.sent_s) * 1000 if answer.status == 200 else None)
            assert time.monotonic() > started
        served = [value for value in times if value is not None]
        outcome.check(f"{name}: others are served", len(served) == 5, f"{len(served)} of 5")
        outcome.below(f"{name}: the slowest of them", max(served, default=None), 1000, "ms")
        outcome.check(f"{name}: /ready", server.status("/ready") == 200, server.status("/ready"))


def huge_heads(outcome: Outcome, megabytes: int) -> None:
    with serving() as server:
        cases = {
            "a header of 1 MB": b"GET /health HTTP/1.1\r\nHost: a\r\nX-Big: " + b"x" * 1_000_000 + b"\r\n\r\n",
            "10,000 headers": b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X-Many: y\r\n" * 10_000 + b"\r\n",
            "a path of 1 MB": b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        }
        for name, head in cases.items():
            answer = send(server, [head])
            outcome.check(f"{name} is refused with 431", b" 431 " in answer[:20], answer[:40])
        before = server.usage().rss_bytes
        piece = b"X-Big: " + b"x" * 65_000
        answer = send(
            server, [b"GET /health HTTP/1.1\r\nHost: a\r\n", *[piece] * (megabytes * 1_000_000 // len(piece))]
        )
        grown = (server.usage().rss_bytes - before) / MIB
        outcome.below(f"memory of the front for {megabytes} MB of one head", grown, 8, "MiB more", str(answer[:24]))
        outcome.check("the server serves on", server.status("/ready") == 200, server.status("/ready"))


def send(server: Server, parts: list[bytes]) -> bytes:
    """The beginning of the answer; b"" where the server closed without one."""
    with socket.create_connection(server.address, timeout=20) as connection:
        with contextlib.suppress(OSError):
            for part in parts:
                connection.sendall(part)
        with contextlib.suppress(OSError):
            return connection.recv(65_536)
    return b""


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Connections that give nothing, and heads without an end."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    stalls(outcome, 60 if arguments.short else 500)
    count = 300 if arguments.short else 1_100
    crowd(outcome, count, 256 if arguments.short else 1_024, None)
    crowd(outcome, count + 500, 512 if arguments.short else 1_024, 512 if arguments.short else 1_024)
    huge_heads(outcome, 20 if arguments.short else 200)


if __name__ == "__main__":
    main("connections", run)
