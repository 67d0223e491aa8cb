"""The process behind `client.calling`: reads a plan from stdin, makes its calls, writes the answers to stdout."""

import asyncio
import itertools
import json
import socket
import sys
import time

import msgspec
import numpy as np

from bench.torture.client import (
    CUT,
    DONE,
    ERROR,
    LEFT,
    REFUSED,
    TIMEOUT,
    Answer,
    Answers,
    Call,
    Loop,
    Plan,
    error_of,
)

LAG_STEP_S = 0.005
READ_LIMIT = 1 << 20  # bytes of one line, or of an answer's head


async def follow(plan: Plan) -> Answers:
    started = time.monotonic()
    found = Answers(started, [])
    lags: list[float] = []
    watching = asyncio.create_task(measure_lag(lags))
    tasks = [asyncio.create_task(one(plan, call, found)) for call in plan.items]
    for number, loop in enumerate(plan.loops):
        tasks += [asyncio.create_task(repeat(plan, loop, found, f"{number}-{each}")) for each in range(loop.width)]
    done, pending = await asyncio.wait(tasks, timeout=plan.seconds) if tasks else (set(), set())
    for task in pending:  # each adds its answer as one that ran out of time
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    watching.cancel()
    if lags:
        found.lag_p99_ms, found.lag_max_ms = float(np.percentile(lags, 99)) * 1000, max(lags) * 1000
    return found


async def measure_lag(lags: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(LAG_STEP_S)
        lags.append(time.monotonic() - before - LAG_STEP_S)


async def one(plan: Plan, call: Call, found: Answers) -> None:
    await asyncio.sleep(max(0.0, found.started_s + call.at_s - time.monotonic()))
    await make(plan, call, found)


async def repeat(plan: Plan, loop: Loop, found: Answers, caller: str) -> None:
    await asyncio.sleep(loop.call.at_s)
    until = found.started_s + loop.until_s
    for turn in itertools.count():
        if time.monotonic() >= until:
            return
        name = f"{loop.call.name}-{caller}-{turn}" if loop.call.name else ""
        answer = await make(plan, msgspec.structs.replace(loop.call, name=name), found)
        await asyncio.sleep(max(loop.pause_s, 0.05 if answer.end == REFUSED else 0.0))


async def make(plan: Plan, call: Call, found: Answers) -> Answer:
    answer = Answer(call.group, time.monotonic(), name=call.name)
    try:
        async with asyncio.timeout(call.timeout_s):
            answer.end = await exchange(plan.url, call, answer)
    except TimeoutError:
        answer.end = TIMEOUT
    except ConnectionRefusedError:
        answer.end = REFUSED
    except (OSError, asyncio.IncompleteReadError, ValueError):
        answer.end = CUT
    except asyncio.CancelledError:
        answer.end = TIMEOUT
        raise
    finally:
        answer.ended_s = time.monotonic()
        if not plan.keep_events:
            answer.event_s = []
        found.answers.append(answer)
    return answer


async def exchange(url: str, call: Call, answer: Answer) -> str:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await connect(host, int(port), call.receive_buffer)
    try:
        writer.write(request_bytes(host, call))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        answer.status = int(head[0].split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        answer.retry_after = headers.get("retry-after")
        answer.name = headers.get("x-request-id", answer.name)
        if "text/event-stream" in headers.get("content-type", ""):
            return await read_events(reader, writer, call, answer)
        content = await read_whole(reader, headers)
        answer.text = content[:2000].decode("utf-8", "replace")
        answer.code = error_of(answer.text).get("code")
        return DONE
    finally:
        writer.transport.abort()


async def connect(
    host: str, port: int, receive_buffer: int | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    opened = socket.socket()
    try:
        opened.setblocking(False)
        if receive_buffer is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        await asyncio.get_running_loop().sock_connect(opened, (host, port))
        return await asyncio.open_connection(sock=opened, limit=READ_LIMIT)
    except BaseException:
        opened.close()
        raise


def request_bytes(host: str, call: Call) -> bytes:
    content = b""
    if call.body is not None:
        content = (call.body if isinstance(call.body, str) else json.dumps(call.body)).encode()
    headers = {"host": host, "connection": "close", "content-length": str(len(content))}
    if content:
        headers["content-type"] = "application/json"
    if call.name:
        headers["x-request-id"] = call.name
    headers |= {name.lower(): value for name, value in call.headers.items()}
    lines = [f"{call.method} {call.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + content


async def read_whole(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read()


async def read_events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: Call, answer: Answer) -> str:
    """Times each event of a stream. The stream has ended well only with `[DONE]`, or the last event of a response."""
    while True:
        line = await reader.readline()
        if not line:
            return CUT
        if not line.startswith(b"data:"):
            continue
        now, data = time.monotonic(), line[5:].strip()
        if data == b"[DONE]" or b'"type":"response.completed"' in data or b'"type":"message_stop"' in data:
            return DONE
        if error := (error_of(data.decode("utf-8", "replace")) if b'"error"' in data else None):
            answer.text, answer.code = data[:2000].decode("utf-8", "replace"), error.get("code")
            return ERROR
        answer.first_s = answer.first_s or now
        answer.event_s.append(now)
        if call.leave_after is not None and len(answer.event_s) >= call.leave_after:
            return LEFT
        if call.stall_after is not None and len(answer.event_s) >= call.stall_after:
            writer.transport.pause_reading()  # the kernel's buffers fill, and the server's writes stop
            await asyncio.sleep(call.timeout_s)


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=Plan)
    sys.stdout.buffer.write(msgspec.msgpack.encode(asyncio.run(follow(plan))))


if __name__ == "__main__":
    main()
