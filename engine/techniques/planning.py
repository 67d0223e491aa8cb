"""The planning halves of the techniques that an engine has, in the order of their hooks."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sojourn.engine.config import EngineConfig
from sojourn.engine.kv_source import KVAddress
from sojourn.engine.request.technique import Technique
from sojourn.engine.techniques import load
from sojourn.engine.techniques.wanted import WANTED
from sojourn.metrics.errors import ModelError


def planning(
    config: EngineConfig,
    runner: Any = None,
    *,
    tiers: Any = None,
    max_loras: int | None = None,
    handoffs: Any = None,
    clock: Callable[[], int] = time.monotonic_ns,
) -> list[Technique]:
    """Those that the settings ask for. `runner` reads adapters and copies blocks outside of steps; `tiers` (KVTiers)
    and `handoffs` (Handoffs) are made around it. `max_loras`: requests may name adapters, whatever the settings say.
    Raises ModelError where this installation lacks one.

    A handover stands before the tiers: a prompt that is handed over wants its blocks before they look for its prefix.
    """
    found: list[Technique] = []
    if WANTED["speculation"](config):
        drafts = load("speculation", "planning")
        found.append(drafts.DraftPlanning(drafts.make_draft_lengths(config)))
    if config.telemetry == "full" and (sample := _optional("speculation", "lookup_sample")) is not None:
        found.append(sample.LookupSample())
    if WANTED["lora"](config) or max_loras is not None:
        found.append(load("lora", "planning").LoraPlanning(max_loras or config.max_loras, runner))
    if tiers is not None:
        below = load("tiers", "planning").TierPlanning(tiers, runner)
        if handoffs is not None:
            found.append(load("handover", "planning").HandoverPlanning(handoffs, below, clock))
        found.append(below)
    if WANTED["group"](config):
        found.append(load("group", "planning").GroupPlanning())
    return found


class Around(NamedTuple):
    """What stands around the loop of a core."""

    techniques: list[Technique]
    tier_indexes: Sequence[Any]  # of its own tiers, for events of blocks
    kv_address: KVAddress | None  # at which decode servers ask


def around(config: EngineConfig, runner: Any) -> Around:
    """With the memory, files and ports that it needs, around a runner. Raises ModelError."""
    if not WANTED["tiers"](config):
        return Around(planning(config, runner), (), None)
    handoffs = None
    if config.kv_role is None:
        tiers = load("tiers", "build").make_tiers(config, runner.inner)
    else:
        tiers, handoffs = load("handover", "build").make_handover(config, runner.inner)
    techniques = planning(config, runner, tiers=tiers, handoffs=handoffs)
    return Around(techniques, tiers.own_indexes, None if handoffs is None else handoffs.address)


def _optional(name: str, module: str) -> Any:
    """A part that no setting asks for by name; None where it cannot be loaded."""
    try:
        return load(name, module)
    except ModelError:
        return None
