"""Which techniques compute beside a model: those that the settings ask for."""

from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.engine.compute.communication.layout import ONE_PROCESS
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.runner.memory_plan import planned
from sojourn.engine.runner.runner import ModelRunner, make_single_runner
from sojourn.engine.runner.technique import Absent, ComputingTechnique
from sojourn.engine.techniques import NAMES, load
from sojourn.engine.techniques.wanted import WANTED
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError
from sojourn.metrics.memory.plan import MemoryPlan

if TYPE_CHECKING:
    from sojourn.engine.techniques.group.runner import GroupRunner

BESIDE_A_MODEL = ("lora", "tiers", "speculation")  # a group is around it
OF_EVERY_RANK = ("lora", "tiers")  # the others are of the rank that plans and samples
NO_ADAPTERS = Absent(
    "lora", lambda request: request.adapter is not None, "this engine serves no adapters; set lora_adapters"
)


def computing(config: EngineConfig, rank: int = 0) -> tuple[ComputingTechnique, ...]:
    """In the order of their hooks. Raises ModelError where this installation lacks one that the settings ask for."""
    found: list[ComputingTechnique] = []
    for name in NAMES:
        if name in BESIDE_A_MODEL and WANTED[name](config) and (rank == 0 or name in OF_EVERY_RANK):
            found.append(load(name, "computing").make(config))
        elif rank == 0 and name == "lora":
            found.append(NO_ADAPTERS)
        elif rank == 0 and name == "grammar":
            found.append(_grammars(config))
    return tuple(found)


def settled(config: EngineConfig) -> EngineConfig:
    """The settings with the choices that all ranks of a group must share. Raises ModelError."""
    if not WANTED["group"](config):
        return config
    return load("group", "expert_exchange").with_exchange(config, model_folder(config.model))


def make_runner(
    config: EngineConfig, startup: StartupClock, sockets: Path | None, *, ends_process: bool
) -> "ModelRunner | GroupRunner":
    """With the techniques that the settings ask for. `sockets`: the folder for those of a group; `ends_process`: a rank
    that is lost ends this one. Raises ModelError."""
    folder = model_folder(config.model)
    if not WANTED["group"](config):
        startup.enter("setup")
        return make_single_runner(config, folder, startup, computing(config))
    startup.enter("memory_plan")
    planned_memory(config, folder)  # sizes that do not divide are refused before a process starts
    startup.enter("setup")
    group = load("group", "runner")
    with load("group", "group").forming(config, startup, sockets, ends_process=ends_process) as ranks:
        return group.GroupRunner(*group.rank_runner(config, folder, startup, computing(config), ranks), ranks)


def planned_memory(config: EngineConfig, folder: Path) -> MemoryPlan:
    """Of the server, or of rank 0, that the settings ask for. Raises ModelError as `planned`."""
    layout = ONE_PROCESS if not WANTED["group"](config) else load("group", "layout").layout_of(config, 0)
    return planned(config, folder, computing(config), layout)


def _grammars(config: EngineConfig) -> ComputingTechnique:
    """No setting asks for grammars: requests do."""
    try:
        return load("grammar", "computing").make(config)
    except ModelError as error:
        return Absent("grammar", lambda request: request.sampling.grammar is not None, str(error))
