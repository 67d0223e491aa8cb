"""Where the front's records go: into the exporter's arrays, and into the run directory if one is recorded."""

import asyncio
import os
import time

from engine import messages
from engine.config import EngineConfig, model_folder, objectives
from metrics.exporter import Exporter
from metrics.machine import hardware, versions
from metrics.recorder import Recorder
from metrics.records import RequestRecord
from metrics.rundir import RunDirectory, RunError, wall_anchor
from metrics.system import SystemSampler

SAMPLE_SECONDS = 1.0


class Telemetry:
    """Owns the exporter and the recorder. Both see nothing but the two records and the state of the pool.

    Raises RunError if the run directory cannot be written, or holds a finished run.
    """

    def __init__(self, config: EngineConfig):
        bounds = objectives(config)
        name = config.served_model_name or model_folder(config.model).name
        self.exporter = Exporter(name, [{"klass": "all"} | bounds] if bounds else None)
        self.recorder: Recorder | None = None
        if config.run_dir is not None:
            self._owns_run = _open_run(config)
            self.recorder = Recorder(config.run_dir, ("requests", "steps", "system"))

    def ready(self, message: messages.Ready) -> None:
        """A core has loaded its model: its whole pool is free."""
        self.exporter.observe_idle(message.num_kv_blocks, 0, 0, 0)

    def outputs(self, message: messages.Outputs) -> None:
        for record in message.records:
            self.exporter.observe_step(record)
            if self.recorder is not None:
                self.recorder.append("steps", record)
        if not message.running:
            self.exporter.observe_idle(*message.blocks, waiting=message.waiting)

    def request(self, record: RequestRecord) -> None:
        self.exporter.observe_request(record)
        if self.recorder is not None:
            self.recorder.append("requests", record)

    def scrape(self) -> bytes:
        if self.recorder is not None:
            self.exporter.observe_recorder(self.recorder.dropped, self.recorder.failed)
        return self.exporter.render()

    async def sample_system(self, core_pid) -> None:
        """Records the machine once a second, for as long as it runs. `core_pid()` tells the core's process of now."""
        sampler = SystemSampler(os.getpid())
        while self.recorder is not None:
            due = time.monotonic() + SAMPLE_SECONDS
            record = await asyncio.to_thread(sampler.sample, core_pid())
            self.recorder.append("system", record)
            await asyncio.sleep(max(0, due - time.monotonic()))

    def close(self) -> None:
        """Writes the rest. A run that this server described itself is finished with it."""
        if self.recorder is not None:
            self.recorder.close()
            if self._owns_run:
                run = RunDirectory(self.recorder.directory)
                run.compact()
                print(
                    f"Sojourn has stopped; {len(run.table('requests'))} requests are recorded in {run.path}", flush=True
                )


def _open_run(config: EngineConfig) -> bool:
    """An experiment has made the run directory already; a server started by hand describes, and owns, its own."""
    run = RunDirectory(config.run_dir)
    if (run.path / "run.json").exists():
        if run.sources("requests") or run.sources("steps"):
            raise RunError(f"{run.path} already holds a run; choose another folder with --run-dir")
        return False
    bounds = objectives(config)
    settings = config.model_dump(mode="json", exclude={"run_dir"})
    meta = {
        "scenario": {"name": "serve", "description": "whatever clients sent"},
        "seed": config.seed,
        "engine": settings,
        "hardware": hardware(),
        "versions": versions(),
        "wall_anchor": wall_anchor(),
        "objectives": [{"klass": "all", "source": "set by hand"} | bounds] if bounds else [],
        "client_error": None,
        "valid": False,
        "invalid_reasons": ["recorded by a server alone: no client measured it"],
    }
    try:
        RunDirectory.create(run.path, meta)
    except OSError as error:
        raise RunError(f"run directory {run.path} cannot be made: {error.strerror}; choose another") from None
    return True
