"""Calls from a process of their own, with that process's own delay reported beside what it measured.

A client in the process of the script would add the script's work to every figure. All times are `time.monotonic()`
seconds, which processes of one machine share.
"""

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from bench.torture.promises import TortureError
from bench.torture.server import start_session, temporary_folder

DONE, ERROR, CUT, TIMEOUT, LEFT, REFUSED = "done", "error", "cut", "timeout", "left", "refused"


class Call(msgspec.Struct, frozen=True):
    """One HTTP call, on a connection of its own."""

    body: dict | str | None = None  # str: sent as it is
    at_s: float = 0.0  # after the start of the plan
    path: str = "/v1/completions"
    method: str = "POST"
    headers: dict[str, str] = {}
    leave_after: int | None = None  # closes the connection after that many events
    stall_after: int | None = None  # reads no more after that many events, and keeps the connection
    timeout_s: float = 60.0  # of the whole call
    receive_buffer: int | None = None  # bytes; 1 is the smallest that the kernel gives, for readers that stall
    group: str = ""  # of the caller; comes back in the answer
    name: str = ""  # sent as x-request-id


class Loop(msgspec.Struct, frozen=True):
    """`width` callers that send the call again, as soon as it has ended, until `until_s` after the plan's start. The
    name of the call begins the name of each."""

    call: Call
    width: int
    until_s: float
    pause_s: float = 0.0  # between an end and the next call


class Answer(msgspec.Struct):
    """What a caller saw. `end`: done (whole answer), error (an error event in a stream), cut (the connection ended
    early), timeout, left (by the plan), refused (no connection)."""

    group: str
    sent_s: float
    end: str = CUT
    status: int | None = None
    name: str = ""  # x-request-id of the answer, or the one that was sent
    first_s: float | None = None  # first event of a stream
    ended_s: float = 0.0
    event_s: list[float] = []
    retry_after: str | None = None
    code: str | None = None  # of an error
    text: str = ""  # the first 2,000 characters of an answer that is no stream, or of an error event

    @property
    def latency_ms(self) -> float:
        return (self.ended_s - self.sent_s) * 1000

    @property
    def gaps_ms(self) -> list[float]:
        """Between events of the stream."""
        return (np.diff(self.event_s) * 1000).tolist()


class Answers(msgspec.Struct):
    """The answers of one plan. The lag is that of the client's own event loop, and part of its latencies."""

    started_s: float
    answers: list[Answer]
    lag_p99_ms: float = 0.0
    lag_max_ms: float = 0.0

    def of(self, group: str) -> list[Answer]:
        return [answer for answer in self.answers if answer.group == group]

    def ended(self, *ends: str) -> list[Answer]:
        return [answer for answer in self.answers if answer.end in ends]

    @property
    def lag(self) -> str:
        return f"client late by {self.lag_p99_ms:.0f} ms at p99, {self.lag_max_ms:.0f} ms at most"


class Plan(msgspec.Struct):
    url: str
    items: list[Call] = []
    loops: list[Loop] = []
    seconds: float = 600.0  # limit of the whole plan
    keep_events: bool = True  # False: no event times, for long plans


class Client:
    """A plan under way in its own process."""

    def __init__(self, process: subprocess.Popen, seconds: float):
        self.process = process
        self._seconds = seconds
        self._found: Answers | None = None

    def wait(self, timeout_s: float | None = None) -> Answers:
        """All answers, when every call has ended. Raises TortureError if the process ends without them."""
        if self._found is None:
            try:
                output, _ = self.process.communicate(timeout=timeout_s or self._seconds + 60)
            except subprocess.TimeoutExpired:
                raise TortureError("the client process does not end") from None
            if self.process.returncode != 0:
                raise TortureError(f"the client process ended with {self.process.returncode}")
            self._found = msgspec.msgpack.decode(output, type=Answers)
        return self._found


@contextlib.contextmanager
def calling(
    url: str, calls: Sequence[Call] = (), loops: Sequence[Loop] = (), *, seconds: float = 600, keep_events: bool = True
) -> Iterator[Client]:
    """Starts the calls; the block may do something to the server, and `wait` gives the answers."""
    plan = Plan(url, list(calls), list(loops), seconds, keep_events)
    with temporary_folder() as folder:
        log = folder / "client.log"
        process = start_session(
            [sys.executable, "-m", "bench.torture.caller"], log, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.stdin.write(msgspec.json.encode(plan) + b"\n")
        process.stdin.flush()
        try:
            yield Client(process, seconds)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if text := log.read_text(errors="replace"):
                sys.stderr.write(text)


def call_all(url: str, calls: Sequence[Call] = (), loops: Sequence[Loop] = (), **options) -> Answers:
    with calling(url, calls, loops, **options) as client:
        return client.wait()


def completion(max_tokens: int = 64, *, stream: bool = True, prompt_tokens: int = 8, seed: int = 0, **more) -> dict:
    """A body whose answer has exactly `max_tokens` tokens. No two seeds share a prefix."""
    prompt = random.Random(seed).choices(range(260, 1000), k=prompt_tokens)
    return {
        "model": "tiny-model", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream,
    } | more  # fmt: skip


def percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def error_of(text: str) -> dict:
    """The error object of an answer or event, {} if it is none."""
    with contextlib.suppress(ValueError, AttributeError):
        return json.loads(text).get("error") or {}
    return {}
