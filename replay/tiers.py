"""KV tiers in a replay: the engine's own books of the tiers, over stores whose reads and writes only take time.

The speeds are the bytes per second that the run measured. A tier that the run lacked has none, so it cannot be added.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.request import Request, State
from sojourn.engine.request.scheduler import Scheduler
from sojourn.engine.techniques.tiers.block_format import HEADER
from sojourn.engine.techniques.tiers.index import TierIndex
from sojourn.engine.techniques.tiers.settings import DISK_GIB, STAGING_GIB, has_tiers
from sojourn.engine.techniques.tiers.slow_tier import SlowTier
from sojourn.engine.techniques.tiers.store import Moved
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.engine.techniques.tiers.transfers import Prefetch, Transfers
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.memory.plan import GIB


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

    def __init__(self, block_bytes: int, speed: TierSpeed) -> None:
        self.block_bytes = block_bytes
        self.now_ns = 0.0
        self._ns = {True: block_bytes / speed.load, False: block_bytes / speed.store}
        self._free_ns = {True: 0.0, False: 0.0}
        self._moving: dict[bool, deque[Moved]] = {True: deque(), False: deque()}  # reads, writes

    @property
    def next_end_ns(self) -> float:
        """Of the read that ends first."""
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
            while moving and moving[0].ended_ns <= self.now_ns:
                ended.append(moving.popleft())
        return ended

    def wait(self) -> None:
        """Nothing waits: a replay does not close its tiers."""

    def close(self) -> None:
        for moving in self._moving.values():
            moving.clear()

    def _move(self, key: bytes, is_read: bool) -> None:
        began_ns = max(self.now_ns, self._free_ns[is_read])
        ended_ns = self._free_ns[is_read] = began_ns + self._ns[is_read]
        self._moving[is_read].append(Moved(key, is_read, True, self.block_bytes, round(began_ns), math.ceil(ended_ns)))


class ReplayedTiers:
    """The tiers of one replica, as the loop uses them: requests that wait for reads, and copies of a step."""

    def __init__(self, config: EngineConfig, block_bytes: int, speeds: Mapping[str, TierSpeed]) -> None:
        slots = _blocks(config.kv_host_gib or STAGING_GIB, block_bytes, "kv_host_gib")
        slow, self._stores = [], []
        if config.kv_disk_path is not None:
            store = TimedStore(block_bytes + HEADER.size, speeds["disk"])
            capacity = _blocks(config.kv_disk_gib or DISK_GIB, store.block_bytes, "kv_disk_gib")
            self._stores.append(store)
            slow.append(SlowTier(store, capacity))
        self.books = KVTiers(
            TierIndex("host", slots), slow, block_size=config.block_size, block_bytes=block_bytes,
            store_policy=config.kv_store_policy or "fill", clock=lambda: math.ceil(self._now_ns),
        )  # fmt: skip
        self._now_ns = 0.0
        self._block_bytes, self._host = block_bytes, speeds.get("host") or speeds["disk"]
        self._waiting: list[tuple[Request, Prefetch]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def next_end_ns(self) -> float:
        """When the next block that somebody may wait for is read, or somebody stops to wait."""
        if not self._waiting:
            return math.inf
        return min(self.books.waits.next_end_ns, *(store.next_end_ns for store in self._stores))

    def receive(self, scheduler: Scheduler, arrived: Sequence[Request], now_ns: float) -> list[Request]:
        """Those that may be scheduled: of the arrived ones, and of those that waited for reads."""
        self._now_ns = now_ns
        for store in self._stores:
            store.now_ns = now_ns
        self.books.poll()
        ready = [request for request, prefetch in self._waiting if prefetch.is_done]
        self._waiting = [each for each in self._waiting if not each[1].is_done]
        for request in arrived:
            prefetch = scheduler.technique("tiers").arrived(request, None)
            if prefetch is None or prefetch.is_done:
                ready.append(request)
            else:
                self._waiting.append((request, prefetch))
        return ready

    def abort(self, request_id: str) -> Request | None:
        """A request that waited for reads; None: it did not."""
        for place, (request, _) in enumerate(self._waiting):
            if request.id == request_id:
                del self._waiting[place]
                request.state = State.FINISHED
                self.books.release(request)
                return request
        return None

    def transfer_ns(self, transfers: Transfers | None) -> tuple[float, float]:
        """Of the copies to the device, and of those from it."""
        if transfers is None:
            return 0.0, 0.0
        size, speed = self._block_bytes, self._host
        return size * len(transfers.loads) / speed.load, size * len(transfers.stores) / speed.store

    def flush(self) -> None:
        """Copies that wait for no step, where no step follows."""
        self.books.poll()
        if (transfers := self.books.take_transfers()) is not None:
            self.books.transferred(transfers, *map(round, self.transfer_ns(transfers)))

    def collected(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """As `Engine` books them."""
        if (transfers := plan.parts.get("tiers")) is not None:
            self.books.transferred(transfers, outcome.load_ns, outcome.store_ns)
        if plan.has_prompts:
            prompt_tokens = sum(item.new_tokens for item in plan.scheduled if item.is_prompt)
            compute_ns = outcome.device_ns - outcome.sampling_ns - outcome.load_ns - outcome.store_ns
            self.books.computed(prompt_tokens, compute_ns)


def replayed_tiers(
    config: EngineConfig, block_bytes: int | None, speeds: Mapping[str, TierSpeed]
) -> ReplayedTiers | None:
    """None where the settings name no tier. `block_bytes` are of a block on the device. Raises ReplayError."""
    if not has_tiers(dict(config)):
        return None
    if not block_bytes:
        raise ReplayError("run.json has no model_shape, so the blocks of a KV tier have no size here")
    check_tiers(config, speeds)
    return ReplayedTiers(config, block_bytes, speeds)


def _blocks(gib: float, block_bytes: int, setting: str) -> int:
    if gib * GIB < block_bytes:
        raise ReplayError(f"{setting}={gib:g} holds no block of {block_bytes:,} bytes; raise it")
    return int(gib * GIB) // block_bytes
