"""Builds the KV tiers that the settings ask for, around a runner."""

import json
from typing import NamedTuple, Protocol

import torch

from sojourn.engine.compute.kv_cache import parts
from sojourn.engine.config import EngineConfig
from sojourn.engine.process import free_memory_bytes
from sojourn.engine.runner.checkpoint_files import files_digest
from sojourn.engine.runner.runner import ModelRunner
from sojourn.engine.settings.tiers import DISK_GIB, stores_on
from sojourn.engine.techniques.tiers.block_format import BlockFormat
from sojourn.engine.techniques.tiers.computing import host_tier_bytes, num_blocks
from sojourn.engine.techniques.tiers.disk import Disk
from sojourn.engine.techniques.tiers.host_slots import HostSlots, slot_sizes
from sojourn.engine.techniques.tiers.index import TierIndex
from sojourn.engine.techniques.tiers.medium_store import MediumQuestions, MediumStore
from sojourn.engine.techniques.tiers.remote import Remote
from sojourn.engine.techniques.tiers.slow_tier import PeerTier, SlowTier
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.metrics.errors import ModelError
from sojourn.metrics.memory.plan import GIB, shown_bytes

REMEMBERED_KEYS = 1 << 18  # of a remote tier, which is asked for others


class HostRoom(NamedTuple):
    """Slots of host memory, and what is in them."""

    num_slots: int
    block_bytes: int
    fingerprint: bytes


class Exchange(Protocol):
    """How other servers take part: they read the slots, or blocks come from theirs."""

    memory: memoryview | None  # of the slots, where other processes read it
    hands_over: bool

    def peer(self, slots: HostSlots) -> PeerTier | None:
        """The servers that blocks come from."""
        ...


class NoExchange:
    """One server alone."""

    memory, hands_over = None, False

    def peer(self, slots: HostSlots) -> None:
        return None


def host_room(config: EngineConfig, runner: ModelRunner) -> HostRoom:
    """Raises ModelError where memory does not allow it."""
    block_bytes = sum(slot_sizes(parts(runner.eager.kv_cache)))
    host_bytes = host_tier_bytes(config)
    if runner.placed.device.type == "cuda" and host_bytes > free_memory_bytes():
        raise ModelError(
            f"kv_host_gib needs {shown_bytes(host_bytes)} of host memory, and {shown_bytes(free_memory_bytes())} are "
            "free; lower it"
        )
    slots = runner.part("tiers").slots  # that the ranks of a group have agreed on
    num_slots = num_blocks("kv_host_gib", host_bytes, block_bytes) if slots is None else slots.num_slots
    return HostRoom(num_slots, block_bytes, model_fingerprint(config, runner))


def make_tiers(config: EngineConfig, runner: ModelRunner, exchange: Exchange | None = None) -> KVTiers:
    """The tiers, and the runner's slots of host memory.

    Raises ModelError with a sentence where memory, the disk or a port does not allow it.
    """
    exchange, room, host = exchange or NoExchange(), host_room(config, runner), runner.part("tiers")
    slots = host.slots = host.slots or HostSlots(runner.eager.kv_cache, room.num_slots, exchange.memory)
    slow = []
    form = BlockFormat(room.fingerprint, room.block_bytes)
    if config.kv_disk_path is not None:
        disk = Disk(config.kv_disk_path.expanduser(), form, slots.slot_bytes)
        capacity = num_blocks("kv_disk_gib", int((config.kv_disk_gib or DISK_GIB) * GIB), disk.block_bytes)
        slow.append(SlowTier(MediumStore(disk), capacity))
    if config.kv_remote_url is not None:
        remote = Remote(config.kv_remote_url, form, slots.slot_bytes)
        store = MediumStore(remote)
        slow.append(SlowTier(store, REMEMBERED_KEYS, MediumQuestions(store, remote.count_known)))
    return KVTiers(
        TierIndex("host", room.num_slots), slow, block_size=config.block_size, block_bytes=room.block_bytes,
        store_policy=stores_on(dict(config)), hands_over=exchange.hands_over, peer=exchange.peer(slots),
    )  # fmt: skip


def model_fingerprint(config: EngineConfig, runner: ModelRunner) -> bytes:
    """16 bytes that differ wherever the same tokens could have other keys and values, or another layout."""
    cache = [(list(part.shape[:2]), list(part.shape[3:]), str(part.dtype)) for part in parts(runner.eager.kv_cache)]
    placed, eager = runner.placed, runner.eager
    said = [
        torch.__version__, placed.device.type, str(placed.dtype), str(placed.kv_dtype), config.weights,
        config.load_format, placed.max_model_len, config.block_size, type(eager.attention).__name__,
        type(eager.operations).__name__, cache,
    ]  # fmt: skip
    return files_digest(placed.folder, is_dummy=config.load_format == "dummy", said=json.dumps(said).encode())
