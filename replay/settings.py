"""Which changes a replay can make: the settings of its scheduler and memory, and the sentences that refuse others."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from sojourn.engine.config import EngineConfig, complaint
from sojourn.engine.settings.tiers import has_tiers
from sojourn.metrics.compute.speed_reference import LAYOUT
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.memory.plan import GIB, HOST_SHARE
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import engine_settings, section
from sojourn.replay.draft_odds import DraftModel

# The scheduler, the memory and the policies read these; the replay runs all three.
REPLAYED = (
    "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk_tokens", "max_waiting", "max_long_prefills",
    "long_prefill_tokens", "policy", "priority_ageing", "shortest_ageing", "fair_output_weight", "prefill_patience",
    "prefix_caching", "block_size", "num_kv_blocks", "kv_cache_gib", "overlap", "eviction_policy", "max_loras",
    "speculation", "speculation_adaptive", "speculation_tokens", "speculation_model", "speculation_ngram",
    "speculation_layers", "kv_host_gib", "kv_disk_path", "kv_disk_gib", "kv_remote_url", "kv_store_policy",
)  # fmt: skip
OBJECTIVE_SETTINGS = ("objective_ttft_ms", "objective_tpot_ms", "objective_e2e_ms")
# These change how fast the device computes, and nothing in the run tells how much. Of the layout it does for a group
# that becomes one process: see replay/parallel.py.
SPEED = (
    "model", "device", "dtype", "weights", "attention_backend", "fused_operations", "kv_cache_dtype", "graphs",
    "threads", "load_format", "expert_exchange", *LAYOUT,
)  # fmt: skip
WINDOW = ("attention_window", "attention_sinks")  # change the outputs, and with them the load
SPECULATION = ("speculation", "speculation_adaptive", "speculation_tokens")
PROPOSER_KNOBS = ("speculation_model", "speculation_ngram", "speculation_layers")  # they change what is proposed
ROOM = ("attention_window",)  # with kv_scale beside it: the room that it is worth
REMOVABLE = (
    "client.lag", "client.network", "request.routing", "token.encode", "token.decode", "token.sample",
    "request.admission", "request.quota", "request.cold_start", "request.moderation", "request.stream", "compute.host",
    "compute.prefill", "compute.decode",
)  # fmt: skip
POLICY_KNOBS = ("priority_ageing", "shortest_ageing", "fair_output_weight", "prefill_patience")
DEFAULT_POLICY = EngineConfig.model_fields["policy"].default
MOST_REPLICAS = 4096
MOST_SESSIONS = 100_000
POOL_SIZES = ("num_kv_blocks", "kv_cache_gib", "memory_fraction")  # at most one of them is set


def check(change: Change, *, is_closed: bool, num_servers: int = 1) -> None:
    """Raises ReplayError, with a sentence, for a change that a replay cannot make."""
    _check_servers(change, num_servers)
    for name, value in change.settings.items():
        _check_setting(change, name, value)
    for account, share in change.removed.items():
        _check_removed(account, share)
    for name in ("device_speed", "kv_scale", "arrival_rate"):
        value = getattr(change, name)
        if not 0 < value < 1e4:
            raise ReplayError(f"{name}={value:g} is no factor; give a number above 0, such as 2")
    if not 1 <= change.replicas <= MOST_REPLICAS:
        raise ReplayError(
            f"replicas={change.replicas} cannot be replayed; give a whole number from 1 to {MOST_REPLICAS:,}"
        )
    if change.sessions is not None and not (is_closed and 1 <= change.sessions <= MOST_SESSIONS):
        raise ReplayError(
            f"sessions={change.sessions} is the number of users or requests in flight of a closed loop, from 1 to "
            f"{MOST_SESSIONS:,}" + ("" if is_closed else "; this run is an open load: give arrival_rate")
        )
    if is_closed and (change.arrival_rate != 1.0 or change.arrivals != "recorded"):
        raise ReplayError(
            "this run is a closed loop: its clients wait for their answers, so it has no arrival rate to change; "
            "replay an open load, or give sessions, its number of users"
        )
    if change.settings.get("overlap") == "auto":
        raise ReplayError("overlap=auto depends on the device; give on or off")


def _check_setting(change: Change, name: str, value: Any) -> None:
    is_told = change.device_speed != 1.0 or (name == "kv_cache_dtype" and change.kv_scale != 1.0) or name in LAYOUT
    has_room = name in ROOM and change.kv_scale != 1.0
    if name in SPEED and not is_told:
        raise ReplayError(
            f"{name} changes how fast the device computes, which this run cannot tell; give device_speed beside "
            "it, such as device_speed=1.3"
        )
    if name in WINDOW and not has_room:
        raise ReplayError(f"{name} changes the outputs, which a replay takes from the run; record a run with it")
    if name not in (*REPLAYED, *SPEED, *OBJECTIVE_SETTINGS) and not has_room:
        known = name in EngineConfig.model_fields
        why = "changes nothing that a replay computes" if known else "is not a setting of the engine"
        raise ReplayError(f"{name} {why}; a replay takes {', '.join(REPLAYED)}")
    if name in OBJECTIVE_SETTINGS and not _is_bound(value):
        raise ReplayError(f"{name}={value} is no bound; give milliseconds above 0, such as 500")


def _check_removed(account: str, share: float) -> None:
    if account not in REMOVABLE:
        raise ReplayError(
            f"the time of {account} follows from the scheduler's decisions, so it cannot be taken away by itself; "
            f"change a setting, or remove a share of one of {', '.join(REMOVABLE)}"
        )
    if not 0 <= share <= 1:
        raise ReplayError(f"removed {account}={share:g} is no share; give a number from 0 to 1")


def _check_servers(change: Change, num_servers: int) -> None:
    is_fleet, default = num_servers > 1, Change()
    if is_fleet and change.replicas != default.replicas:
        raise ReplayError(f"the run has {num_servers} servers already; replicas is for the run of one server")
    if not is_fleet and change.routing != default.routing and change.replicas == 1:
        raise ReplayError("routing chooses among servers, and there is one; give replicas=2 beside it")
    if not is_fleet and change.servers != default.servers:
        raise ReplayError("servers=equal is for the run of a fleet; this run has one server")


def _is_bound(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf)


def recorded_config(meta: Mapping[str, Any]) -> EngineConfig:
    """The settings in force in the run, with the size of the pool that its core had. Raises ReplayError."""
    found = {k: v for k, v in engine_settings(dict(meta)).items() if k in EngineConfig.model_fields and v is not None}
    core = section(meta, "core")
    blocks = core.get("num_kv_blocks") or found.get("num_kv_blocks") or section(meta, "kv_events").get("pool_blocks")
    if not found or blocks is None:
        raise ReplayError(
            "run.json does not say with which settings and blocks the engine ran, so its scheduler cannot be replayed; "
            "a run of `sojourn run`, or of `sojourn load` against our engine or a vLLM under sojourn-probe, has them; "
            "`sojourn compare A B` compares two runs of any server"
        )
    found.setdefault("model", "tiny-model")
    found |= {"num_kv_blocks": blocks, "block_size": core.get("block_size") or found.get("block_size", 16)}
    for name in ("kv_cache_gib", "memory_fraction"):
        found.pop(name, None)
    return _config({name: value for name, value in found.items() if name in (*REPLAYED, "model")})


def overlaps(config: EngineConfig, meta: Mapping[str, Any]) -> bool:
    """Whether a step is launched before the one before it is read."""
    if config.overlap != "auto":
        return config.overlap == "on"
    return section(meta, "core").get("device", "cpu") != "cpu"


def changed_config(recorded: EngineConfig, change: Change, meta: Mapping[str, Any]) -> EngineConfig:
    """The settings of a replay, with `num_kv_blocks` set. Raises ReplayError for values that the engine refuses."""
    chosen = {name: value for name, value in change.settings.items() if name in REPLAYED}
    if "compute.decode" in change.removed:  # that says what drafts spare
        chosen = {name: value for name, value in chosen.items() if name not in SPECULATION}
    if change.kv_scale != 1.0 and not has_tiers(dict(recorded)):  # that says what the room of a new tier is worth
        chosen.pop("kv_host_gib", None)
    settings = {name: getattr(recorded, name) for name in REPLAYED}
    settings = with_chosen({name: value for name, value in settings.items() if value is not None}, chosen)
    settings["model"] = "tiny-model"
    settings["num_kv_blocks"] = _blocks(recorded, chosen, change.kv_scale, meta)
    settings.pop("kv_cache_gib", None)
    return _config(settings)


def check_drafts(recorded: EngineConfig, changed: EngineConfig, model: DraftModel | None) -> None:
    """Raises ReplayError where the run does not tell what comes of the drafts of `changed`."""
    proposer = changed.speculation
    if proposer == "none":
        return
    if model is None or model.proposer != proposer:
        way_out = f"record a run with speculation={proposer}"
        if proposer == "ngram" and recorded.speculation == "none":
            why = "the run has no sample of what prompt lookup would find (lookup_steps of its requests)"
        else:
            why = f"how many drafts of {proposer} are accepted depends on the text, and this run verified none"
        raise ReplayError(f"{why}; {way_out}")
    for name in PROPOSER_KNOBS:
        if model.sampled is None and getattr(changed, name) != getattr(recorded, name):
            raise ReplayError(f"{name} changes what is proposed, which this run cannot tell; record a run with it")


def with_chosen(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those chosen in their place. What the engine refuses beside them is left out: the knobs of
    another policy, another size of the pool, a chunk above the token budget."""
    found = {**settings, **chosen}
    dropped: set[str] = set()
    if "policy" in chosen and chosen["policy"] != settings.get("policy", DEFAULT_POLICY):
        dropped.update(POLICY_KNOBS)
    if any(chosen.get(name) is not None for name in POOL_SIZES):
        dropped.update(POOL_SIZES)
    if chosen.get("speculation", settings.get("speculation")) != settings.get("speculation"):
        dropped.update(PROPOSER_KNOBS)
    if found.get("kv_disk_path") is None:
        dropped.add("kv_disk_gib")
    if not has_tiers(found):
        dropped.add("kv_store_policy")
    budget, chunk = chosen.get("max_num_batched_tokens"), settings.get("max_prefill_chunk_tokens")
    if isinstance(budget, int) and chunk is not None and "max_prefill_chunk_tokens" not in chosen:
        found["max_prefill_chunk_tokens"] = min(chunk, budget)
    return {name: value for name, value in found.items() if name in chosen or name not in dropped}


