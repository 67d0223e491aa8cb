"""Runs the server until SIGTERM or SIGINT."""

import asyncio
import os
import signal
import socket
import threading
from contextlib import suppress

import uvicorn

from sojourn.engine.config import EngineConfig
from sojourn.engine.process import freeze_startup_objects, share_interpreter
from sojourn.engine.server.app import build_app
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.fleet.kv_event_publisher import warn_of_exposure
from sojourn.engine.server.front import Front
from sojourn.engine.server.http.listener import exposure, listen, raise_descriptor_limit, url_of, uvicorn_settings
from sojourn.engine.server.models.registry import Models
from sojourn.metrics.errors import RunDataError, ServerError, SojournError

# After the second signal: for the error events to reach their clients, and for all to end, the run directory included.
FAREWELL_SECONDS = 0.5
LAST_SECONDS = 1.8


def serve(config: EngineConfig) -> None:
    """Listens, loads and serves. Raises ServerError if the port is taken or the model cannot be loaded, and, once all
    is over, RunDataError if records or usage were lost, or SystemExit if a second signal ended it."""
    listener = listen(config)
    try:
        app = build_app(config)
        if config.faults is not None:
            from sojourn.engine.faults.front import plant_in_front
            from sojourn.engine.faults.plan import planned

            plant_in_front(app, planned(config.faults))
            print(f"WARNING: this server is slow or wrong on purpose; faults={config.faults}", flush=True)
    except SojournError:
        listener.close()
        raise
    front: Front = app.state.front
    settings = uvicorn_settings(app, front.connections)
    raise_descriptor_limit(front.connections)
    share_interpreter()
    for warning in (exposure(config), None if front.kv_events is None else warn_of_exposure(front.kv_events)):
        if warning is not None:
            print(warning, flush=True)
    url = url_of(config, listener)
    with asyncio.Runner(loop_factory=front.first.telemetry.new_event_loop) as runner:
        server = _Server(settings, front.models)
        runner.run(_run(server, front, listener, url))
    core = front.first.core
    if core.state == "failed" and front.models.is_single:
        raise ServerError(core.failure)
    if (lost := front.failure) is not None:
        raise RunDataError(lost)
    if server.exit_code:
        raise SystemExit(server.exit_code)


class _Server(uvicorn.Server):
    """uvicorn, but a signal first drains: no new requests, `/ready` says 503, open streams finish or get an error."""

    def __init__(self, settings: uvicorn.Config, models: Models):
        super().__init__(settings)
        self._models = models
        self._draining: asyncio.Task | None = None
        self.exit_code = 0  # 128 + the second signal's number

    def handle_exit(self, sig: int, frame: object) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        elif not self.exit_code:  # a third one changes nothing
            self.exit_code = 128 + sig
            guard = threading.Timer(LAST_SECONDS, _end_unfinished, (self.exit_code,))
            guard.daemon = True
            guard.start()
            # Not in the handler: it stands between any two lines of the loop's code.
            asyncio.get_running_loop().call_soon_threadsafe(self._give_up)

    async def _drain(self) -> None:
        seconds = self._models.first.config.drain_seconds
        if self._models.has_streams:
            with suppress(OSError):  # a log that cannot be written must not keep the server from its end
                print(f"Sojourn ends after its open calls, in {seconds:g} s at most; a second signal ends it at once",
                      flush=True)  # fmt: skip
        await self._models.drain(seconds)
        self.should_exit = True

    def _give_up(self) -> None:
        """Every open stream gets its error event, and who does not read it in time is cut off."""
        self._models.give_up()
        self.should_exit = True
        asyncio.get_running_loop().call_later(FAREWELL_SECONDS, self._cut_connections)

    def _cut_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _end_unfinished(exit_code: int) -> None:
    os.write(2, b"sojourn: ended by a second signal before the run directory was complete; its segments can be read\n")
    os._exit(exit_code)


async def _run(server: _Server, front: Front, listener: socket.socket, url: str) -> None:
    """Serves until SIGTERM or SIGINT, or until the core is given up."""
    print(f"Sojourn listens on {url} and loads {front.config.model}", flush=True)
    if (defaults := front.first.defaults.sentence()) is not None:
        print(defaults, flush=True)
    watching = asyncio.create_task(_watch(server, front.first.core, url, ends_with_it=front.models.is_single))
    if front.access.has_files:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, front.access.reload_soon)
    await server.serve(sockets=[listener])
    watching.cancel()


async def _watch(server: _Server, core: CoreClient, url: str, *, ends_with_it: bool) -> None:
    facts = None  # of the core that was told
    while core.state != "failed" or not ends_with_it:
        await core.wait_for_change()
        if core.state == "ready" and facts is not core.ready:
            freeze_startup_objects()
            facts = core.ready
            stored = "" if facts.weights == facts.dtype else f" with {facts.weights} weights"
            stored += "" if facts.checkpoint_format is None else f" of a checkpoint in {facts.checkpoint_format}"
            served = (
                f"{facts.model_name} ({facts.num_parameters:,} parameters, {facts.dtype}{stored} on {facts.device})"
            )
            pool = f"{facts.num_kv_blocks:,} KV blocks of {facts.block_size} tokens"
            print(f"Sojourn is ready: {served}, {pool}, at {url}/v1\n{facts.memory.sentence()}", flush=True)
            if facts.startup is not None:
                print(facts.startup.sentence(), flush=True)
            if facts.weight_error is not None:
                print(f"error of the weights: {facts.weight_error.sentence()}", flush=True)
            if facts.changes_outputs:
                print(
                    f"warning: outputs differ from the model's own, by {', '.join(facts.changes_outputs)}", flush=True
                )
    server.should_exit = True
