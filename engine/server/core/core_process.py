"""One core process: its start, its two sockets, its end."""

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Self

import zmq
import zmq.asyncio

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.process import keep_cupti, let_threads_sleep

MODULE = "sojourn.engine.core"
MOST_AT_ONCE = 64  # messages: of some 30 steps


class CoreProcess:
    """It imports torch at once, and loads the model when `begin` says so. Until then it holds no device memory, and is
    a spare."""

    def __init__(self, process: asyncio.subprocess.Process, spawned_ns: int):
        self._process = process
        self._spawned_ns = spawned_ns
        self._to_core: zmq.asyncio.Socket | None = None
        self._from_core: zmq.asyncio.Socket | None = None
        self._at_once: zmq.Socket | None = None  # the same one, without futures: each costs more than its message

    @classmethod
    async def start(cls) -> Self:
        """Raises OSError where no process can be started."""
        spawned_ns = time.monotonic_ns()
        environment = dict(os.environ)
        let_threads_sleep(environment)
        keep_cupti(environment)
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", MODULE, str(os.getpid()), stdin=asyncio.subprocess.PIPE, env=environment
            ),
            spawned_ns,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def begin(
        self, context: zmq.asyncio.Context, sockets: Path, first_step: int, config: EngineConfig, wanted_ns: int
    ) -> None:
        """Binds the sockets in a folder of their own, and lets the process load the model, which the front wanted at
        that moment of the monotonic clock."""
        self._to_core, self._from_core = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, name in ((self._to_core, "to-core"), (self._from_core, "from-core")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{sockets}/{name}")
        self._at_once = zmq.Socket.shadow(self._from_core)
        work = {
            "sockets": str(sockets), "first_step": first_step, "config": config.model_dump(mode="json"),
            "wanted_ns": wanted_ns, "spawned_ns": self._spawned_ns,
        }  # fmt: skip
        self._process.stdin.write(json.dumps(work).encode() + b"\n")
        self._process.stdin.close()

    def send(self, encoded: bytes) -> None:
        # A PUSH socket without a high-water mark never blocks; the future is done at once.
        if self._to_core is not None and not self._to_core.closed:  # else its streams fail in a moment
            self._to_core.send(encoded)

    async def receive(self) -> tuple[list[messages.FromCore], int]:
        """The messages that are there, in their order, MOST_AT_ONCE at most; and how many more could not be read."""
        found = [await self._from_core.recv()]
        with contextlib.suppress(zmq.Again):
            while len(found) < MOST_AT_ONCE:
                found.append(self._at_once.recv(zmq.NOBLOCK))
        readable = []
        for encoded in found:
            with contextlib.suppress(*messages.UNREADABLE):
                readable.append(messages.decode_from_core(encoded))
        return readable, len(found) - len(readable)

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """Closes its sockets."""
        for socket in (self._to_core, self._from_core):
            if socket is not None:
                socket.close(linger=0)


def tell(sentence: str) -> None:
    """To whoever runs the server."""
    print(f"sojourn: {sentence}", file=sys.stderr, flush=True)
