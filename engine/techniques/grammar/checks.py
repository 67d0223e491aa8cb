"""Finds out whether a client's grammar can be compiled, in a fork of a process that stands by: the fork may die of it.

llguidance does not always let other threads run: a range of floats blocked the interpreter for 0.8 s, an intersection
of twenty patterns ran for ten minutes. So the front itself compiles no grammar of a client.
"""

import asyncio
import contextlib
import hashlib
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path

import msgspec

from sojourn.engine.sampling import Grammar
from sojourn.engine.server.errors import ApiError
from sojourn.engine.techniques.grammar.worker import LENGTH_BYTES, frame

WORKERS = 2
REPLY_SECONDS = 5  # wall time: a busy machine may leave a worker without CPU time
QUEUE_SECONDS = 5
REMEMBERED = 1024  # verdicts: a schema that every request repeats is compiled once


class GrammarChecks:
    """Owns the worker processes. One starts with the server, the second when the first is needed."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._idle: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._starting: set[asyncio.Task] = set()
        self._pending: dict[bytes, asyncio.Task[str | None]] = {}
        self._stopped = False

    async def stop(self) -> None:
        self._stopped = True
        under_way = [*self._starting, *self._pending.values()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for process in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises ApiError 400 that names `param` unless the grammar can be compiled; 503 while no worker decides."""
        key = hashlib.blake2b(msgspec.msgpack.encode(grammar), digest_size=16).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            error = self._verdicts[key]
        else:
            if key not in self._pending:
                self._pending[key] = asyncio.create_task(self._verdict(grammar))
                self._pending[key].add_done_callback(partial(self._remember, key))
            # All requests with this grammar wait for one verdict. A client that leaves does not cancel it: to replace a
            # worker takes half a second.
            error = await asyncio.shield(self._pending[key])
        if error is not None:
            raise ApiError(400, f"`{param}` cannot be followed: {error}", param=param, code="invalid_value")

    def _remember(self, key: bytes, verdict: asyncio.Task[str | None]) -> None:
        del self._pending[key]
        if not verdict.cancelled() and verdict.exception() is None:
            self._verdicts[key] = verdict.result()
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)

    async def _verdict(self, grammar: Grammar) -> str | None:
        while len(self._processes) + len(self._starting) < WORKERS:
            self.start()
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                process = await self._idle.get()
        except TimeoutError:
            message = "too many grammars wait to be checked; try again"
            raise ApiError(503, message, code="grammars_busy", retry_after_seconds=1) from None
        try:
            process.stdin.write(frame(grammar))
            async with asyncio.timeout(REPLY_SECONDS):
                error = await _read(process)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            # Killed from outside, or without CPU time. A grammar would have killed the fork, and not its parent.
            self._discard(process)
            message = "the process that checks grammars was lost; try again"
            raise ApiError(503, message, code="grammars_busy", retry_after_seconds=1) from None
        self._idle.put_nowait(process)
        return error

    def start(self) -> None:
        """Starts one more worker; does not wait for it."""
        task = asyncio.create_task(self._run())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _run(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sojourn.engine.techniques.grammar.worker", str(self._folder),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._processes.add(process)
        try:
            await _read(process)
        except asyncio.IncompleteReadError:  # its traceback is in the log
            self._processes.discard(process)
            return
        self._idle.put_nowait(process)

    def _discard(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        self._processes.discard(process)
        if not self._stopped:
            self.start()


async def _read(process: asyncio.subprocess.Process) -> str | None:
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=str | None)
