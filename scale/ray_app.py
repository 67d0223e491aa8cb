"""A Ray Serve application: each replica starts one `sojourn serve`, and passes HTTP on to it byte by byte.

It runs in Ray's environment and imports nothing of Sojourn (docs/fleet.md has the packages). Ray chooses a replica for
a request, says how many there are, and replaces those that end. The server keeps its environment, processes, records
and metrics, as if nothing stood before it.

    serve run scale.ray_app:build command="sojourn serve FOLDER" replicas=2 max_replicas=4

The replica is a plain ASGI application, because a handle between deployments costs a millisecond a token. Where the
server has API keys, SOJOURN_API_KEY is the replica's own, for its questions about load.
"""

import asyncio
import json
import os
import shlex
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from yarl import URL

from sojourn.scale.ray_process import claim_number, end_group, end_with_parent, free_port
from sojourn.scale.ray_routing import READY, ROUTERS
from sojourn.scale.ray_scaling import GoodputPolicy, Load

SERVERS_FILE = "servers.jsonl"  # in `folder`: a line when a server is ready, and when it has ended
POLL_SECONDS = 0.2
END_SECONDS = 4.0  # for a server without requests to write its last records
LAST_WORDS_SECONDS = 0.3  # for the error events of open streams to leave, after their server died
NOT_PASSED_ON = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection"}
OF_THE_PROXY = {b"date", b"server", b"x-request-id"}  # of an answer: Ray's proxy writes its own, with the same id
OPENAI_STREAMS = ("/v1/completions", "/v1/chat/completions")  # whose error events look as `lost` does


class Options(BaseModel):
    """The words behind `serve run scale.ray_app:build`, and the `args` of a Serve configuration."""

    model_config = ConfigDict(extra="forbid")

    command: list[str] | str = Field(description="`sojourn serve MODEL` and its options, without --port and --run-dir")
    replicas: int = Field(1, ge=1)
    max_replicas: int | None = Field(None, ge=1, description="above `replicas`: Ray scales between the two")
    routing: Literal["consistent_hash", "least_requests", "round_robin"] = "consistent_hash"
    folder: str | None = Field(None, description="on the node: logs, and the records of each server")
    records: bool = Field(True, description="servers record into `folder`")
    gpus: int = Field(0, ge=0, description="of a server: as many as it has ranks, all on one node")
    cpus: float = Field(1, ge=0, description="that Ray reserves for a server")
    scale_waiting: float = Field(4, gt=0, description="waiting requests, mean of a server: above it one is added")
    scale_missed: float = Field(0.05, gt=0, le=1, description="share of requests that miss an objective: likewise")
    scale_busy: float = Field(0.6, gt=0, le=1, description="one server less may have this share of its places taken")
    look_back_seconds: float = Field(30, gt=0, description="over which Ray takes means")
    upscale_seconds: float = Field(30, ge=0, description="for which a reason must last")
    downscale_seconds: float = Field(600, ge=0)
    start_seconds: float = Field(600, gt=0, description="in which a server must be ready")
    unhealthy_seconds: float = Field(180, gt=0, description="after which a server without a healthy core is replaced")
    drain_seconds: float = Field(120, ge=0, description="for the open requests of a server that is to end")
    loopback_only: bool = Field(False, description="the replica itself listens on the loopback, not on all interfaces")

    @model_validator(mode="after")
    def _bounds_have_an_order(self) -> "Options":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is below replicas={self.replicas}; raise it")
        return self

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command) if isinstance(self.command, str) else self.command


def build(args: Options) -> serve.Application:
    """The application: `import_path: scale.ray_app:build` of a Serve configuration."""
    scaling: dict[str, Any] = {"num_replicas": args.replicas}
    if (args.max_replicas or 0) > args.replicas:
        thresholds = {"waiting": args.scale_waiting, "missed": args.scale_missed, "busy": args.scale_busy}
        scaling = {"autoscaling_config": AutoscalingConfig(
            min_replicas=args.replicas, max_replicas=args.max_replicas, look_back_period_s=args.look_back_seconds,
            upscale_delay_s=args.upscale_seconds, downscale_delay_s=args.downscale_seconds,
            policy=AutoscalingPolicy(policy_function=GoodputPolicy, policy_kwargs=thresholds),
        )}  # fmt: skip
    return Server.options(
        max_ongoing_requests=100_000,  # no bound: the server refuses what it has no room for, with 429 and Retry-After
        # Ranks are processes of one host, so that a server needs no placement group, but all its devices on one node.
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTERS[args.routing], request_routing_stats_period_s=1
        ),
        health_check_period_s=1,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=args.drain_seconds + END_SECONDS,
        max_constructor_retry_count=3,
        **scaling,
    ).bind(args.model_dump())


