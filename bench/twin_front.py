"""The front of one of several twin servers: `sojourn serve`, but its core is there already. Started by `twins`.

python -m bench.twin_front ORDER_FILE CORE_PID TWINS CORE_TELEMETRY ENGINE_CONFIG_JSON
"""

import asyncio
import json
import os
import sys
from functools import partial
from pathlib import Path

import psutil

from engine.config import EngineConfig
from engine.server import service
from engine.server.core.client import CoreClient
from engine.server.serve import serve
from engine.server.telemetry import full as telemetry
from engine.server.telemetry import loop_lag
from engine.telemetry.step_rows import HOLD_NS, StepRows
from metrics.run import recorder

LOOK_SECONDS = 0.5  # between two looks whether the core still lives


class SharedCore:
    """In the place of a process that this one started."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._left = asyncio.Event()

    async def wait(self) -> int:
        """Returns when the core is dead, or of no interest any more."""
        core = psutil.Process(self.pid)
        while not self._left.is_set() and core.is_running() and core.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(LOOK_SECONDS)
        return 0

    def kill(self) -> None:
        self._left.set()


class TwinClient(CoreClient):
    """Tells the core where it listens, and what it is to book."""

    def __init__(self, order: Path, core_pid: int, core_telemetry: str, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._order, self._core_pid, self._core_telemetry = order, core_pid, core_telemetry

    async def _start_core(self, sockets: str) -> SharedCore:
        unfinished = self._order.with_suffix(".tmp")
        config = self.config.model_dump(mode="json") | {"telemetry": self._core_telemetry}
        unfinished.write_text(json.dumps({"sockets": sockets, "config": config}))
        os.replace(unfinished, self._order)
        return SharedCore(self._core_pid)

    async def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
        await super().stop()


def share_time(twins: int) -> None:
    """What telemetry does every so often, it does so often in the time that this twin has: one of `twins` works."""
    telemetry.SAMPLE_SECONDS *= twins
    telemetry.LOOK_SECONDS *= twins
    telemetry.StepRows = partial(StepRows, HOLD_NS * twins)
    loop_lag.TICK_NS *= twins
    recorder.FLUSH_SECONDS *= twins


def main() -> None:
    order, core_pid, twins, core_telemetry, config = sys.argv[1:]
    share_time(int(twins))
    service.CoreClient = partial(TwinClient, Path(order), int(core_pid), core_telemetry)
    serve(EngineConfig.model_validate_json(config))


if __name__ == "__main__":
    main()
