"""The front's side of the core: starts the process, sends it requests, hands out what it answers, restarts it."""

import asyncio
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from engine import messages
from engine.config import EngineConfig
from engine.process import let_threads_sleep
from engine.sampling import TokenLogprobs
from engine.server.core.queue_speed import QueueSpeed
from metrics.compute.kernels import Burst
from metrics.ledger import Account, ledger_at, new_ledger

RESTARTS = 5  # ... within RESTART_WINDOW_SECONDS: then the core is given up
RESTART_WINDOW_SECONDS = 60
FAREWELL_SECONDS = 1  # for the core to tell of requests that it was asked to forget


class Token(msgspec.Struct, frozen=True):
    """One token as it reached the front. Its ledger is booked up to `booked_ns`, when it was committed."""

    id: int
    ledger: messages.LedgerBase | None  # None: telemetry is off
    clock_ns: tuple[int, ...]  # the decode clock then
    booked_ns: int
    logprobs: TokenLogprobs | None = None

    def ledger_now(self) -> list[int]:
        """A ledger of its own for whoever asks."""
        return new_ledger() if self.ledger is None else ledger_at(self.ledger.base, self.clock_ns)

    @property
    def waits(self) -> dict[str, int]:
        return {} if self.ledger is None else self.ledger.waits


@dataclass(slots=True, eq=False)
class Work:
    """One sequence that the core works on: its tokens as they come, and its end. Those of one call share `news`."""

    request_id: str
    news: asyncio.Event
    prompt_tokens: int
    encoded_ns: int
    tokens: deque[Token] = field(default_factory=deque)
    token_ns: list[int] = field(default_factory=list)
    told: Token | None = None  # the last of all its tokens
    finish_reason: str | None = None  # of the last token: stop or length
    ended: messages.Ended | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    admitted: bool = False
    cached_tokens: int = 0  # of the prompt, known once it is admitted
    over: asyncio.Event = field(default_factory=asyncio.Event)  # `ended` says how: the core knows it no more

    def add(self, output: messages.Output, clock_ns: tuple[int, ...], committed_ns: int) -> None:
        known = self.told.ledger if self.told is not None else None
        self.told = Token(output.token_id, output.ledger or known, clock_ns, committed_ns, output.logprobs)
        self.tokens.append(self.told)
        self.token_ns.append(committed_ns)
        self.finish_reason = output.finish_reason
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.news.set()

    def end(self, ended: messages.Ended) -> None:
        self.ended = ended
        self.news.set()
        self.over.set()

    def lost(self, now_ns: int) -> messages.Ended:
        """Its end where the core tells of none: what the core told last, and since then `request.lost`."""
        ledger, waits, since_ns, computed_tokens = new_ledger(), {}, self.encoded_ns, 0
        if self.told is not None:
            ledger, waits, since_ns = self.told.ledger_now(), self.told.waits, self.told.booked_ns
            computed_tokens = self.prompt_tokens - self.cached_tokens + len(self.token_ns) - 1
        ledger[Account.REQUEST_LOST] = now_ns - since_ns
        return messages.Ended(
            request_id=self.request_id,
            reason="lost",
            booked_ns=now_ns,
            ledger=ledger,
            waits=waits,
            cached_tokens=self.cached_tokens,
            computed_tokens=computed_tokens,
        )


class CoreObserver(Protocol):
    """What the front's telemetry learns of the core."""

    def ready(self, message: messages.Ready) -> None: ...
    def tokens(self, message: messages.Tokens) -> None: ...
    def observed(self, message: messages.Observed) -> None: ...
    def core_died(self, restarts: bool) -> None: ...


