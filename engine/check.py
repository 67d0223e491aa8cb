"""What `sojourn serve --check` looks at: all that can be wrong before a server takes its memory."""

import os

from engine.config import EngineConfig, model_folder
from engine.runner.memory_plan import planned
from engine.server.http.listener import listen
from engine.token.text.template import ChatTemplate
from engine.token.text.tokenizer import Tokenizer
from metrics.errors import RunDataError
from metrics.memory.plan import MemoryPlan
from metrics.run.directory import RunDirectory


def check(config: EngineConfig) -> MemoryPlan:
    """The plan of a server that would start now; nothing is loaded, written or served.

    Raises SojournError with the first fault: model, tokenizer, template, memory, run directory or port.
    """
    folder = model_folder(config.model)
    plan = planned(config, folder)
    Tokenizer(folder)
    ChatTemplate(folder)
    if config.run_dir is not None:
        run = RunDirectory(config.run_dir)
        if run.sources("requests") or run.sources("steps"):
            raise RunDataError(f"{run.path} already holds a run; choose another folder with --run-dir")
        existing = next(path for path in (config.run_dir, *config.run_dir.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise RunDataError(f"{existing} is not a folder that can be written; choose another with --run-dir")
    listen(config).close()
    return plan
