"""The planning halves of the techniques that an engine has, in the order of their hooks."""

import time
from collections.abc import Callable
from typing import Any

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.technique import Technique
from sojourn.engine.techniques import load
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
    if config.speculation != "none":
        drafts = load("speculation", "planning")
        found.append(drafts.DraftPlanning(drafts.make_draft_lengths(config)))
    if config.telemetry == "full" and (sample := _optional("speculation", "lookup_sample")) is not None:
        found.append(sample.LookupSample())
    if config.has_loras or max_loras is not None:
        found.append(load("lora", "planning").LoraPlanning(max_loras or config.max_loras, runner))
    if tiers is not None:
        below = load("tiers", "planning").TierPlanning(tiers, runner)
        if handoffs is not None:
            found.append(load("handover", "planning").HandoverPlanning(handoffs, below, clock))
        found.append(below)
    if config.num_ranks > 1:
        found.append(load("group", "planning").GroupPlanning())
    return found


def _optional(name: str, module: str) -> Any:
    """A part that no setting asks for by name; None where it cannot be loaded."""
    try:
        return load(name, module)
    except ModelError:
        return None
