"""The front's side of the core: starts and restarts the process, sends it requests, hands out its messages."""

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq.asyncio

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.server.core.core_observer import BlockEvents, CoreObserver
from sojourn.engine.server.core.core_process import CoreProcess, tell
from sojourn.engine.server.core.heartbeat import TICK_SECONDS, Heartbeat
from sojourn.engine.server.core.questions import BURST, SLEEP, Questions
from sojourn.engine.server.core.queue_speed import QueueSpeed
from sojourn.engine.server.core.sequence import SequenceStream
from sojourn.engine.server.core.sleep import Sleep
from sojourn.engine.server.core.sockets_folder import SocketsFolder
from sojourn.engine.server.core.spare import Spare
from sojourn.engine.server.errors import Rejection, engine_not_ready

DEATH_WINDOW_SECONDS = 60  # max_core_deaths within it: then the core is given up
FAREWELL_SECONDS = 1  # for the core to report aborted requests
STOP_SECONDS = 3  # for the core to end when it is asked to
ENDING = ("draining", "cold")  # states in which no core is started


class CoreClient:
    """Owns the core process and its sockets."""

    def __init__(self, config: EngineConfig, telemetry: CoreObserver, spare: Spare):
        """`spare` is for all clients of a front, which ends it."""
        self.config = config
        self.kv_events: BlockEvents | None = None  # set by the front that publishes them
        self.ready: messages.Ready | None = None
        self.state = "loading"  # ready, hung, restarting, falling_asleep, sleeping, waking, cold, draining, failed
        self.failure: str | None = None
        self.streams: dict[str, SequenceStream] = {}  # that the core has not reported as ended
        self.next_step = 0
        self.queue_speed = QueueSpeed()
        self._telemetry = telemetry
        self._process: CoreProcess | None = None
        self._heartbeat: Heartbeat | None = None  # of the core that is up; None while it loads
        self._spare = spare
        self._sockets: SocketsFolder | None = None
        self._changed = asyncio.Event()
        self._supervisor: asyncio.Task | None = None
        self._context = zmq.asyncio.Context()
        self._core_has_queue = False  # the core reported a queue of its own after its last step
        self.questions = Questions(self._send)
        self.sleep = Sleep(self.questions, self._set_state)

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
            raise engine_not_ready(self.state)
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

    def require_ready(self) -> messages.Ready:
        """What the core said of its model. Raises Rejection 503 until the model is loaded."""
        if self.ready is None:
            raise engine_not_ready("loading")
        return self.ready

    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

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
        """Starts the process, also after `unload` and a failure; does not wait for the model."""
        self._sockets = self._sockets or SocketsFolder()
        self.ready = self.failure = None
        self._set_state("loading")
        self._supervisor = asyncio.create_task(self._supervise(), name="core supervisor")
        self._supervisor.add_done_callback(self._supervisor_ended)

    def give_up(self) -> None:
        """Ends a drain at once: no stream waits any longer, and the core is killed."""
        self._set_state("draining")
        self._kill()
        self.fail_open_streams()

    async def stop(self) -> None:
        """Ends the process: asks it first, then kills it. No stream and no process is left."""
        if self.state != "failed":
            self._set_state("draining")  # so that the supervisor starts no other
        await self._end_process()
        self.fail_open_streams()
        self._context.destroy(linger=0)
        if self._sockets is not None:
            self._sockets.remove()

    async def unload(self) -> None:
        """Ends the process of a model that no request uses; `start` loads it again."""
        self._set_state("cold")
        await self._end_process()
        self.ready = None

    async def _end_process(self) -> None:
        if self._heartbeat is None or self._heartbeat.is_silent:
            self._kill()  # it loads, or hangs, and reads no message
        elif self._process.is_alive:
            self._process.send(messages.encode(messages.Stop()))
        if self._supervisor is not None:
            await asyncio.wait((self._supervisor,), timeout=STOP_SECONDS)
            self._kill()
            await asyncio.wait((self._supervisor,), timeout=STOP_SECONDS)
            self._supervisor.cancel()  # only where it starts a process just now
            await asyncio.gather(self._supervisor, return_exceptions=True)

    async def wait_for_change(self) -> None:
        """Returns at the next change of `state`."""
        self._changed.clear()
        await self._changed.wait()

    def submit(self, stream: SequenceStream) -> None:
        """Hands a sequence to the core, whose messages then reach it."""
        encoded = messages.encode(stream.request)  # first: a request that cannot be encoded must leave no trace
        self.streams[stream.request.request_id] = stream
        self._send(encoded)

    def lose(self, streams: Sequence[SequenceStream]) -> None:
        """Ends streams as lost whose end the core does not report."""
        for stream in streams:
            if not stream.done.is_set():
                self.streams.pop(stream.request.request_id, None)
                stream.end_as_lost(time.monotonic_ns())

    @property
    def longest_silence_seconds(self) -> float:
        """A core that is up and silent for longer is killed."""
        return self.config.core_hung_seconds if self._heartbeat is None else self._heartbeat.hung_after_seconds

    def abort(self, stream: SequenceStream) -> None:
        """Makes the core drop a sequence, unless it has ended; `done` is set then."""
        if not stream.has_last_token and not stream.done.is_set():
            self._send(messages.encode(messages.Abort(stream.request.request_id)))

    def _send(self, encoded: bytes) -> None:
        self._process.send(encoded)

    def _kill(self) -> None:
        if self._process is not None and self._process.is_alive:
            self._process.kill()

    async def _supervise(self) -> None:
        limit = self.config.max_core_deaths
        deaths: deque[float] = deque(maxlen=limit)
        while self.state not in ENDING:
            await self._run_once()
            if self.state in ("falling_asleep", "sleeping"):  # another model may have its memory by now
                tell("a sleeping engine core died; the next call loads its model")
                self.ready = None
                self._set_state("cold")
            self.fail_open_streams()
            if self.kv_events is not None:
                self.kv_events.clear()
            if self.state in ENDING:
                self._telemetry.core_died(False)
                return
            first_start = self.ready is None
            deaths.append(time.monotonic())
            often = len(deaths) == limit and deaths[-1] - deaths[0] < DEATH_WINDOW_SECONDS
            if first_start or often:
                died = "while it loaded" if first_start else f"{limit} times within {DEATH_WINDOW_SECONDS} s"
                self.failure = self.failure or f"the core process died {died}; see the server's log"
                self._telemetry.core_died(False)
                self._set_state("failed")
                return
            tell("the engine core died; restarting it")
            self.failure = None
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
        wanted_ns = time.monotonic_ns()
        core = self._process = self._spare.take() or await CoreProcess.start()
        if self.state in ENDING:  # since then
            self._kill()
        try:
            core.begin(self._context, self._sockets.new_generation(), self.next_step, self.config, wanted_ns)
            listening = asyncio.create_task(self._listen(core))
            watching = asyncio.create_task(self._watch(core))
            ended = asyncio.create_task(core.wait())
            await asyncio.wait((listening, watching, ended), return_when=asyncio.FIRST_COMPLETED)
            for task in (listening, watching):
                if task.done():  # neither returns but by a fault of ours, and then the core is of no use
                    traceback.print_exception(task.exception())
                    core.kill()
            await ended
            await asyncio.sleep(0.05)  # its last messages are still in the socket
            listening.cancel()
            watching.cancel()
        finally:
            self._heartbeat = None
            core.close()

    async def _watch(self, core: CoreProcess) -> None:
        """Tells a core that is hung, and kills it when it stays so."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            elapsed, looked = time.monotonic() - looked, time.monotonic()
            if (heartbeat := self._heartbeat) is None:
                continue
            heartbeat.let_pass(elapsed, is_profiling=self.questions.is_open(BURST))
            self._telemetry.exporter.core.observe_silence(heartbeat.silence_seconds)
            if heartbeat.is_hung and core.is_alive:
                tell(f"the engine core gave no sign of life for {heartbeat.silence_seconds:.0f} s; killing it")
                self._telemetry.exporter.core.observe_hang("killed")
                core.kill()
                return await asyncio.Event().wait()  # until this life is over
            if heartbeat.is_silent and self.state == "ready":
                self.failure = (
                    f"the engine core has given no sign of life for {heartbeat.silence_seconds:.0f} s; "
                    f"after {self.longest_silence_seconds:.0f} s it is killed and replaced"
                )
                tell(self.failure)
                self._telemetry.exporter.core.observe_hang("noticed")
                self._set_state("hung")

    def _hear(self) -> None:
        """A message came."""
        if self._heartbeat is not None:
            self._heartbeat.sign_of_life()
        if self.state == "hung":
            tell("the engine core goes on")
            self.failure = None
            self._set_state("ready")

    async def _listen(self, core: CoreProcess) -> None:
        """Takes in what the core says. Where steps wait here, the front is behind the core: then streams write once for
        all of them, and catch up."""
        while True:
            arrived, unreadable = await core.receive()
            if unreadable:
                tell(f"{unreadable} messages that are not of the engine core were dropped")
                self._telemetry.exporter.core.observe_unreadable("front", unreadable)
            is_behind = sum(isinstance(message, messages.Tokens) for message in arrived) > 1
            for message in arrived:
                self._hear()
                self._take(message)
                if isinstance(message, messages.Tokens) and not is_behind:
                    await asyncio.sleep(0)  # streams write their tokens before anything is observed
            if is_behind:
                await asyncio.sleep(0)

    def _take(self, message: messages.FromCore) -> None:
        if isinstance(message, messages.Tokens):
            self._take_tokens(message)
        elif isinstance(message, messages.Observed):
            self._take_observed(message)
        elif isinstance(message, messages.KVEvents) and self.kv_events is not None:
            self.kv_events.publish(message.batch)
        elif isinstance(message, messages.Profiled):
            self.questions.answer(BURST, message.burst)
        elif isinstance(message, messages.AdapterLoaded):
            self.questions.answer(message.key, message.error)
        elif isinstance(message, messages.Slept | messages.Woken):
            self.questions.answer(SLEEP, message)
        elif isinstance(message, messages.Beat):
            self._telemetry.exporter.core.observe_unreadable("core", message.unreadable)
        elif isinstance(message, messages.Ready):
            self._take_ready(message)
        elif isinstance(message, messages.Failed):
            self.failure = message.message

    def _take_ready(self, message: messages.Ready) -> None:
        if message.startup is not None:
            message = msgspec.structs.replace(message, startup=message.startup.until(time.monotonic_ns()))
        self.ready, self.failure = message, None
        self._heartbeat = Heartbeat(self.config, message)
        self._telemetry.ready(message)
        self._set_state("ready")
        if self.config.spare_core:
            self._spare.prepare()

    def _take_tokens(self, message: messages.Tokens) -> None:
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
        self.questions.lose(self.state)
        self.queue_speed = QueueSpeed()

    def _set_state(self, state: str) -> None:
        if self.state != "draining":  # which is final
            self.state = state
        self._changed.set()
