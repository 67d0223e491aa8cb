"""Records which blocks of KV each request asked for, made known and displaced, by vLLM's own hashes of them.

vLLM hashes the full blocks of a request, each with all before it. 64 bits of a hash name a block here. No token is
read. Hashes become numbers in the writing thread.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from sojourn_probe.records import KvAllocated, KvAsked, KvRemoved
from sojourn_probe.signatures import misfit
from sojourn_probe.writer import Writer

log = logging.getLogger("sojourn_probe")
clock = time.monotonic_ns
HOOKED = {
    "cache_full_blocks": ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size",
                          "kv_cache_group_id"),
    "_maybe_evict_cached_block": ("block",),
    "reset_prefix_cache": (),
}  # fmt: skip
GROUP_BYTES = 4  # behind a block's hash: the number of its KV cache group
FIRST_GROUP = bytes(GROUP_BYTES)


class BlockProbe:
    """Hooks of a block pool, and what happens within one call of `allocate_slots`."""

    def __init__(self, writer: Writer, pool: Any, handles: dict[str, int], block_size: int):
        self._writer, self._handles = writer, handles
        self._hash_size = pool.hash_block_size  # tokens
        self._size = max(block_size, self._hash_size)
        self._asked: dict[str, bool] = {}  # request → whether it has got blocks
        self._allocating: str | None = None
        self._removed: list[bytes] = []  # in this allocation
        self._stored: list[bytes] = []
        self._begin = 0  # place of the first of these
        self._is_off = False
        pool.cache_full_blocks = self._storing(pool.cache_full_blocks)
        pool._maybe_evict_cached_block = self._removing(pool._maybe_evict_cached_block)
        pool.reset_prefix_cache = self._resetting(pool.reset_prefix_cache)

    @staticmethod
    def misfits(scheduler: Any) -> str | None:
        """Why blocks cannot be followed in this version, as a sentence; None where they can, or nothing is cached."""
        pool = _pool(scheduler)
        if pool is None:
            return None
        faults = [fault for name, names in HOOKED.items() if (fault := misfit(pool, name, names))]
        if not isinstance(getattr(pool, "hash_block_size", None), int):
            faults.append("the block pool has no hash_block_size")
        return f"which blocks were cached, missed and evicted is not seen: {'; '.join(faults)}" if faults else None

    @classmethod
    def of(cls, writer: Writer, scheduler: Any, handles: dict[str, int]) -> "BlockProbe | None":
        pool = _pool(scheduler)
        if pool is None or cls.misfits(scheduler):
            return None
        size = scheduler.vllm_config.cache_config.block_size
        return cls(writer, pool, handles, size if isinstance(size, int) else pool.hash_block_size)

    def arrived(self, request: Any) -> None:
        """Blocks of its prompt that a cache could have."""
        hashes = getattr(request, "block_hashes", None)
        if self._is_off or not hashes:
            return
        name = request.request_id
        self._asked[name] = False
        reads = not getattr(request, "skip_reading_prefix_cache", False)
        self._writer.put(partial(_asked, self._handles[name], self._size, reads, self._of_prompt(hashes)))

    def begin(self, name: str) -> None:
        self._allocating, self._removed, self._stored = name, [], []

    def end(self, has_blocks: bool) -> None:
        """The allocation is over."""
        name, self._allocating = self._allocating, None
        if name is None or self._is_off:
            return
        is_first = has_blocks and self._asked.get(name) is False
        if is_first:
            self._asked[name] = True
        if is_first or self._removed or self._stored:
            self._writer.put(
                partial(_allocated, clock(), self._handles.get(name, 0), self._removed, self._begin, self._stored)
            )

    def ended(self, name: str) -> None:
        self._asked.pop(name, None)

    def _of_prompt(self, hashes: list[bytes]) -> list[bytes]:
        """Of each block the hash of all tokens up to its end. Groups may have blocks of several hashes."""
        step = self._size // self._hash_size
        return hashes[step - 1 :: step]

    def _storing(self, cache: Callable[..., Any]) -> Callable[..., Any]:
        def cache_full_blocks(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, block_size: int,
            kv_cache_group_id: int, *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            result = cache(
                request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, *args, **kwargs
            )
            if kv_cache_group_id == 0 and num_cached_blocks < num_full_blocks and not self._is_off:
                self._watch(self._store, request, num_cached_blocks, num_full_blocks, block_size)
            return result

        return cache_full_blocks

    def _store(self, request: Any, begin: int, end: int, size: int) -> None:
        step = size // self._hash_size
        stored = request.block_hashes[(begin + 1) * step - 1 : end * step : step]
        if self._allocating == request.request_id:
            self._begin = begin if not self._stored else self._begin
            self._stored += stored
        else:
            handle = self._handles.get(request.request_id, 0)
            self._writer.put(partial(_allocated, clock(), handle, [], begin, stored))

    def _removing(self, evict: Callable[..., bool]) -> Callable[..., bool]:
        def maybe_evict_cached_block(block: Any) -> bool:
            key = block.block_hash
            result = evict(block)
            if result and key is not None and not self._is_off:
                self._watch(self._remove, key)
            return result

        return maybe_evict_cached_block

    def _remove(self, key: bytes) -> None:
        if key[-GROUP_BYTES:] != FIRST_GROUP:
            return
        if self._allocating is not None:
            self._removed.append(key[:-GROUP_BYTES])
        else:
            self._writer.put(partial(_given_up, clock(), [key[:-GROUP_BYTES]]))

    def _resetting(self, reset: Callable[..., bool]) -> Callable[..., bool]:
        def reset_prefix_cache(*args: Any, **kwargs: Any) -> bool:
            result = reset(*args, **kwargs)
            if result:
                self._writer.put(KvRemoved(clock(), None))
            return result

        return reset_prefix_cache

    def _watch(self, record: Callable[..., None], *args: Any) -> None:
        """A fault of the probe is the end of this record, not of the server."""
        try:
            record(*args)
        except Exception as error:
            self._is_off = True
            log.warning("sojourn-probe no longer records blocks after a fault of its own: %r", error)


def _pool(scheduler: Any) -> Any:
    """The pool of a scheduler that caches prefixes; None of another."""
    pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    return pool if getattr(pool, "enable_caching", False) else None


def short(block_hash: bytes | int) -> int:
    """64 bits of a block's hash, signed: the last ones, which are those of vLLM's KV events."""
    value = int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash & (2**64 - 1)
    return value - 2**64 if value >= 2**63 else value


def _shorts(hashes: Iterable[bytes | int]) -> list[int]:
    return [short(each) for each in hashes]


def _asked(handle: int, size: int, reads: bool, hashes: list[bytes]) -> KvAsked:
    return KvAsked(handle, size, reads, _shorts(hashes))


def _allocated(ns: int, handle: int, removed: list[bytes], begin: int, stored: list[bytes]) -> KvAllocated:
    return KvAllocated(ns, handle, _shorts(removed), begin, _shorts(stored))


def _given_up(ns: int, hashes: list[bytes]) -> KvRemoved:
    return KvRemoved(ns, _shorts(hashes))
