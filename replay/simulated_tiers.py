"""KV tiers in a replay: the engine's own books of the tiers, over stores whose reads and writes only take time.

The speeds are the bytes per second that the run measured. A tier that the run lacked has none, so it cannot be added.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from sojourn.engine.config import EngineConfig
from sojourn.engine.settings.tiers import DISK_GIB, STAGING_GIB, has_tiers
from sojourn.engine.techniques.tiers.block_format import HEADER
from sojourn.engine.techniques.tiers.index import TierIndex
from sojourn.engine.techniques.tiers.slow_tier import SlowTier
from sojourn.engine.techniques.tiers.store import Moved
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.engine.techniques.tiers.transfers import Transfers
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.memory.plan import GIB
from sojourn.replay.simulated_runner import VirtualClock


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Bytes per nanosecond."""

    load: float
    store: float


def tier_speeds(steps: pd.DataFrame) -> dict[str, TierSpeed]:
    """By tier, from the step records. A direction that never moved a block is as fast as the other one."""

    def summed(column: str) -> dict[str, float]:
        totals: dict[str, float] = {}
        for counts in steps.get(column, ()):
            for name, count in dict(counts if counts is not None else {}).items():
                totals[name] = totals.get(name, 0.0) + (count or 0)
        return totals

    moved = {
        "load": (summed("tier_loaded_bytes"), summed("tier_load_ns")),
        "store": (summed("tier_stored_bytes"), summed("tier_store_ns")),
    }
    found = {}
    for name in sorted({tier for nbytes, _ in moved.values() for tier in nbytes}):
        speeds = [
            nbytes[name] / took_ns[name] if nbytes.get(name) and took_ns.get(name) else None
            for nbytes, took_ns in moved.values()
        ]
        known = [speed for speed in speeds if speed is not None]
        if known:
            found[name] = TierSpeed(*(speed if speed is not None else known[0] for speed in speeds))
    return found


def warm_blocks(steps: pd.DataFrame) -> int:
    """Blocks that the disk held when the run began, from earlier servers."""
    first = steps.tier_blocks.iloc[0] if "tier_blocks" in steps and len(steps) else None
    return int(dict(first).get("disk") or 0) if first is not None else 0


def check_tiers(config: EngineConfig, speeds: Mapping[str, TierSpeed]) -> None:
    """Raises ReplayError for a tier of which the run has no speed, and for one that others write to."""
    if config.kv_remote_url is not None:
        raise ReplayError(
            "kv_remote_url names a cache server that others may fill, which a run does not record; leave it out, such "
            "as kv_remote_url=null"
        )
    for setting, name in (("kv_host_gib", "host"), ("kv_disk_path", "disk")):
        if getattr(config, setting) is not None and name not in speeds:
            raise ReplayError(
                f"{setting} adds a tier whose speed this run did not measure; record a short run with it, and replay "
                "that one"
            )


class TimedStore:
    """A slow tier without contents: each read and each write ends when its bytes have passed. One of each at a time."""

    name = "disk"

    def __init__(self, block_bytes: int, speed: TierSpeed, clock: VirtualClock) -> None:
        self.block_bytes = block_bytes
        self._clock = clock
        self._ns = {True: block_bytes / speed.load, False: block_bytes / speed.store}
        self._free_ns = {True: 0.0, False: 0.0}
        self._moving: dict[bool, deque[Moved]] = {True: deque(), False: deque()}  # reads, writes

    @property
    def next_read_ns(self) -> float:
        """When the first read ends."""
        reads = self._moving[True]
        return reads[0].ended_ns if reads else math.inf

    def known(self) -> list[bytes]:
        return []

    def read(self, key: bytes, slot: int) -> None:
        self._move(key, True)

    def write(self, key: bytes, slot: int) -> None:
        self._move(key, False)

    def remove(self, key: bytes) -> None:
        """Takes no time of a read or a write."""

    def finished(self) -> list[Moved]:
        ended = []
        for moving in self._moving.values():
            while moving and moving[0].ended_ns <= self._clock.now_ns:
                ended.append(moving.popleft())
        return ended

    def wait(self) -> None:
        """Nothing waits: a replay does not close its tiers."""

    def close(self) -> None:
        for moving in self._moving.values():
            moving.clear()

    def _move(self, key: bytes, is_read: bool) -> None:
        began_ns = max(self._clock.now_ns, self._free_ns[is_read])
        ended_ns = self._free_ns[is_read] = began_ns + self._ns[is_read]
        self._moving[is_read].append(Moved(key, is_read, True, self.block_bytes, round(began_ns), math.ceil(ended_ns)))


@dataclass(frozen=True, slots=True)
class SimulatedTiers:
    """The engine's books of the tiers over stores that only take time."""

    books: KVTiers
    stores: list[TimedStore]
    block_bytes: int
    host: TierSpeed

    @property
    def next_read_ns(self) -> float:
        """When the next block that a request may wait for is read, or a request stops to wait."""
        return min([self.books.waits.next_end_ns, *(store.next_read_ns for store in self.stores)])

    def copy_ns(self, transfers: Transfers) -> tuple[float, float]:
        """Of the copies to the device, and of those from it."""
        size, host = self.block_bytes, self.host
        return size * len(transfers.loads) / host.load, size * len(transfers.stores) / host.store


def simulated_tiers(
    config: EngineConfig, block_bytes: int | None, speeds: Mapping[str, TierSpeed], clock: VirtualClock
) -> SimulatedTiers | None:
    """None where the settings name no tier. `block_bytes` are of a block on the device. Raises ReplayError."""
    if not has_tiers(dict(config)):
        return None
    if not block_bytes:
        raise ReplayError("run.json has no model_shape, so the blocks of a KV tier have no size here")
    check_tiers(config, speeds)
    slots = _blocks(config.kv_host_gib or STAGING_GIB, block_bytes, "kv_host_gib")
    slow, stores = [], []
    if config.kv_disk_path is not None:
        store = TimedStore(block_bytes + HEADER.size, speeds["disk"], clock)
        stores.append(store)
        slow.append(SlowTier(store, _blocks(config.kv_disk_gib or DISK_GIB, store.block_bytes, "kv_disk_gib")))
    books = KVTiers(
        TierIndex("host", slots), slow, block_size=config.block_size, block_bytes=block_bytes,
        store_policy=config.kv_store_policy or "fill", clock=clock,
    )  # fmt: skip
    return SimulatedTiers(books, stores, block_bytes, speeds.get("host") or speeds["disk"])


def _blocks(gib: float, block_bytes: int, setting: str) -> int:
    if gib * GIB < block_bytes:
        raise ReplayError(f"{setting}={gib:g} holds no block of {block_bytes:,} bytes; raise it")
    return int(gib * GIB) // block_bytes