@serve.deployment(name="sojourn")
@serve.ingress()
class Server:
    """One `sojourn serve` on a free port of the loopback. It ends with this process, whatever ends this one."""

    async def __init__(self, options: dict[str, Any]):
        self.options = Options(**options)
        if self.options.loopback_only:
            listen_on_loopback()
        self.folder = None if self.options.folder is None else Path(self.options.folder)
        self.number = None if self.folder is None else claim_number(self.folder)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, connect=5), connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False, read_bufsize=1 << 20,
        )  # fmt: skip
        self.unhealthy_since: float | None = None
        self.load = Load()
        self.is_ending = False
        self.process = self._start()
        try:
            self.places = await self._places()
        except BaseException:
            await self._end()
            raise
        self._say("ready")
        self.watching = asyncio.create_task(self._watch())

    def _start(self) -> subprocess.Popen:
        command = [*self.options.words, "--host", "127.0.0.1", "--port", str(self.port)]
        output = None  # Ray's log of this process
        if self.folder is not None:
            output = (self.folder / f"server-{self.number}.log").open("ab")
            if self.options.records:
                command += ["--run-dir", str(self.folder / f"server-{self.number}")]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                                preexec_fn=end_with_parent())  # fmt: skip

    async def _places(self) -> int:
        """Of its batch, once the server is ready."""
        deadline = time.monotonic() + self.options.start_seconds
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"the server ended with exit code {code} before it was ready")
            status, facts = await self._ask("/server_info")  # 503 until the model is loaded
            if status == 200:
                return json.loads(facts)["max_running_requests"]
            if status in (401, 403):
                raise RuntimeError("the server has API keys; SOJOURN_API_KEY has to be one that may read /metrics")
            await asyncio.sleep(POLL_SECONDS)
        raise RuntimeError(f"the server was not ready within {self.options.start_seconds:g} s")

    async def _ask(self, path: str) -> tuple[int, str]:
        """Status and body; 0 where nobody answers."""
        key = os.environ.get("SOJOURN_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=5)
            async with self.session.get(self.url + path, timeout=timeout, headers=headers) as answer:
                return answer.status, await answer.text()
        return 0, ""

    async def _is_ok(self, path: str) -> bool:
        return (await self._ask(path))[0] == 200

    async def _watch(self) -> None:
        """A replica without its server ends, so that Ray sends it nothing and replaces both."""
        while self.process.poll() is None:
            await asyncio.sleep(POLL_SECONDS)
        if not self.is_ending:
            end_group(self.process)
            self._say("ended")
            await asyncio.sleep(LAST_WORDS_SECONDS)
            os._exit(1)

    def _say(self, state: str) -> None:
        if self.folder is not None:
            fields = {"number": self.number, "state": state, "port": self.port, "pid": self.process.pid,
                      "exit_code": self.process.poll()}  # fmt: skip
            with (self.folder / SERVERS_FILE).open("a") as file:  # one short write: whole also beside another replica's
                file.write(json.dumps(fields) + "\n")

    async def check_health(self) -> None:
        """Raises where the replica is to be replaced. A server replaces a dead core itself, and loads it again."""
        if await self._is_ok("/health"):
            self.unhealthy_since = None
            return
        self.unhealthy_since = self.unhealthy_since or time.monotonic()
        if time.monotonic() - self.unhealthy_since > self.options.unhealthy_seconds:
            raise RuntimeError(f"the server has had no healthy core for {self.options.unhealthy_seconds:g} s")

    async def record_routing_stats(self) -> dict[str, int]:
        return {READY: int(await self._is_ok("/ready"))}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `GoodputPolicy`."""
        status, page = await self._ask("/metrics")
        return self.load.look(self.places, page if status == 200 else "")

    def __serve_build_asgi_app__(self):
        async def application(scope, receive, send):  # no bound method, which uvicorn takes for ASGI 2
            await (lifespan if scope["type"] == "lifespan" else self.pass_on)(scope, receive, send)

        return application

    async def pass_on(self, scope, receive, send) -> None:
        """A request to the server, and the pieces of its answer as they come."""
        query = scope["query_string"].decode("latin-1")
        target = URL(f"{self.url}{scope['raw_path'].decode('latin-1')}{'?' if query else ''}{query}", encoded=True)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
                   if name.lower() not in NOT_PASSED_ON]  # fmt: skip
        has_begun = is_stream = False
        try:
            async with self.session.request(
                scope["method"], target, data=await body_of(receive), headers=headers,
                allow_redirects=False, skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            ) as answer:  # fmt: skip
                is_stream = answer.content_type == "text/event-stream" and scope["path"] in OPENAI_STREAMS
                kept = [(name, value) for name, value in answer.raw_headers
                        if name.lower() not in NOT_PASSED_ON | OF_THE_PROXY]  # fmt: skip
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                has_begun = True
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError) as error:
            if not has_begun:
                kept = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
                await send({"type": "http.response.start", "status": 503, "headers": kept})
                await send({"type": "http.response.body", "body": lost(error)})
            elif is_stream:  # too late for a status: the error is the last event
                await send({"type": "http.response.body", "body": b"data: " + lost(error) + b"\n\n"})
            else:
                raise

    async def __del__(self) -> None:
        """The open requests have ended, or their time is over. The server writes its last records."""
        await self._end()

    async def _end(self) -> None:
        self.is_ending = True
        with suppress(ProcessLookupError):
            self.process.terminate()
        deadline = time.monotonic() + END_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        end_group(self.process)
        self._say("ended")
        await self.session.close()


def listen_on_loopback() -> None:
    """Ray 2.60 has no setting for the address of a replica's own gRPC port: it is opened after the constructor."""
    from ray.serve._private import replica

    opened = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: opened(server, address.replace("[::]", "127.0.0.1"))


async def lifespan(scope, receive, send) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def body_of(receive) -> bytes | AsyncIterator[bytes] | None:
    """The body of a request: whole, or in pieces as they come; None where there is none."""
    first = await receive()
    if not first.get("more_body"):
        return first.get("body") or None

    async def pieces() -> AsyncIterator[bytes]:
        message = first
        while message["type"] == "http.request":
            yield message.get("body", b"")
            if not message.get("more_body"):
                return
            message = await receive()

    return pieces()


def lost(error: Exception) -> bytes:
    """In the form of OpenAI's API: what a client reads of a request whose server is gone."""
    message = f"the server of this request is gone ({type(error).__name__}); send the request again"
    fields = {"message": message, "type": "service_unavailable_error", "param": None, "code": "server_lost"}
    return json.dumps({"error": fields}).encode()
