"""The front's side of the core: starts and restarts the process, sends it requests, hands out its messages."""

import asyncio
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from engine import messages
from engine.config import EngineConfig
from engine.process import keep_cupti, let_threads_sleep
from engine.server.core.sequence import SequenceStream
from engine.server.errors import Rejection
from metrics.compute.kernels import Burst

RESTARTS = 5  # ... within RESTART_WINDOW_SECONDS: then the core is given up
RESTART_WINDOW_SECONDS = 60
FAREWELL_SECONDS = 1  # for the core to report aborted requests
REMEMBERED_ADMISSIONS = 64
LONGEST_RETRY_SECONDS = 60


class QueueSpeed:
    """How fast the queue empties. Admissions without a queue say nothing about that, and are not counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._times: deque[float] = deque(maxlen=REMEMBERED_ADMISSIONS + 1)  # the first one is the begin of the count

    def observe(self, num_admitted: int, *, queue_stands: bool) -> None:
        """After each step: the number of admissions, and whether others still wait."""
        now = self._clock()
        if not queue_stands:
            self._times.clear()
        elif not self._times:
            self._times.append(now)
        else:
            self._times.extend([now] * num_admitted)

    def seconds_to_clear(self, num_waiting: int) -> int:
        """At the speed of the last admissions, or of one until now; between 1 and 60."""
        if not self._times:
            return 1
        elapsed = self._clock() - self._times[0]
        return max(1, min(LONGEST_RETRY_SECONDS, math.ceil(num_waiting * elapsed / max(1, len(self._times) - 1))))


class CoreObserver(Protocol):
    """The front's telemetry, as the core client sees it."""

    def ready(self, message: messages.Ready) -> None: ...
    def tokens(self, message: messages.Tokens) -> None: ...
    def observed(self, message: messages.Observed) -> None: ...
    def core_died(self, restarts: bool) -> None: ...