def _blocks(recorded: EngineConfig, chosen: Mapping[str, Any], kv_scale: float, meta: Mapping[str, Any]) -> int:
    """The blocks of the pool: those that were named, those that the server would choose, or as much memory."""
    block_size = chosen.get("block_size", recorded.block_size)
    bytes_per_token = section(meta, "model_shape").get("kv_bytes_per_token")
    if chosen.get("num_kv_blocks") is not None:
        blocks = chosen["num_kv_blocks"]
    elif chosen.get("kv_cache_gib") is not None:
        if not bytes_per_token:
            raise ReplayError(
                "run.json has no model_shape, so kv_cache_gib cannot be turned into blocks; give num_kv_blocks"
            )
        blocks = chosen["kv_cache_gib"] * GIB // (bytes_per_token * block_size)
    else:
        blocks = _default_blocks(recorded, chosen, block_size, bytes_per_token, meta)
    return max(1, round(blocks * kv_scale))


def _default_blocks(
    recorded: EngineConfig, chosen: Mapping[str, Any], block_size: int, bytes_per_token: int | None,
    meta: Mapping[str, Any],
) -> int:  # fmt: skip
    """Where nobody named a size, a server makes room for all sequences at their full length, within its memory."""
    length = section(section(meta, "engine"), "served").get("max_model_len")
    named = section(meta, "engine")
    was_named = named.get("num_kv_blocks") is not None or named.get("kv_cache_gib") is not None
    had = recorded.num_kv_blocks or 1
    same_memory = had * recorded.block_size // block_size
    if was_named or not length:
        return had if named.get("num_kv_blocks") is not None else same_memory
    if had != recorded.max_num_seqs * -(-length // recorded.block_size):
        return same_memory  # the memory was the limit
    blocks = chosen.get("max_num_seqs", recorded.max_num_seqs) * -(-length // block_size)
    memory = section(meta, "hardware").get("memory_bytes")
    on_cpu = section(meta, "core").get("device") == "cpu"
    if memory and bytes_per_token and on_cpu:
        blocks = min(blocks, max(int(memory * HOST_SHARE) // (bytes_per_token * block_size), same_memory))
    return blocks


def _config(settings: Mapping[str, Any]) -> EngineConfig:
    if settings.get("eviction_policy") == "ttl":
        raise ReplayError(
            "eviction_policy=ttl frees blocks by the server's clock, which a replay lacks; choose another policy"
        )
    try:
        return EngineConfig.model_validate(dict(settings) | {"telemetry": "off"})
    except ValidationError as error:
        raise ReplayError(complaint(error)) from None
