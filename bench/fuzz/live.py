"""Fuzzing of a real server over its socket: raw bytes in place of HTTP, and bodies by the OpenAI specification."""

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.torture.server import Server, serving

ANSWER_SECONDS = 30  # a connection that is neither answered nor closed by then hangs
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_BODY = b'{"model": "tiny-model", "prompt": "x", "max_tokens": 2}'
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
SEEDS = (
    _HEAD + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY,
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(_BODY) + _BODY + b"\r\n0\r\n\r\n",
    _HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _HEAD + b"Content-Length: 55\r\nExpect: 100-continue\r\n\r\n" + _BODY,
    b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 5 + b"GET /ready HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n"
    b"Sec-WebSocket-Version: 13\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)
_PARTS = (
    b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b"\xff", b"HTTP/1.1", b"HTTP/9.9", b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n",
    b"Host: \r\n", b"Host: a\r\nHost: b\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"0\r\n\r\n", b"x" * 5000, b"%00",
    b"..//",
)  # fmt: skip


def mutate(draw: random.Random) -> bytes:
    data = bytearray(draw.choice(SEEDS))
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(5)
        if kind == 0 and at < len(data):
            data[at] = draw.randrange(256)
        elif kind == 1:
            data[at:at] = draw.choice(_PARTS)
        elif kind == 2:
            del data[at : at + draw.choice((1, 2, 8, 64))]
        elif kind == 3:
            other = draw.choice(SEEDS)
            data[at:] = other[draw.randrange(len(other)) :]
        else:
            data[at:at] = data[at : at + draw.choice((1, 16, 200))] * draw.choice((1, 2, 10))
    return bytes(data)


def exchange(server: Server, data: bytes, draw: random.Random) -> bytes:
    """What comes back until the server closes, after this side has sent everything. Raises TimeoutError for a hang."""
    with socket.create_connection(server.address, timeout=ANSWER_SECONDS) as connection:
        try:
            cut = draw.randrange(len(data) + 1)
            connection.sendall(data[:cut])
            connection.sendall(data[cut:])
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            return b""
        answer = b""
        try:
            while part := connection.recv(65_536):
                answer += part
        except ConnectionError:
            pass
        return answer


def fuzz_http(seconds: float, seed: int, work: Path) -> None:
    """Raw bytes. Exits with 1 and a line `FAIL …` at the first fault."""
    draw = random.Random(seed)
    end, count = time.monotonic() + seconds, 0
    with serving("--max-model-len", "512") as server:
        core, log_size = server.core_pid(), 0
        while time.monotonic() < end:
            data = mutate(draw)
            count += 1
            try:
                answer = exchange(server, data, draw)
                bad = [status for status in STATUS.findall(answer) if status.startswith(b"5") and status != b"503"]
                fault = f"status {bad[0].decode()}" if bad else ""
            except TimeoutError:
                fault = f"no end of the connection within {ANSWER_SECONDS} s"
            written = server.log.stat().st_size
            if not fault and (written > log_size or count % 100 == 0 or time.monotonic() >= end):
                fault, log_size = fault_of(server, core), written
            if fault:
                file = work / "findings" / f"http-{seed}-{count}"
                file.write_bytes(data)
                print(f"Test unit written to {file}\nFAIL {fault}\n{server.text()[-3000:]}")
                sys.exit(1)
    print(f"{count} inputs")


def fault_of(server: Server, core: int | None) -> str:
    """What is wrong with the server after these inputs."""
    if server.process.poll() is not None:
        return f"the server ended with {server.process.returncode}"
    if server.status("/ready") != 200:
        return "the server is not ready"
    if server.core_pid() != core:
        return "the core was restarted"
    return "a traceback in the log" if "Traceback" in server.text() else ""


def fuzz_specification(seconds: float, seed: int, work: Path) -> None:
    """schemathesis on the part of OpenAI's specification that the server offers."""
    from tests.engine.server.openai.openapi_subset import specification

    file = work / "specification.json"
    file.write_text(json.dumps(specification()))
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    with serving("--max-model-len", "512") as server:
        core = server.core_pid()
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", file, "--url", server.url, "--checks", checks,
            "--phases", "fuzzing", "--mode", "positive", "--max-time", str(int(seconds)), "--max-examples", "100000",
            "--seed", str(seed), "--suppress-health-check", "all", "--request-timeout", "30", "--no-color",
        ]  # fmt: skip
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=work)
        print(done.stdout, done.stderr)
        cases = re.search(r"(\d+) generated", done.stdout)
        print(f"{cases[1] if cases else 0} inputs")
        fault = fault_of(server, core) or ("schemathesis found a failure" if done.returncode else "")
    if fault:
        print(f"FAIL {fault}")
        sys.exit(1)


LIVE: dict[str, Callable[[float, int, Path], None]] = {"http": fuzz_http, "specification": fuzz_specification}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz.live", description=__doc__)
    parser.add_argument("target", choices=LIVE)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--work", type=Path, default=Path("."))
    arguments = parser.parse_args()
    LIVE[arguments.target](arguments.seconds, arguments.seed or time.time_ns() % 2**31, arguments.work)


if __name__ == "__main__":
    main()
