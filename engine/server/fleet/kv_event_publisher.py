"""KV events over ZeroMQ, as vLLM's publisher sends them: PUB for whoever subscribes, ROUTER for what was missed.

A message has three frames: topic, sequence number (8 bytes, big-endian), batch. A question for missed ones is the first
number that is wanted, in the same form, behind an empty frame. The answers have the frames of messages behind an empty
one, the last of them number -1 and an empty batch.

The front owns the sockets, so the numbers go on when the core is replaced. The core's batches are sent as they are.
Nothing that a socket receives is unpickled, and no message of more than MAX_QUESTION_BYTES is read.
"""

import asyncio
import contextlib
import os
import stat
import time
from collections import deque
from itertools import islice
from pathlib import Path

import zmq
import zmq.asyncio

from sojourn.engine.config import EngineConfig
from sojourn.engine.kv_event_wire import RANK, AllBlocksCleared, encode_batch
from sojourn.engine.server.http.web_pages import is_loopback
from sojourn.engine.settings.fleet import BUFFER_BATCHES
from sojourn.metrics.errors import ServerError

SENT_AHEAD = 100_000  # batches for a subscriber that does not read; it misses those beyond, and sees the gap
MAX_QUESTION_BYTES = 256
SENT_AT_ONCE = 64  # answers, before the event loop may run other tasks
END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """Owns the two sockets, the sequence numbers, and the last batches."""

    def __init__(self, config: EngineConfig):
        """Binds. Raises ServerError where an address cannot be taken."""
        assert config.kv_events is not None, "a server without kv_events publishes none"
        self._format = config.kv_events_format or "map"
        self._topic = (config.kv_events_topic or "").encode()
        self._next = 0
        size = config.kv_events_buffer or BUFFER_BATCHES
        self._batches: deque[bytes] = deque(maxlen=size if config.kv_events_replay else 1)
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(SENT_AHEAD)
        self._replay: zmq.asyncio.Socket | None = None
        self.replay_endpoint: str | None = None
        try:
            self.endpoint = _bind(self._publisher, config.kv_events, "--kv-events")
            if config.kv_events_replay is not None:
                self._replay = zmq.asyncio.Socket(self._context, zmq.ROUTER)
                self._replay.set_hwm(size + 2)  # one whole answer; a peer that asks on without reading loses the rest
                self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
                self.replay_endpoint = _bind(self._replay, config.kv_events_replay, "--kv-events-replay")
        except ServerError:
            self.close()
            raise

    @property
    def facts(self) -> dict[str, object]:
        """What a consumer has to know, as /server_info shows it."""
        return {
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "topic": self._topic.decode(),
            "format": self._format,
            "data_parallel_rank": RANK,
        }

    def publish(self, batch: bytes) -> None:
        """Sends a batch of the core. Never waits."""
        number = self._next
        self._next += 1
        self._batches.append(batch)
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), batch), zmq.DONTWAIT)

    def clear(self) -> None:
        """The core died, and its blocks with it."""
        if self._next:
            self.publish(encode_batch([AllBlocksCleared()], time.time(), self._format))

    async def answer_replays(self) -> None:
        """Answers those who missed batches, until it is cancelled. A message of another form is dropped."""
        while self._replay is not None:
            peer, *frames = await self._replay.recv_multipart()
            if len(frames) == 2 and not frames[0] and len(frames[1]) == 8:
                await self._answer(peer, int.from_bytes(frames[1], "big"))

    async def _answer(self, peer: bytes, first: int) -> None:
        oldest = self._next - len(self._batches)
        begin = min(max(first, oldest), self._next)
        missed = list(islice(self._batches, begin - oldest, None))  # later ones reach the peer as a subscriber
        for number, batch in enumerate(missed, begin):
            await self._reply(peer, number.to_bytes(8, "big"), batch)
            if number % SENT_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._reply(peer, END, b"")

    async def _reply(self, peer: bytes, number: bytes, batch: bytes) -> None:
        assert self._replay is not None
        # vLLM's answers have the topic since its events are maps.
        topic = (self._topic,) if self._format == "map" else ()
        with contextlib.suppress(zmq.Again):
            await self._replay.send_multipart((peer, b"", *topic, number, batch), zmq.DONTWAIT)

    def close(self) -> None:
        for socket in (self._publisher, self._replay):
            if socket is not None:
                socket.close(linger=200)
        self._context.term()


def warn_of_exposure(publisher: KVEventPublisher) -> str | None:
    """A warning where others can reach the events, which hold prompts as token ids; None where they cannot."""
    for endpoint in (publisher.endpoint, publisher.replay_endpoint):
        if endpoint is not None and endpoint.startswith("tcp://"):
            host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            if not is_loopback(host):
                return (
                    f"Warning: whoever reaches {endpoint} reads the tokens of all prompts and outputs, without a key; "
                    "keep it inside the cluster, and 127.0.0.1 serves this machine"
                )
    return None


def _bind(socket: zmq.Socket, endpoint: str, option: str) -> str:
    """Binds, and returns the address with the port that was taken."""
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
    if path is not None and path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ServerError(f"{path} is no socket, and binding to it would replace it; choose another with {option}")
    try:
        socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
    except zmq.ZMQError as error:
        raise ServerError(f"cannot listen on {endpoint}: {error.strerror}; choose another with {option}") from None
    if path is not None:
        os.chmod(path, 0o600)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
