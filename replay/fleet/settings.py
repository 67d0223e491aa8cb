"""The settings of a fleet's replay, and what it cannot replay."""

from typing import TYPE_CHECKING

from sojourn.engine.config import EngineConfig
from sojourn.engine.settings.tiers import has_tiers
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change

if TYPE_CHECKING:
    from sojourn.replay.predictor import ReplayPredictor

OTHERS = ("arrival_rate", "arrivals", "replicas", "routing")  # options of their own, or of the trace


def fleet_settings(
    predictor: "ReplayPredictor", change: Change | None, block_tokens: int
) -> tuple[EngineConfig, Change]:
    """Of each replica, with blocks of `block_tokens` (0: the run's own) and as much memory. Raises ReplayError."""
    change = change or Change()
    for name in OTHERS:
        if getattr(change, name) != getattr(Change(), name):
            raise ReplayError(f"{name} is an option of its own in a fleet's replay; leave it out of --set")
    if any(not account.startswith("compute.") for account in change.removed):
        raise ReplayError("a fleet's replay removes compute.host, compute.prefill and compute.decode only")
    predictor.check(change)
    config = predictor.changed_config(change)
    if config.speculation != "none":
        raise ReplayError("a fleet's replay knows no text, so it takes no drafts; add --set speculation=none")
    if has_tiers(dict(config)):
        raise ReplayError("a fleet's replay has no KV tiers; add --set kv_host_gib=null and --set kv_disk_path=null")
    if predictor.material.overlap if config.overlap == "auto" else config.overlap == "on":
        raise ReplayError("a fleet's replay does not overlap steps; add --set overlap=off")
    assert config.num_kv_blocks is not None
    if block_tokens and block_tokens != config.block_size:
        blocks = max(1, config.num_kv_blocks * config.block_size // block_tokens)
        config = config.model_copy(update={"block_size": block_tokens, "num_kv_blocks": blocks})
    return config, change
