"""What `sojourn serve --check` looks at: all that can be wrong before a server takes its memory."""

import os
from pathlib import Path

from engine.config import EngineConfig, model_folder
from engine.runner.memory_plan import planned
from engine.server.access.rules import load_rules
from engine.server.http.listener import listen
from engine.server.moderation.file import load
from engine.server.moderation.profile import Events
from engine.server.telemetry.recording import refuse_recorded
from engine.token.text.template import ChatTemplate
from engine.token.text.tokenizer import Tokenizer
from metrics.errors import RunDataError
from metrics.memory.plan import MemoryPlan
from metrics.run.directory import RunDirectory
from metrics.usage.price_list import load_price_list


def check(config: EngineConfig) -> MemoryPlan:
    """The plan of a server that would start now; nothing is loaded, written or served.

    Raises SojournError with the first fault: model, tokenizer, template, memory, files of access, moderation and
    prices, run directory, usage directory or port.
    """
    folder = model_folder(config.model)
    plan = planned(config, folder)
    Tokenizer(folder)
    ChatTemplate(folder)
    load_rules(config.access, config.api_keys)
    if config.moderation is not None:
        load(config.moderation, Events())
    if config.usage_prices is not None:
        load_price_list(config.usage_prices)
    if config.run_dir is not None:
        refuse_recorded(RunDirectory(config.run_dir))
        _check_writable(config.run_dir, "--run-dir")
    if config.usage_dir is not None:
        _check_writable(config.usage_dir, "--usage-dir")
    listen(config).close()
    return plan


def _check_writable(folder: Path, option: str) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise RunDataError(f"{existing} is not a folder that can be written; choose another with {option}")