class CoreClient:
    """Owns the core process and its sockets."""

    def __init__(self, config: EngineConfig, telemetry: CoreObserver):
        self.config = config
        self.ready: messages.Ready | None = None
        self.state = "loading"  # loading, ready, restarting, draining, failed
        self.failure: str | None = None
        self.streams: dict[str, SequenceStream] = {}  # that the core has not reported as ended
        self.next_step = 0
        self.queue_speed = QueueSpeed()
        self.process: asyncio.subprocess.Process | None = None
        self._telemetry = telemetry
        self._sockets = Path(tempfile.mkdtemp(prefix="sojourn-"))
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task] = []
        self._context = zmq.asyncio.Context()
        self._to_core: zmq.asyncio.Socket | None = None
        self._core_has_queue = False  # the core reported a queue of its own after its last step
        self._burst: asyncio.Future[Burst | None] | None = None  # of a burst under way

    @property
    def num_waiting(self) -> int:
        """Sequences without a place in the batch, with those on their way to the core."""
        return sum(not stream.is_admitted for stream in self.streams.values())

    @property
    def free_places(self) -> int:
        """Places in the batch for sequences on their way: none while the core itself has a queue."""
        if self._core_has_queue:
            return 0
        running = sum(stream.is_admitted and not stream.has_last_token for stream in self.streams.values())
        return self.config.max_num_seqs - running

    def admit(self, num_sequences: int) -> None:
        """Raises Rejection unless the core is up and its queue has room: 503 while it is not, 429 when it is full."""
        if self.state != "ready":
            raise Rejection(503, f"the engine is {self.state}", code=f"engine_{self.state}", retry_after_seconds=2)
        waiting, limit = self.num_waiting, self.config.max_waiting
        if waiting + num_sequences > limit + self.free_places:
            wait = "wait already"
            if num_sequences > 1:
                wait = f"may wait, {waiting} do, and this call has {num_sequences}"
            raise Rejection(
                429,
                f"max_waiting, {limit} requests, {wait}; try again after the given time",
                code="queue_full",
                retry_after_seconds=self.queue_speed.seconds_to_clear(waiting),
            )

    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    async def drain(self, timeout_seconds: float) -> None:
        """Takes no more requests, waits for the open ones, and fails those that take too long."""
        self._set_state("draining")
        deadline = time.monotonic() + timeout_seconds
        while self.streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for stream in self.streams.values():
            self.abort(stream)  # so that the core, which is alive, reports their ledgers
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self.streams and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.fail_open_streams()

    async def start(self) -> None:
        """Starts the process; does not wait for the model."""
        supervisor = asyncio.create_task(self._supervise(), name="core supervisor")
        supervisor.add_done_callback(self._supervisor_ended)
        self._tasks = [supervisor]

    async def stop(self) -> None:
        """Ends the process: asks it first, then kills it."""
        if self.state != "failed":
            self._set_state("draining")  # so that the supervisor starts no other
        if self.process is not None and self.process.returncode is None:
            self._send(messages.encode(messages.Stop()))  # a core that still loads does not read it
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

    def submit(self, stream: SequenceStream) -> None:
        """Hands a sequence to the core, whose messages then reach it."""
        encoded = messages.encode(stream.request)  # first: a request that cannot be encoded must leave no trace
        self.streams[stream.request.request_id] = stream
        self._send(encoded)

    @property
    def is_profiling(self) -> bool:
        return self._burst is not None

    async def profile(self, request: messages.Profile) -> Burst | None:
        """A profile of the core's next steps; None if the core died. One burst at a time."""
        self._burst = asyncio.get_running_loop().create_future()
        try:
            self._send(messages.encode(request))
            return await self._burst
        finally:
            self._burst = None

    def abort(self, stream: SequenceStream) -> None:
        """Makes the core drop a sequence, unless it has ended; `done` is set then."""
        if not stream.has_last_token and not stream.done.is_set():
            self._send(messages.encode(messages.Abort(stream.request.request_id)))

    def _send(self, encoded: bytes) -> None:
        # A PUSH socket without a high-water mark never blocks; the future is done at once.
        if not self._to_core.closed:  # else the core is dead, and its streams fail in a moment
            self._to_core.send(encoded)

    async def _supervise(self) -> None:
        deaths: deque[float] = deque(maxlen=RESTARTS)
        while True:
            await self._run_once()
            self.fail_open_streams()
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
        """A fault of ours, or of the machine (no process can be started): no other core will be started."""
        if supervisor.cancelled() or (error := supervisor.exception()) is None:
            return
        traceback.print_exception(error)
        self.failure = f"the engine core cannot be kept running ({type(error).__name__}: {error}); see the server's log"
        self.fail_open_streams()
        self._set_state("failed")

    async def _run_once(self) -> None:
        """One life of the core process, from its start to its death."""
        generation = tempfile.mkdtemp(dir=self._sockets)  # new sockets: no message of the last life reaches this one
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
            if listening.done():  # it never returns but by a fault of ours, and then the core is of no use
                traceback.print_exception(listening.exception())
                self.process.kill()
            await ended
            await asyncio.sleep(0.05)  # its last messages are still in the socket
            listening.cancel()
        finally:
            to_core.close(linger=0)
            from_core.close(linger=0)

    async def _start_core(self, sockets: str) -> asyncio.subprocess.Process:
        environment = dict(os.environ)
        let_threads_sleep(environment)
        keep_cupti(environment)
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
            if (stream := self.streams.get(request_id)) is not None:
                stream.admit(cached_tokens)
        for output in message.outputs:
            if (stream := self.streams.get(output.request_id)) is not None:
                stream.add(output, message.clock_ns, message.committed_ns)
        self._core_has_queue = message.waiting > 0
        self.queue_speed.observe(len(message.admitted), queue_stands=self._core_has_queue)
        self._telemetry.tokens(message)

    def _take_observed(self, message: messages.Observed) -> None:
        for ended in message.ended:
            if (stream := self.streams.pop(ended.request_id, None)) is not None:
                stream.end(ended)
        self._telemetry.observed(message)

    def fail_open_streams(self) -> None:
        """Ends every open stream as lost: `take` raises, unless the last token is there."""
        now_ns = time.monotonic_ns()
        for stream in self.streams.values():
            stream.end_as_lost(now_ns)
        self.streams.clear()
        self._core_has_queue = False
        self._end_burst(None)
        self.queue_speed = QueueSpeed()

    def _end_burst(self, burst: Burst | None) -> None:
        if self._burst is not None and not self._burst.done():
            self._burst.set_result(burst)

    def _set_state(self, state: str) -> None:
        if self.state != "draining":  # which is final
            self.state = state
        self._changed.set()