class CoreClient:
    """Owns the core process and its sockets."""

    def __init__(
        self,
        config: EngineConfig,
        telemetry: CoreObserver,
    ):
        self.config = config
        self.ready: messages.Ready | None = None
        self.state = "loading"  # loading, ready, restarting, draining, failed
        self.failure: str | None = None
        self.works: dict[str, Work] = {}
        self.next_step = 0
        self.queue_speed = QueueSpeed()
        self.process: asyncio.subprocess.Process | None = None
        self._telemetry = telemetry
        self._sockets = Path(tempfile.mkdtemp(prefix="sojourn-"))
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task] = []
        self._context = zmq.asyncio.Context()
        self._to_core: zmq.asyncio.Socket | None = None
        self._core_waits = False  # the core reported a queue of its own after its last step
        self._burst: asyncio.Future[Burst | None] | None = None  # being waited for

    @property
    def num_waiting(self) -> int:
        """Sequences without a place in the batch, those on their way to the core included."""
        return sum(1 for work in self.works.values() if not work.admitted)

    @property
    def free_places(self) -> int:
        """Places in the batch that sequences on their way may still find: none while the core itself has a queue."""
        running = sum(1 for work in self.works.values() if work.admitted and work.finish_reason is None)
        return 0 if self._core_waits else self.config.max_num_seqs - running

    def pid(self) -> int | None:
        """The core's process of now."""
        return self.process.pid if self.process is not None else None

    async def drain(self, timeout_seconds: float) -> None:
        """Takes no more requests, waits for the open ones, and ends with an error those that take too long."""
        self._set_state("draining")
        deadline = time.monotonic() + timeout_seconds
        while self.works and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for work in self.works.values():
            self.abort(work)  # so that the core, which lives, tells where their time went
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self.works and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.fail_open_works()

    async def start(self) -> None:
        """Starts the process; does not wait for the model."""
        supervisor = asyncio.create_task(self._supervise(), name="core supervisor")
        supervisor.add_done_callback(self._supervisor_ended)
        self._tasks = [supervisor]

    async def stop(self) -> None:
        """Ends the process, politely first, whatever it is at."""
        if self.state != "failed":
            self._set_state("draining")  # so that nobody starts another
        if self.process is not None and self.process.returncode is None:
            self._send(messages.encode(messages.Stop()))  # not awaited: a core that still loads has no ear yet
            try:
                await asyncio.wait_for(self.process.wait(), timeout=3)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)
        shutil.rmtree(self._sockets, ignore_errors=True)

    async def wait_for_change(self) -> None:
        """Returns at the next change of `state`."""
        self._changed.clear()
        await self._changed.wait()

    def submit(self, message: messages.Submit, news: asyncio.Event) -> Work:
        """Hands a sequence to the core; `news` is set whenever something comes of it."""
        encoded = messages.encode(message)  # before it is registered: what cannot be sent must leave no trace
        work = self.works[message.request_id] = Work(
            message.request_id, news, len(message.prompt_token_ids), message.encoded_ns
        )
        self._send(encoded)
        return work

    @property
    def is_profiling(self) -> bool:
        return self._burst is not None

    async def profile(self, wish: messages.Profile) -> Burst | None:
        """What the next steps of the core did; None if it died over that. One burst at a time."""
        self._burst = asyncio.get_running_loop().create_future()
        try:
            self._send(messages.encode(wish))
            return await self._burst
        finally:
            self._burst = None

    def abort(self, work: Work) -> None:
        """Makes the core forget a request; `over` is set when it has."""
        if work.finish_reason is None and not work.over.is_set():
            self._send(messages.encode(messages.Abort(work.request_id)))

    def _send(self, encoded: bytes) -> None:
        # A PUSH socket without a high-water mark never blocks; the future is done at once.
        if not self._to_core.closed:  # else the core is dead, and its works are failed in a moment
            self._to_core.send(encoded)

    async def _supervise(self) -> None:
        deaths: deque[float] = deque(maxlen=RESTARTS)
        while True:
            await self._run_once()
            self.fail_open_works()
            if self.state == "draining":
                return
            first_start = self.ready is None
            deaths.append(time.monotonic())
            often = len(deaths) == RESTARTS and deaths[-1] - deaths[0] < RESTART_WINDOW_SECONDS
            if first_start or often:
                died = "while it loaded" if first_start else f"{RESTARTS} times within {RESTART_WINDOW_SECONDS} s"
                self.failure = self.failure or f"the core process died {died}; see the server's log"
                self._telemetry.core_died(False)
                self._set_state("failed")
                return
            print("sojourn: the engine core died; restarting it", file=sys.stderr, flush=True)
            self._telemetry.core_died(True)
            self._set_state("restarting")

    def _supervisor_ended(self, supervisor: asyncio.Task) -> None:
        """A fault of ours, or of the machine (no process can be started): nobody would start another core."""
        if supervisor.cancelled() or (error := supervisor.exception()) is None:
            return
        traceback.print_exception(error)
        self.failure = f"the engine core cannot be kept running ({type(error).__name__}: {error}); see the server's log"
        self.fail_open_works()
        self._set_state("failed")

    async def _run_once(self) -> None:
        """One life of the core process, from its start to its death."""
        generation = tempfile.mkdtemp(dir=self._sockets)  # fresh sockets: nothing of the last life can reach this one
        to_core, from_core = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, name in ((to_core, "to-core"), (from_core, "from-core")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{generation}/{name}")
        self._to_core = to_core
        self.process = await self._start_core(generation)
        try:
            listening = asyncio.create_task(self._listen(from_core))
            ended = asyncio.create_task(self.process.wait())
            await asyncio.wait((listening, ended), return_when=asyncio.FIRST_COMPLETED)
            if listening.done():  # it never returns: a fault of ours, and a core that nobody hears is of no use
                traceback.print_exception(listening.exception())
                self.process.kill()
            await ended
            await asyncio.sleep(0.05)  # what it sent last is still in the socket
            listening.cancel()
        finally:
            to_core.close(linger=0)
            from_core.close(linger=0)

    async def _start_core(self, sockets: str) -> asyncio.subprocess.Process:
        """A core that speaks over the sockets in that folder."""
        environment = dict(os.environ)
        let_threads_sleep(environment)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine.core", sockets, str(self.next_step), str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, env=environment,
        )  # fmt: skip
        process.stdin.write(self.config.model_dump_json().encode())
        process.stdin.close()
        return process

    async def _listen(self, from_core: zmq.asyncio.Socket) -> None:
        while True:
            message = messages.decode_from_core(await from_core.recv())
            if isinstance(message, messages.Tokens):
                self._take(message)
                await asyncio.sleep(0)  # streams write their tokens before anything is observed
            elif isinstance(message, messages.Observed):
                self._take_observed(message)
            elif isinstance(message, messages.Profiled):
                self._end_burst(message.burst)
            elif isinstance(message, messages.Ready):
                self.ready, self.failure = message, None
                self._telemetry.ready(message)
                self._set_state("ready")
            else:
                self.failure = message.message

    def _take(self, message: messages.Tokens) -> None:
        self.next_step = message.next_step
        for request_id, cached_tokens in message.admitted:
            if (work := self.works.get(request_id)) is not None:
                work.admitted = True
                work.cached_tokens = cached_tokens
        for output in message.outputs:
            if (work := self.works.get(output.request_id)) is not None:
                work.add(output, message.clock_ns, message.committed_ns)
        self._core_waits = message.waiting > 0
        self.queue_speed.observe(len(message.admitted), queue_stands=self._core_waits)
        self._telemetry.tokens(message)

    def _take_observed(self, message: messages.Observed) -> None:
        for ended in message.ended:
            if (work := self.works.pop(ended.request_id, None)) is not None:
                work.end(ended)
        self._telemetry.observed(message)

    def fail_open_works(self) -> None:
        """Ends every open request as lost: whoever follows it raises, unless its last token is there."""
        now_ns = time.monotonic_ns()
        for work in self.works.values():
            work.end(work.lost(now_ns))
        self.works.clear()
        self._core_waits = False
        self._end_burst(None)
        self.queue_speed.reset()

    def _end_burst(self, burst: Burst | None) -> None:
        if self._burst is not None and not self._burst.done():
            self._burst.set_result(burst)

    def _set_state(self, state: str) -> None:
        if self.state != "draining":  # which is for good, whatever the core does meanwhile
            self.state = state
        self._changed.set()
