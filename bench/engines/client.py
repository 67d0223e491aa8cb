"""A client of an OpenAI-compatible server at a fixed concurrency, in a process of its own. Started by the benchmark.

While requests run it only stamps what it reads; it parses when the last one has ended. One JSON object a line comes in
({"host", "port", "model", "concurrency", "stream", "prompts", "output_lens"}), for each one goes out.

What it cannot see: a token whose text the server holds back (half a character) arrives with a later chunk. Tokens are
counted by the server's `usage`; times are those of chunks with text.
"""

import asyncio
import gc
import json
import sys
import time
from dataclasses import dataclass, field

import numpy as np

CHUNK_END = b"\r\n"


@dataclass(slots=True)
class Exchange:
    """One request and what was read of its answer."""

    sent_ns: int = 0
    ended_ns: int = 0
    reads: list[tuple[int, bytes]] = field(default_factory=list)  # (when, what)


@dataclass(frozen=True, slots=True)
class Answer:
    """An exchange, parsed."""

    status: int
    text_ns: list[int]  # when each chunk with text was read
    prompt_tokens: int
    output_tokens: int
    body: bytes


async def exchange(host: str, port: int, request: bytes) -> Exchange:
    """Sends one request over a connection of its own, and reads to the end of the connection."""
    done = Exchange()
    reader, writer = await asyncio.open_connection(host, port)
    done.sent_ns = time.monotonic_ns()
    writer.write(request)
    while data := await reader.read(65536):
        done.reads.append((time.monotonic_ns(), data))
    done.ended_ns = done.reads[-1][0] if done.reads else time.monotonic_ns()
    writer.close()
    return done


def request_bytes(order: dict, prompt: list[int], length: int) -> bytes:
    body = {
        "model": order["model"], "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True,
    } | ({"stream": True, "stream_options": {"include_usage": True}} if order["stream"] else {})  # fmt: skip
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {order['host']}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


def parse(done: Exchange) -> Answer:
    """Reads an answer's status, its events and its usage out of the raw bytes."""
    whole = b"".join(data for _, data in done.reads)
    head, _, body = whole.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.count(b" ") >= 2 else 0
    chunked = b"transfer-encoding: chunked" in head.lower()
    pieces = _chunks(body, len(head) + 4) if chunked else [(len(whole), body)]
    ends = np.cumsum([len(data) for _, data in done.reads])
    text_ns, usage, line, content = [], {}, b"", []
    for end, piece in pieces:
        content.append(piece)
        *lines, line = (line + piece).split(b"\n")
        for event in lines:
            content_of = _event(event)
            usage = content_of.get("usage") or usage
            if any(choice.get("text") for choice in content_of.get("choices", ())):
                text_ns.append(done.reads[int(np.searchsorted(ends, end))][0])
    body = b"".join(content)
    if not usage and status == 200 and body.lstrip().startswith(b"{"):
        usage = json.loads(body)["usage"]
    return Answer(status, text_ns, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), body)


def _chunks(body: bytes, offset: int) -> list[tuple[int, bytes]]:
    """Chunks of a chunked body, each with the offset of its end in all that was read."""
    found, at = [], 0
    while True:
        line_end = body.find(CHUNK_END, at)
        size = int(body[at:line_end].split(b";")[0], 16) if line_end > at else 0
        if size == 0:
            return found
        begin = line_end + 2
        found.append((offset + begin + size, body[begin : begin + size]))
        at = begin + size + 2


def _event(line: bytes) -> dict:
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return {}
    return json.loads(line[5:])


async def run(order: dict) -> tuple[int, int, list[Exchange]]:
    """All requests, `concurrency` of them at a time: when it began and ended, and the exchanges."""
    gate = asyncio.Semaphore(order["concurrency"])
    pairs = zip(order["prompts"], order["output_lens"], strict=True)
    requests = [request_bytes(order, prompt, length) for prompt, length in pairs]

    async def one(request: bytes) -> Exchange:
        async with gate:
            return await exchange(order["host"], order["port"], request)

    begin_ns = time.monotonic_ns()
    done = await asyncio.gather(*[one(request) for request in requests])
    return begin_ns, max(item.ended_ns for item in done), done


def figures(begin_ns: int, end_ns: int, done: list[Exchange], answers: list[Answer], stream: bool) -> dict[str, float]:
    """Tokens a second of all requests together, and percentiles in milliseconds."""
    tokens = sum(answer.output_tokens for answer in answers)
    values = {"output_tokens_per_s": tokens / (end_ns - begin_ns) * 1e9, "wall_s": (end_ns - begin_ns) / 1e9}
    if stream:
        firsts = [answer.text_ns[0] - item.sent_ns for item, answer in zip(done, answers, strict=True)]
        gaps = np.concatenate([np.diff(answer.text_ns) for answer in answers])
        for name, times_ns in (("ttft", firsts), ("itl", gaps)):
            for percent in (50, 99):
                values[f"{name}_p{percent}_ms"] = (
                    float(np.percentile(times_ns, percent)) / 1e6 if len(times_ns) else 0.0
                )
    return values


def fault(order: dict, answers: list[Answer]) -> str | None:
    """Why this is no measurement of the order, as a sentence; None if it is one."""
    for index, (prompt, length) in enumerate(zip(order["prompts"], order["output_lens"], strict=True)):
        answer = answers[index]
        if answer.status != 200:
            return f"request {index} was answered {answer.status}: {answer.body[:200].decode(errors='replace')}"
        if answer.output_tokens != length:
            return f"request {index} asked for {length} tokens and was given {answer.output_tokens}"
        if answer.prompt_tokens != len(prompt):
            return f"request {index} has {len(prompt)} prompt tokens, and {answer.prompt_tokens} were counted"
        if order["stream"] and not answer.text_ns:
            return f"request {index} was answered without any text"
    return None


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        gc.collect()  # what the last order left is not collected while this one is timed
        begin_ns, end_ns, done = asyncio.run(run(order))
        answers = [parse(item) for item in done]
        measured = {"begin_ns": begin_ns, "end_ns": end_ns, "fault": fault(order, answers)}
        if measured["fault"] is None:
            measured["figures"] = figures(begin_ns, end_ns, done, answers, order["stream"])
        print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
