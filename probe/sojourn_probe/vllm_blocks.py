"""Records which blocks of KV each request asked for, made known and displaced, by vLLM's own hashes of them.

vLLM hashes the full blocks of a request, each with all before it. 64 bits of a hash name a block here. Where its cache
is off, it hashes none; keyed hashes of the probe then stand for them. Marks say where within a block two sequences part
(`token_marks`). Hashes and marks are made in the writing thread.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from sojourn_probe.records import KvAllocated, KvAsked, KvMarks, KvRemoved, Record
from sojourn_probe.signatures import misfit
from sojourn_probe.token_marks import TokenMarks
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
        self._caches = bool(pool.enable_caching)
        self._hash_size = pool.hash_block_size if self._caches else block_size  # tokens
        self._size = max(block_size, self._hash_size)
        self._marks = TokenMarks(self._size)
        self._sequences: dict[str, BlockSequence] = {}
        self.without_blocks: set[str] = set()  # requests that never got any
        self.allocating: str | None = None  # the request of the allocation that is under way
        self.removed: list[bytes] = []  # in it
        self.stored: list[bytes] = []
        self._begin = 0  # place of the first of these
        self._is_off = False
        if self._caches:
            pool.cache_full_blocks = self._storing(pool.cache_full_blocks)
            pool._maybe_evict_cached_block = self._removing(pool._maybe_evict_cached_block)
            pool.reset_prefix_cache = self._resetting(pool.reset_prefix_cache)

    @staticmethod
    def misfits(scheduler: Any) -> str | None:
        """Why blocks cannot be followed in this version, as a sentence; None where they can."""
        pool = _pool(scheduler)
        if pool is None or not isinstance(getattr(pool, "enable_caching", None), bool):
            faults = ["the scheduler shows no block pool that says whether it caches"]
        elif not pool.enable_caching:
            faults = []
        else:
            faults = [fault for name, names in HOOKED.items() if (fault := misfit(pool, name, names))]
            if not isinstance(getattr(pool, "hash_block_size", None), int):
                faults.append("the block pool has no hash_block_size")
        return f"which blocks were cached, missed and evicted is not seen: {'; '.join(faults)}" if faults else None

    @classmethod
    def of(cls, writer: Writer, scheduler: Any, handles: dict[str, int]) -> "BlockProbe | None":
        size = scheduler.vllm_config.cache_config.block_size
        if cls.misfits(scheduler) or not isinstance(size, int):
            return None
        return cls(writer, _pool(scheduler), handles, size)

    def arrived(self, request: Any) -> None:
        name = request.request_id
        if self._is_off or name in self._sequences:
            return
        step = self._size // self._hash_size
        sequence = BlockSequence(self._handles[name], self._size, step, request, caches=self._caches)
        self._sequences[name] = sequence
        self.without_blocks.add(name)
        self._writer.put(partial(sequence.asked, self._marks))

    def allocated(self, name: str, has_blocks: bool) -> None:
        """An allocation is over in which blocks were removed or stored, or which was the first of a request."""
        removed, stored = self.removed, self.stored
        self.removed, self.stored = [], []
        is_first = has_blocks and name in self.without_blocks
        if is_first:
            self.without_blocks.discard(name)
        if not self._caches:
            if is_first:
                self._writer.put(partial(self._sequences[name].computed, clock()))
        elif is_first or removed or stored:
            self._writer.put(partial(_allocated, clock(), self._handles.get(name, 0), removed, self._begin, stored))

    def ended(self, name: str) -> None:
        sequence = self._sequences.pop(name, None)
        if sequence is None:
            return
        if name in self.without_blocks:
            self.without_blocks.discard(name)
        elif not self._is_off:
            self._writer.put(partial(sequence.ended, self._marks, clock(), sequence.num_computed_tokens))

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
        if self.allocating == request.request_id:
            self._begin = begin if not self.stored else self._begin
            self.stored += stored
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
        if self.allocating is not None:
            self.removed.append(key[:-GROUP_BYTES])
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


class BlockSequence:
    """One request of the engine. Its methods run in the writing thread, and read lists that the server only extends."""

    def __init__(self, handle: int, size: int, step: int, request: Any, *, caches: bool):
        self._request, self._handle, self._size, self._step = request, handle, size, step
        self._prompt_tokens = request.num_prompt_tokens
        self._reads = caches and not getattr(request, "skip_reading_prefix_cache", False)
        self._hashes: list[bytes] | None = request.block_hashes if caches else None  # None: of the probe's own
        self._num_hashes = len(self._hashes) if self._hashes is not None else 0  # of the prompt
        adapter = getattr(getattr(request, "lora_request", None), "lora_name", None)
        self._salt = f"{adapter or ''}\0{getattr(request, 'cache_salt', None) or ''}".encode()
        # Tokens alone do not say what images and embeddings are.
        is_text = not getattr(request, "mm_features", None) and getattr(request, "prompt_embeds", None) is None
        self._prompt: Sequence[int] | None = request.prompt_token_ids if is_text else None
        self._all: Sequence[int] | None = getattr(request, "all_token_ids", None) if is_text else None
        self._own: list[bytes] = []

    @property
    def num_computed_tokens(self) -> int:
        """Planned ones, those of a step under way included."""
        return getattr(self._request, "num_computed_tokens", 0)

    def asked(self, marks: TokenMarks) -> list[Record]:
        if self._hashes is not None:
            hashes = self._hashes[self._step - 1 : self._num_hashes : self._step]
        elif self._prompt is not None:
            hashes = self._own = marks.block_hashes(self._salt, self._prompt)
        else:
            return []
        found: list[Record] = [KvAsked(self._handle, self._prompt_tokens, self._size, self._reads, _shorts(hashes))]
        return found + self._marked(marks, hashes, self._prompt, 0, is_end=False)

    def computed(self, ns: int) -> list[Record]:
        """Its prompt, of a server without a cache."""
        return [KvAllocated(ns, self._handle, [], 0, _shorts(self._own))]

    def ended(self, marks: TokenMarks, ns: int, computed: int) -> list[Record]:
        """What it computed besides the prompt; its last token was never computed."""
        if self._all is None or self._prompt is None:
            return []
        tokens = list(self._all)[:-1][:computed]
        begin = min(len(self._prompt), len(tokens)) // self._size
        if self._hashes is not None:
            hashes, stored = list(self._hashes[self._step - 1 :: self._step]), []
        else:
            hashes = marks.block_hashes(self._salt, tokens)
            stored = [KvAllocated(ns, self._handle, [], begin, _shorts(hashes[begin:]))] if hashes[begin:] else []
        hashes = hashes[: len(tokens) // self._size]
        return [*stored, *self._marked(marks, hashes, tokens, begin * self._size, is_end=True)]

    def _marked(
        self, marks: TokenMarks, hashes: list[bytes], tokens: Sequence[int] | None, begin: int, *, is_end: bool
    ) -> list[Record]:
        if tokens is None:
            return []
        first, found = marks.marks(self._salt, hashes, tokens, begin)
        return [KvMarks(self._handle, first, found, is_end)] if found or is_end else []


def _pool(scheduler: Any) -> Any:
    return getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)


def short(block_hash: bytes | int) -> int:
    """64 bits of a block's hash, signed: the last ones, which are those of vLLM's KV events."""
    value = int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash & (2**64 - 1)
    return value - 2**64 if value >= 2**63 else value


def _shorts(hashes: Iterable[bytes | int]) -> list[int]:
    return [short(each) for each in hashes]


def _allocated(ns: int, handle: int, removed: list[bytes], begin: int, stored: list[bytes]) -> list[Record]:
    return [KvAllocated(ns, handle, _shorts(removed), begin, _shorts(stored))]


def _given_up(ns: int, hashes: list[bytes]) -> list[Record]:
    return [KvRemoved(ns, _shorts(hashes))]
