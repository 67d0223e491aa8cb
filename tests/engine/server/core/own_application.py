"""The application in this process, with a core of its own, and callers that leave."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path

import httpx
from fastapi import FastAPI

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.app import build_app
from sojourn.metrics.run.directory import RunDirectory

MODEL, COMPLETIONS = "tiny-model", "/v1/completions"


@contextlib.asynccontextmanager
async def running(folder: Path, **settings) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """The application in this process, with a core of its own, and a client of it. Records are read after it ended."""
    config = EngineConfig(model=MODEL, threads=1, run_dir=folder / "run", spare_core=False, **settings)
    app = build_app(config)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        await until(lambda: app.state.front.first.core.state == "ready")
        yield app, client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def abandoned(
    app: FastAPI, body: dict, leave: Callable[[list[dict]], Awaitable[None]], name: str = "",
    path: str = COMPLETIONS,
) -> None:  # fmt: skip
    """A call whose client leaves when `leave(what was written to it)` returns."""
    content = json.dumps(
        {"model": MODEL, "ignore_eos": True} | ({"prompt": "The"} if path == COMPLETIONS else {}) | body
    ).encode()
    messages, written = [{"type": "http.request", "body": content}], []

    async def receive() -> dict:
        if messages:
            return messages.pop()
        await leave(written)
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        written.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]
        + ([(b"x-request-id", name.encode())] if name else []),
        "scheme": "http", "server": ("x", 80), "client": ("x", 1), "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)


def rows(folder: Path) -> list:
    return list(RunDirectory(folder / "run").table("requests").itertuples())


class SharedApplication:
    """One for several tests, none of which ends its core."""

    def __init__(self, folder: Path):
        self._folder, self._runner = folder, asyncio.Runner()
        self._context = running(folder, max_num_seqs=8, max_waiting=400)
        self.app, self.client = self._runner.run(self._context.__aenter__())
        self._begin_ns = 0

    def run(self, check: Callable[[FastAPI, httpx.AsyncClient], Coroutine]):
        self._begin_ns = time.monotonic_ns()
        return self._runner.run(check(self.app, self.client))

    def rows(self, count: int) -> list:
        """The records of the calls of the last `run`, when so many are written."""

        def own() -> list:
            return [row for row in rows(self._folder) if row.arrived_ns >= self._begin_ns]

        self._runner.run(until(lambda: len(own()) >= count))
        return own()

    def close(self) -> None:
        self._runner.run(self._context.__aexit__(None, None, None))
        self._runner.close()
