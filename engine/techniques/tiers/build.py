"""Builds the KV tiers that the settings ask for, around a runner."""

import json
from pathlib import Path

import torch

from sojourn.engine.compute.kv_cache import parts
from sojourn.engine.config import EngineConfig
from sojourn.engine.process import free_memory_bytes
from sojourn.engine.runner.checkpoint_files import files_digest
from sojourn.engine.runner.runner import ModelRunner
from sojourn.engine.techniques.handover.build import KVExchange
from sojourn.engine.techniques.handover.handoffs import Handoffs
from sojourn.engine.techniques.handover.settings import gives, takes
from sojourn.engine.techniques.tiers.block_format import BlockFormat
from sojourn.engine.techniques.tiers.computing import host_tier_bytes, num_blocks
from sojourn.engine.techniques.tiers.disk import Disk
from sojourn.engine.techniques.tiers.host_slots import HostSlots, slot_sizes
from sojourn.engine.techniques.tiers.index import TierIndex
from sojourn.engine.techniques.tiers.medium_store import MediumQuestions, MediumStore
from sojourn.engine.techniques.tiers.remote import Remote
from sojourn.engine.techniques.tiers.settings import DISK_GIB, has_tiers, stores_on
from sojourn.engine.techniques.tiers.slow_tier import SlowTier
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.metrics.errors import ModelError
from sojourn.metrics.memory.plan import GIB, shown_bytes

REMEMBERED_KEYS = 1 << 18  # of a remote tier, which is asked for others


def make_tiers(config: EngineConfig, runner: ModelRunner, folder: Path) -> tuple[KVTiers | None, Handoffs | None]:
    """The tiers, the runner's slots of host memory, and what is handed over to decode servers; None where the settings
    ask for none.

    Raises ModelError with a sentence where memory, the disk or a port does not allow it.
    """
    settings = dict(config)
    if not has_tiers(settings):
        return None, None
    block_bytes = sum(slot_sizes(parts(runner.eager.kv_cache)))
    host_bytes = host_tier_bytes(config)
    if runner.placed.device.type == "cuda" and host_bytes > free_memory_bytes():
        raise ModelError(
            f"kv_host_gib needs {shown_bytes(host_bytes)} of host memory, and {shown_bytes(free_memory_bytes())} are "
            "free; lower it"
        )
    host = runner.part("tiers")
    num_slots = num_blocks("kv_host_gib", host_bytes, block_bytes) if host.slots is None else host.slots.num_slots
    fingerprint = model_fingerprint(config, runner, folder)
    exchange = None if config.kv_role is None else KVExchange(config, runner, num_slots, block_bytes, fingerprint)
    memory = None if exchange is None else exchange.segment.slots
    slots = host.slots = host.slots or HostSlots(runner.eager.kv_cache, num_slots, memory)
    slow = []
    form = BlockFormat(fingerprint, block_bytes)
    if config.kv_disk_path is not None:
        disk = Disk(config.kv_disk_path.expanduser(), form, slots.slot_bytes)
        capacity = num_blocks("kv_disk_gib", int((config.kv_disk_gib or DISK_GIB) * GIB), disk.block_bytes)
        slow.append(SlowTier(MediumStore(disk), capacity))
    if config.kv_remote_url is not None:
        remote = Remote(config.kv_remote_url, form, slots.slot_bytes)
        store = MediumStore(remote)
        slow.append(SlowTier(store, REMEMBERED_KEYS, MediumQuestions(store, remote.count_known)))
    tiers = KVTiers(
        TierIndex("host", num_slots), slow, block_size=config.block_size, block_bytes=block_bytes,
        store_policy=stores_on(settings), hands_over=gives(config.kv_role),
        peer=exchange.peers(slots) if exchange is not None and takes(config.kv_role) else None,
    )  # fmt: skip
    return tiers, exchange.handoffs(tiers, slots) if exchange is not None and gives(config.kv_role) else None


def model_fingerprint(config: EngineConfig, runner: ModelRunner, folder: Path) -> bytes:
    """16 bytes that differ wherever the same tokens could have other keys and values, or another layout."""
    cache = [(list(part.shape[:2]), list(part.shape[3:]), str(part.dtype)) for part in parts(runner.eager.kv_cache)]
    placed, eager = runner.placed, runner.eager
    said = [
        torch.__version__, placed.device.type, str(placed.dtype), str(placed.kv_dtype), config.weights,
        config.load_format, placed.max_model_len, config.block_size, type(eager.attention).__name__,
        type(eager.operations).__name__, cache,
    ]  # fmt: skip
    return files_digest(folder, is_dummy=config.load_format == "dummy", said=json.dumps(said).encode())
