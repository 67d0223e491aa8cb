"""A process that has imported torch and waits to replace a core that dies."""

import asyncio
import contextlib

from sojourn.engine.server.core.core_process import CoreProcess

# The imports take a second of CPU time. A server is often measured as soon as it is ready, and a core that dies in its
# first seconds will probably die again.
DELAY_SECONDS = 10


class Spare:
    """Owns at most one process without a model. Its memory is some 250 MB of its own; it holds no device memory."""

    def __init__(self) -> None:
        self._process: CoreProcess | None = None
        self._starting: asyncio.Task | None = None

    def prepare(self) -> None:
        """Starts one after a while, unless there is one."""
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start(), name="spare core")

    def take(self) -> CoreProcess | None:
        """The spare, which is the caller's from now on; None where there is none."""
        if self._starting is not None:
            self._starting.cancel()
        process, self._process = self._process, None
        return process if process is not None and process.is_alive else None

    async def stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if (process := self.take()) is not None:
            process.kill()
            await process.wait()

    async def _start(self) -> None:
        if self._process is not None and self._process.is_alive:
            return
        await asyncio.sleep(DELAY_SECONDS)
        with contextlib.suppress(OSError):  # without a spare a replacement takes longer
            self._process = await CoreProcess.start()
