"""Runs the server until SIGTERM or SIGINT."""

import asyncio
import socket

import uvicorn

from engine.config import EngineConfig
from engine.process import freeze_startup_objects
from engine.server.app import build_app
from engine.server.core.client import CoreClient
from metrics.errors import RunDataError, ServerError, SojournError


def serve(config: EngineConfig) -> None:
    """Listens, loads and serves. Raises ServerError if the port is taken or the model cannot be loaded, and
    RunDataError, once all is over, if records or usage were lost."""
    listener = listen(config.host, config.port)
    try:
        app = build_app(config)
    except SojournError:
        listener.close()
        raise
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    core = app.state.service.core
    url = f"http://{config.host}:{listener.getsockname()[1]}"
    with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
        runner.run(_run(_Server(settings, core), core, listener, url))
    if core.state == "failed":
        raise ServerError(core.failure)
    if (lost := app.state.service.failure) is not None:
        raise RunDataError(lost)


class _Server(uvicorn.Server):
    """uvicorn, but a signal first drains: no new requests, `/ready` says 503, open streams finish or get an error."""

    def __init__(self, settings: uvicorn.Config, core: CoreClient):
        super().__init__(settings)
        self._core = core
        self._draining: asyncio.Task | None = None

    def handle_exit(self, sig: int, frame: object) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True  # the second signal ends it at once

    async def _drain(self) -> None:
        await self._core.drain(self._core.config.drain_seconds)
        self.should_exit = True


async def _run(server: _Server, core: CoreClient, listener: socket.socket, url: str) -> None:
    """Serves until SIGTERM or SIGINT, or until the core is given up."""
    print(f"Sojourn listens on {url} and loads {core.config.model}", flush=True)
    watching = asyncio.create_task(_watch(server, core, url))
    await server.serve(sockets=[listener])
    watching.cancel()


async def _watch(server: _Server, core: CoreClient, url: str) -> None:
    while core.state != "failed":
        await core.wait_for_change()
        if core.state == "ready":
            freeze_startup_objects()
            facts = core.ready
            stored = "" if facts.weights == facts.dtype else f" with {facts.weights} weights"
            served = (
                f"{facts.model_name} ({facts.num_parameters:,} parameters, {facts.dtype}{stored} on {facts.device})"
            )
            pool = f"{facts.num_kv_blocks:,} KV blocks of {facts.block_size} tokens"
            print(f"Sojourn is ready: {served}, {pool}, at {url}/v1\n{facts.memory.sentence()}", flush=True)
    server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ServerError if the port is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from None
    return listener
