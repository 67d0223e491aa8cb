"""What `sojourn serve --check` looks at: all that can be wrong before a server takes its memory."""

import os
import shutil
from pathlib import Path

from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.server.gateway.access.rules import load_rules
from sojourn.engine.server.gateway.moderation.file import load as load_moderation
from sojourn.engine.server.gateway.moderation.profile import Events
from sojourn.engine.server.http.listener import listen
from sojourn.engine.server.telemetry.recording import refuse_recorded
from sojourn.engine.settings.tiers import DISK_GIB
from sojourn.engine.techniques import load
from sojourn.engine.techniques.computing import planned_memory
from sojourn.engine.token.generation_config import sampling_defaults
from sojourn.engine.token.text.template import ChatTemplate
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.errors import ModelError, RunDataError
from sojourn.metrics.memory.plan import GIB, MemoryPlan, shown_bytes
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.usage.price_list import load_price_list


def check(config: EngineConfig) -> MemoryPlan:
    """The plan of a server that would start now; nothing is loaded, written or served.

    Raises SojournError with the first fault: model, tokenizer, template, memory, files of access, moderation and
    prices, run directory, usage directory, KV tiers or port.
    """
    folder = model_folder(config.model)
    plan = planned_memory(config, folder)
    Tokenizer(folder)
    sampling_defaults(folder, config.generation_config)
    ChatTemplate(folder)
    load_rules(config.access, config.api_keys)
    if config.moderation is not None:
        load_moderation(config.moderation, Events())
    if config.usage_prices is not None:
        load_price_list(config.usage_prices)
    if config.run_dir is not None:
        refuse_recorded(RunDirectory(config.run_dir))
        _check_writable(config.run_dir, "--run-dir")
    if config.usage_dir is not None:
        _check_writable(config.usage_dir, "--usage-dir")
    if config.kv_disk_path is not None:
        _check_disk(config.kv_disk_path.expanduser(), config.kv_disk_gib or DISK_GIB)
    if config.kv_remote_url is not None:
        load("tiers", "remote").check_reachable(config.kv_remote_url)
    listen(config).close()
    return plan


def _check_disk(folder: Path, gib: float) -> None:
    """What the tier has there already is its own room."""
    _check_writable(folder, "--kv-disk-path")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    held = sum(file.stat().st_size for file in folder.glob(f"*/*{load('tiers', 'disk').SUFFIX}"))
    room = shutil.disk_usage(existing).free + held
    if room < gib * GIB:
        raise ModelError(f"kv_disk_path: {folder} has room for {shown_bytes(room)}, and kv_disk_gib={gib:g}; lower it")


def _check_writable(folder: Path, option: str) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise RunDataError(f"{existing} is not a folder that can be written; choose another with {option}")
