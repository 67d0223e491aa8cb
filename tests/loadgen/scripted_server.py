"""A server whose every delay is known: it speaks SSE as it is told, and remembers what it was asked.

Run as a program it prints its port and serves until it is killed; tests start it so, or as a thread.
"""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Script:
    """How each request is answered."""

    first_token_s: float = 0.02
    gap_s: float = 0.01
    num_tokens: int = 5
    stall_from_s: float = 0.0  # after the first request: nothing is answered between these two moments
    stall_to_s: float = 0.0
    status: int = 200
    break_after: int | None = None  # close the connection after this many tokens
    error_after: int | None = None  # send an error event after this many tokens
    keep_open: bool = False  # ignore Connection: close
    card: dict = field(default_factory=dict)  # what GET /v1/models tells beside the name
    hang: bool = False  # read the request and never answer
    usage: bool = True
    metrics: bool = True
    page: bytes = b""  # more of /metrics
    headers: bytes = b""  # more of a streamed answer, each with its end of line
    version: str = ""  # that GET /version tells
    tokenize: Callable[[str], list[int]] | None = None  # POST /tokenize, where there is one


@dataclass
class ScriptedServer:
    script: Script = field(default_factory=Script)
    port: int = 0
    seen: list[dict] = field(default_factory=list)  # headers, body and arrival of each request
    first_ns: int | None = None

    def start(self) -> "ScriptedServer":
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True).start()
        assert ready.wait(10)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", self.port, backlog=512)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            arrived_ns = time.monotonic_ns()
            headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(headers.get("Content-Length", 0)))
            path = head.split()[1]
            if path == "/v1/models":
                await self._document(writer, 200, {"object": "list", "data": [{"id": "scripted", **self.script.card}]})
            elif path == "/metrics" and self.script.metrics:
                await self._text(
                    writer,
                    b"# TYPE scripted_requests counter\nscripted_requests_total %d\n" % len(self.seen)
                    + self.script.page,
                )
            elif path == "/version" and self.script.version:
                await self._document(writer, 200, {"version": self.script.version})
            elif path == "/tokenize" and self.script.tokenize:
                ids = self.script.tokenize(json.loads(body)["prompt"])
                await self._document(writer, 200, {"tokens": ids, "count": len(ids), "max_model_len": 4096})
            elif path in ("/v1/completions", "/v1/chat/completions"):
                self.seen.append({"headers": headers, "body": json.loads(body), "arrived_ns": arrived_ns})
                await self._complete(writer, path, json.loads(body), arrived_ns)
            else:
                await self._document(writer, 404, {"error": {"message": f"no {path} here"}})
            if self.script.keep_open:
                await asyncio.sleep(60)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(self, writer, path: str, body: dict, arrived_ns: int) -> None:
        script = self.script
        self.first_ns = self.first_ns or arrived_ns
        if script.hang:
            await asyncio.sleep(60)
        await self._wait_out_stall()
        if script.status != 200:
            await self._document(writer, script.status, {"error": {"message": f"scripted {script.status}"}})
            return
        if not body.get("stream"):
            await self._whole(writer, path, script.num_tokens)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            + script.headers
            + b"Transfer-Encoding: chunked\r\n\r\n"
        )
        chat = path.endswith("chat/completions")
        if chat:
            await self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for token in range(script.num_tokens):
            await asyncio.sleep(script.first_token_s if token == 0 else script.gap_s)
            await self._wait_out_stall()
            if token == script.break_after:
                return
            if token == script.error_after:
                await self._event(writer, {"error": {"message": "the core died"}})
                return
            choice = {"delta": {"content": f"w{token} "}} if chat else {"text": f"w{token} "}
            choice["finish_reason"] = "length" if token == script.num_tokens - 1 else None
            usage = {"usage": {"prompt_tokens": 7, "completion_tokens": token + 1}} if script.usage else {}
            await self._event(writer, {"choices": [choice], **usage})
        if script.usage:
            details = {"prompt_tokens_details": {"cached_tokens": 3}}
            total = {"prompt_tokens": 7, "completion_tokens": script.num_tokens, **details}
            await self._event(writer, {"choices": [], "usage": total})
        await self._chunk(writer, b"data: [DONE]\n\n")
        if not script.keep_open:  # the end goes out with the close: nobody can take the connection for one that stands
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, True)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _wait_out_stall(self) -> None:
        since_s = (time.monotonic_ns() - self.first_ns) / 1e9
        if self.script.stall_from_s <= since_s < self.script.stall_to_s:
            await asyncio.sleep(self.script.stall_to_s - since_s)

    async def _whole(self, writer, path: str, num_tokens: int) -> None:
        text = " ".join(f"w{token}" for token in range(num_tokens))
        choice = {"message": {"content": text}} if path.endswith("chat/completions") else {"text": text}
        usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
        await self._document(writer, 200, {"choices": [{**choice, "finish_reason": "stop"}], "usage": usage})

    async def _event(self, writer, content: dict) -> None:
        await self._chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")

    async def _chunk(self, writer, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await writer.drain()

    async def _document(self, writer, status: int, content: dict) -> None:
        await self._text(writer, json.dumps(content).encode(), status, "application/json")

    async def _text(self, writer, data: bytes, status: int = 200, kind: str = "text/plain; version=0.0.4") -> None:
        head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()


if __name__ == "__main__":
    server = ScriptedServer(Script(**json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})).start()
    print(server.port, flush=True)
    threading.Event().wait()
