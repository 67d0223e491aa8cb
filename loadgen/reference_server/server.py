"""A server whose write times are known: it speaks OpenAI's API, computes nothing and records when it wrote each chunk.

    python -m sojourn.loadgen.reference_server.server '{"ttft_s": 0.05, "token_s": 0.02, "in_step": true}' --port 8000

Every write has a due time on an absolute schedule. The timers of the event loop are right within a millisecond. The
delay of each write is recorded (`due_ns`, `write_ns`), and a client is compared with the write, not with the plan.
GET /log returns everything as a ReferenceLog. One process, one thread; a token is a word.
"""

import argparse
import asyncio
import gc
import heapq
import json
import signal
import socket
import struct
import sys
import time
from itertools import count
from time import monotonic_ns
from typing import Any

import httptools
import msgspec

from sojourn.loadgen.reference_server.instructions import ReferenceLog, ReplyTiming, ServedRequest

MODEL = "reference"
MAX_MODEL_LEN = 1_000_000
DEFAULT_MAX_TOKENS = 16
WORD = " the"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of no time
COMPLETIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat.completion"}


class ReferenceServer:
    """Owns the schedule of all writes, the server's clock and the log. Runs on one event loop."""

    def __init__(self, timing: ReplyTiming):
        self.timing = timing
        self.log = ReferenceLog(timing, [], [])
        self._start_ns = monotonic_ns()
        self.stopped_ns = 0  # total time that the server's own clock has stood still
        self._due: list[tuple[int, int, Stream]] = []  # heap, by the server's own clock
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    async def listen(self, host: str, port: int) -> asyncio.Server:
        self._loop = asyncio.get_running_loop()
        return await self._loop.create_server(lambda: Connection(self), host, port, backlog=4096)

    def now_ns(self) -> int:
        """The server's own clock, which stands still in a stall."""
        return monotonic_ns() - self.stopped_ns

    def admit(self, served: ServedRequest) -> None:
        """Adds a request to the log. The first one sets the time of the stall."""
        self.log.requests.append(served)
        if len(self.log.requests) == 1 and self.timing.stall_s:
            self._loop.call_later(self.timing.stall_at_s, self._stall)

    def first_due_ns(self, read_ns: int) -> int:
        """When the first chunk of a request is due that was read at `read_ns`, by the server's own clock."""
        timing = self.timing
        due_ns = read_ns - self.stopped_ns + round(timing.ttft_s * 1e9)
        if not timing.in_step:
            return due_ns
        step_ns = round(timing.token_s * timing.tokens_per_chunk * 1e9)
        return due_ns + (self._start_ns - due_ns) % step_ns

    def schedule(self, due_ns: int, stream: "Stream") -> None:
        heapq.heappush(self._due, (due_ns, next(self._order), stream))
        if self._timer is None or due_ns < self._timer_ns:
            self._arm(due_ns)

    def _arm(self, due_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = due_ns
        self._timer = self._loop.call_later(max(due_ns - self.now_ns(), 0) / 1e9, self._write_all_due)

    def _write_all_due(self) -> None:
        """Writes all chunks that are due now. Later ones wait until the loop has read its sockets."""
        self._timer = None
        due, now_ns = self._due, self.now_ns()
        while due and due[0][0] <= now_ns:
            due_ns, _, stream = heapq.heappop(due)
            next_ns = stream.write(due_ns)
            if next_ns is not None:
                heapq.heappush(due, (next_ns, next(self._order), stream))
        if due:
            self._arm(due[0][0])

    def _stall(self) -> None:
        """Blocks the whole process, so that nothing is accepted, read or written."""
        from_ns = monotonic_ns()
        time.sleep(self.timing.stall_s)
        to_ns = monotonic_ns()
        self.stopped_ns += to_ns - from_ns
        self.log.stalls.append((from_ns, to_ns))
        if self._due:
            self._arm(self._due[0][0])


class Stream:
    """The reply to one request: builds its chunks and stamps each write."""

    def __init__(
        self, server: ReferenceServer, connection: "Connection", served: ServedRequest, body: dict[str, Any], kind: str
    ):
        timing = server.timing
        self.served = served
        self._server, self._connection = server, connection
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        self._left = max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else DEFAULT_MAX_TOKENS
        self._written = 0
        self._per_chunk = timing.tokens_per_chunk
        self._streamed = bool(body.get("stream"))
        self._chat = kind == "chat.completion"
        options = body.get("stream_options") or {}
        self._usage = bool(options.get("include_usage"))
        self._continuous = self._usage and bool(options.get("continuous_usage_stats"))
        self._gap_ns = round(timing.token_s * self._per_chunk * 1e9)
        resets = timing.reset_every and len(server.log.requests) % timing.reset_every == 0
        self._reset_after = -(-self._left // self._per_chunk) // 2 if resets else -1
        self._opening = {
            "id": served.request_id, "object": f"{kind}.chunk" if self._chat else kind, "created": int(time.time()),
            "model": body.get("model") or MODEL,
        }  # fmt: skip
        first_ns = server.first_due_ns(served.read_ns)
        if self._streamed:
            connection.send(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
                + connection.ending
            )
        else:
            first_ns += round((self._left - 1) * timing.token_s * 1e9)
        server.schedule(first_ns, self)

    def write(self, due_ns: int) -> int | None:
        """Writes one chunk. Returns when the next one is due, by the server's own clock; None after the last one."""
        served = self.served
        if served.end != "open":
            return None
        if len(served.tokens) == self._reset_after:
            served.end = "reset"
            self._connection.reset()
            return None
        num_tokens = min(self._per_chunk, self._left) if self._streamed else self._left
        self._left -= num_tokens
        self._written += num_tokens
        if self._streamed:
            data = self._chunk(num_tokens)
        else:
            data = self._connection.document(200, msgspec.json.encode(self._content(num_tokens, usage=True)))
        served.tokens.append(num_tokens)
        served.due_ns.append(due_ns + self._server.stopped_ns)
        served.write_ns.append(monotonic_ns())
        self._connection.send(data)
        if self._left:
            return due_ns + self._gap_ns
        served.end = "ok"
        self._connection.finish()
        return None

    def _chunk(self, num_tokens: int) -> bytes:
        """The events of one write, as one HTTP chunk; the last one ends the message too."""
        content = _event(self._content(num_tokens, self._continuous))
        if not self._left:
            if self._usage:
                content += _event({**self._opening, "choices": [], "usage": self._usage_now()})
            content += b"data: [DONE]\n\n"
        return b"%x\r\n%s\r\n" % (len(content), content) + (b"" if self._left else b"0\r\n\r\n")

    def _content(self, num_tokens: int, usage: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"text": WORD * num_tokens}
        if self._chat:
            role = {"role": "assistant"} if self._written == num_tokens else {}
            content = {"delta" if self._streamed else "message": {**role, "content": WORD * num_tokens}}
        choice = {"index": 0, **content, "finish_reason": None if self._left else "length"}
        return {**self._opening, "choices": [choice]} | ({"usage": self._usage_now()} if usage else {})

    def _usage_now(self) -> dict[str, int]:
        prompt, output = self.served.prompt_tokens, self._written
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(content)


class Connection(asyncio.Protocol):
    """One client connection; httptools calls the `on_…` methods. One request at a time, as HTTP/1.1 clients do."""

    def __init__(self, server: ReferenceServer):
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._stream: Stream | None = None
        self.ending = b"\r\n"  # of a header: with `Connection: close` where the client sent it

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if delay_s := self._server.timing.accept_delay_s:
            transport.pause_reading()
            asyncio.get_running_loop().call_later(delay_s, transport.resume_reading)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._parser = None  # it holds this object's methods
        if self._stream is not None and self._stream.served.end == "open":
            self._stream.served.end = "gone"

    def on_message_begin(self) -> None:
        self._url, self._body, self._request_id = b"", b"", ""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        read_ns = monotonic_ns()
        self._keeps_open = self._parser.should_keep_alive()
        self.ending = b"\r\n" if self._keeps_open else b"Connection: close\r\n\r\n"
        path = self._url.decode("latin-1").partition("?")[0]
        if path in COMPLETIONS:
            self._complete(path, read_ns)
        elif path == "/tokenize":
            num_tokens = _prompt_tokens(_object(self._body))
            self._reply(200, {"count": num_tokens, "max_model_len": MAX_MODEL_LEN, "tokens": [0] * num_tokens})
        elif path == "/v1/models":
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "sojourn", "max_model_len": MAX_MODEL_LEN}
            self._reply(200, {"object": "list", "data": [card]})
        elif path in ("/health", "/ready"):
            self._reply(200, {})
        elif path == "/log":
            self._reply(200, self._server.log)
        else:
            self._reply(404, {"error": {"message": f"there is no {path} here"}})

    def _complete(self, path: str, read_ns: int) -> None:
        server, timing = self._server, self._server.timing
        body, number = _object(self._body), len(server.log.requests) + 1
        served = ServedRequest(self._request_id or f"reference-{number}", read_ns, _prompt_tokens(body))
        server.admit(served)
        if timing.error_every and number % timing.error_every == 0:
            served.end = "error"
            self._reply(500, {"error": {"message": "an error that was asked for"}})
            return
        self._stream = Stream(server, self, served, body, COMPLETIONS[path])

    def _reply(self, status: int, content: Any) -> None:
        self.send(self.document(status, msgspec.json.encode(content)))
        self.finish()

    def document(self, status: int, content: bytes) -> bytes:
        head = f"HTTP/1.1 {status} Reference\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        return head.encode() + self.ending + content

    def send(self, data: bytes) -> None:
        """At once, if the socket takes it: asyncio's own transport tries so first, other loops may queue."""
        self._transport.write(data)

    def finish(self) -> None:
        if not self._keeps_open:
            self._transport.close()

    def reset(self) -> None:
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._transport.abort()


def _object(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _prompt_tokens(body: dict[str, Any]) -> int:
    """Words of the prompt or of the messages, or the number of token ids."""
    prompt = body.get("prompt", [message.get("content") for message in body.get("messages") or []])
    parts = [prompt] if isinstance(prompt, str) else prompt
    words = 0
    for part in parts:
        if isinstance(part, list):  # the parts of a message's content, or one prompt of several
            part = " ".join(str(piece.get("text", "")) if isinstance(piece, dict) else str(piece) for piece in part)
        words += 1 if isinstance(part, int) else len((part or "").split())
    return words


async def _serve(timing: ReplyTiming, host: str, port: int) -> None:
    listening = await ReferenceServer(timing).listen(host, port)
    ended = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, ended.set)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await ended.wait()


def main() -> None:
    """Prints its port and serves until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("timing", metavar="JSON", nargs="?", default="{}", help="fields of ReplyTiming")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="by default a free one")
    arguments = parser.parse_args()
    fields = ", ".join(ReplyTiming.__struct_fields__)
    try:
        timing = msgspec.json.decode(arguments.timing, type=ReplyTiming)
    except msgspec.DecodeError as error:
        parser.error(f"{arguments.timing!r} is no ReplyTiming: {error}; its fields are {fields}")
    if fault := timing.fault():
        parser.error(fault)
    gc.disable()  # a collection would be a stall that is not planned; references are dropped when a connection ends
    asyncio.run(_serve(timing, arguments.host, arguments.port))


if __name__ == "__main__":
    sys.exit(main())
