"""The run directory of a server: its description, its records, and its end, also where the disk is full or gone."""

import logging
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig, objectives
from sojourn.metrics.compute.roofline import Ceilings
from sojourn.metrics.compute.startup import Startup
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.machine.host import hardware, versions
from sojourn.metrics.memory.residence import ModelResidence
from sojourn.metrics.run.directory import RunDirectory, wall_anchor
from sojourn.metrics.run.recorder import Recorder
from sojourn.metrics.run.server_alone import SERVER_ALONE

log = logging.getLogger(__name__)
TABLES = ("steps", "requests", "system", "kernels")
# What `run.json` says of the core: fields of its Ready message.
DESCRIBED = (
    "device", "dtype", "weights", "threads", "num_kv_blocks", "block_size", "num_parameters", "weight_bytes",
    "checkpoint_format", "weight_error",
    "changes_outputs", "expert_exchange",
)  # fmt: skip
REMOVED = "its folder was removed while the server ran: records from before are lost"


class Recording:
    """Owns the recorder of a server, and `run.json` of a run that the server began itself.

    Raises RunDataError if the run directory cannot be made, or holds a run.
    """

    def __init__(self, config: EngineConfig):
        self.run = RunDirectory(config.run_dir)
        self._meta = _begin_run(self.run, config)  # None: an experiment describes, and finishes, this run
        self.recorder = Recorder(config.run_dir, TABLES)
        self._startups: list[Startup] = []

    def describe(self, message: messages.Ready, ceilings: Ceilings | None) -> None:
        """Writes to `run.json` what is known once the model is loaded: what the costs of steps are worked out from."""
        known = {
            "model_shape": msgspec.to_builtins(message.shape),
            "core": {name: msgspec.to_builtins(getattr(message, name)) for name in DESCRIBED},
            "ceilings": None if ceilings is None else msgspec.to_builtins(ceilings),
        }
        self._update(known, "the model's shape, so costs cannot be worked out later")

    def started(self, startup: Startup) -> None:
        """Writes to `run.json` where the time of one more start of a core went."""
        self._startups.append(startup)
        self._update({"startups": msgspec.to_builtins(self._startups)}, "where the time of a start went")

    def tell_models(self, found: list[ModelResidence]) -> None:
        """Writes to `run.json` what the models of the front were until now."""
        self._update({"models": msgspec.to_builtins(found)}, "what the models of the front were")

    def _update(self, known: dict[str, Any], what: str) -> None:
        if self._meta is not None:
            self._meta |= known
        try:
            self.run.update_meta(**known)
        except (OSError, RunDataError) as error:
            log.warning("run.json does not tell %s: %s", what, error)

    def restore(self) -> None:
        """Writes `run.json` again where the folder was removed: without it nobody reads the records that follow."""
        if self._meta is None or not self.recorder.failed or (self.run.path / "run.json").exists():
            return
        if REMOVED not in self._meta["invalid_reasons"]:
            self._meta["invalid_reasons"].append(REMOVED)
        with suppress(OSError, RunDataError):  # the recorder logs and counts it; the next call tries again
            RunDirectory.create(self.run.path, self._meta)

    def close(self) -> str | None:
        """Writes the rest, and finishes a run that the server began. A sentence of what is lost, None if nothing is."""
        self.recorder.close()
        self.restore()
        faults = []
        if self.recorder.failed:
            faults.append(f"{self.recorder.failed:,} records could not be written ({self.recorder.last_error})")
        if self._meta is not None:
            try:
                self.run.compact()
            except (OSError, pa.ArrowException) as error:
                faults.append(f"its tables stay in segments, which every command reads ({error})")
            remaining = self._remaining()
            if not faults:
                print(f"Sojourn has stopped; {remaining} in {self.run.path}", flush=True)
            else:
                faults.append(remaining)
        return f"the run directory {self.run.path} is not complete: {'; '.join(faults)}" if faults else None

    def _remaining(self) -> str:
        try:
            return f"{len(self.run.arrow('requests'))} requests are recorded"
        except RunDataError as error:
            return str(error)


def refuse_recorded(run: RunDirectory) -> None:
    """Raises RunDataError if a server has recorded into it."""
    if run.sources("requests") or run.sources("steps"):
        raise RunDataError(f"{run.path} already holds a run; choose another folder with --run-dir")


def _begin_run(run: RunDirectory, config: EngineConfig) -> dict[str, Any] | None:
    """What `run.json` says. None: an experiment has made the run directory already; a server that was started by hand
    describes, and owns, its own."""
    if (run.path / "run.json").exists():
        refuse_recorded(run)
        return None
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
        "invalid_reasons": [SERVER_ALONE],
    }
    try:
        RunDirectory.create(run.path, meta)
    except OSError as error:
        raise RunDataError(f"run directory {run.path} cannot be made: {error.strerror}; choose another") from None
    return meta
