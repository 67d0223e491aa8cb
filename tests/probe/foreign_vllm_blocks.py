"""vLLM's prefix cache as far as the probe touches it: blocks, references, a queue of free ones, hashes of chains."""

import hashlib
from collections import OrderedDict
from types import SimpleNamespace

from tests.probe import foreign_vllm

SIZE = 16


def chain_hashes(tokens: list[int]) -> list[bytes]:
    """32 bytes for each full block, of all tokens up to its end."""
    found, digest = [], b""
    for begin in range(0, len(tokens) - SIZE + 1, SIZE):
        digest = hashlib.sha256(digest + repr(tokens[begin : begin + SIZE]).encode()).digest()
        found.append(digest)
    return found


class Request(foreign_vllm.Request):
    def __init__(self, request_id: str, tokens: list[int], max_tokens: int, reads: bool = True):
        super().__init__(request_id, len(tokens), max_tokens)
        self.prompt_token_ids, self.all_token_ids = list(tokens), list(tokens)
        self.skip_reading_prefix_cache = not reads
        self.block_hashes = chain_hashes(tokens)

    def append(self, token: int) -> None:
        self.all_token_ids.append(token)
        self.block_hashes.extend(chain_hashes(self.all_token_ids)[len(self.block_hashes) :])


class BlockPool:
    """Counts what it does by itself: `told` is the truth that a record is compared with."""

    hash_block_size = SIZE

    def __init__(self, count: int, enable_caching: bool):
        self.enable_caching = enable_caching
        self.num_gpu_blocks = count + 1
        self.blocks = [SimpleNamespace(number=number, block_hash=None, references=0) for number in range(count)]
        self.free = OrderedDict((block.number, block) for block in self.blocks)
        self.cached_block_hash_to_block: dict[bytes, dict] = {}

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def found(self, block_hash: bytes):
        return next(iter(self.cached_block_hash_to_block.get(block_hash + bytes(4), {}).values()), None)

    def touch(self, block) -> None:
        self.free.pop(block.number, None)
        block.references += 1

    def take(self, count: int) -> list:
        taken = [self.free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            if self.enable_caching:
                self._maybe_evict_cached_block(block)
            block.references = 1
        return taken

    def _maybe_evict_cached_block(self, block) -> bool:
        if block.block_hash is None:
            return False
        copies = self.cached_block_hash_to_block[block.block_hash]
        del copies[block.number]
        if not copies:
            del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None
        return True

    def cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id,
                          block_mask=None):  # fmt: skip
        hashes = request.block_hashes
        for place in range(num_cached_blocks, num_full_blocks):
            blocks[place].block_hash = key = hashes[place] + bytes(4)
            self.cached_block_hash_to_block.setdefault(key, {})[blocks[place].number] = blocks[place]

    def give_back(self, blocks: list) -> None:
        for block in reversed(blocks):
            block.references -= 1
            if not block.references:
                self.free[block.number] = block
                if block.block_hash is None:
                    self.free.move_to_end(block.number, last=False)

    def reset_prefix_cache(self) -> bool:
        if len(self.free) < len(self.blocks):
            return False
        self.cached_block_hash_to_block.clear()
        for block in self.blocks:
            block.block_hash = None
        return True


class KVCacheManager:
    def __init__(self, count: int, enable_caching: bool):
        self.block_pool = BlockPool(count, enable_caching)
        self.held: dict[str, list] = {}
        self.cached: dict[str, int] = {}
        self.lookups: list[tuple[str, int]] = []  # that got blocks: request, tokens found

    def get_computed_blocks(self, request) -> list:
        found = []
        if self.block_pool.enable_caching and not request.skip_reading_prefix_cache:
            for block_hash in request.block_hashes[: (len(request.all_token_ids) - 1) // SIZE]:
                if (block := self.block_pool.found(block_hash)) is None:
                    break
                found.append(block)
        return found

    def allocate_slots(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=()):
        pool, name = self.block_pool, request.request_id
        held = self.held.get(name, [])
        computed = request.num_computed_tokens + num_new_computed_tokens
        need = -(-(computed + num_new_tokens) // SIZE) - len(held) - len(new_computed_blocks)
        if need > pool.get_num_free_blocks() - sum(block.number in pool.free for block in new_computed_blocks):
            return None
        if name not in self.held:
            self.lookups.append((name, num_new_computed_tokens))
        for block in new_computed_blocks:
            pool.touch(block)
        held = self.held[name] = [*held, *new_computed_blocks, *pool.take(max(need, 0))]
        full = min(computed + num_new_tokens, len(request.all_token_ids)) // SIZE
        begin = max(self.cached.get(name, 0), len(new_computed_blocks))
        if full > begin and pool.enable_caching:
            pool.cache_full_blocks(
                request=request, blocks=held, num_cached_blocks=begin, num_full_blocks=full, block_size=SIZE,
                kv_cache_group_id=0,
            )  # fmt: skip
        self.cached[name] = max(begin, full)
        return held

    def release(self, request) -> None:
        self.block_pool.give_back(self.held.pop(request.request_id, []))
        self.cached.pop(request.request_id, None)


class Scheduler(foreign_vllm.Scheduler):
    """Looks prompts up when it admits them; what they found is computed already."""

    def __init__(self, vllm_config, **_):
        super().__init__(vllm_config)
        cache = vllm_config.cache_config
        self.kv_cache_manager = KVCacheManager(cache.num_gpu_blocks, cache.enable_prefix_caching)

    def schedule(self, throttle_prefills=False):
        allocate = self.kv_cache_manager.allocate_slots
        found: dict[str, int] = {}

        def looking_up(request, num_new_tokens):
            if request.request_id in self.kv_cache_manager.held:
                return allocate(request, num_new_tokens)
            blocks = self.kv_cache_manager.get_computed_blocks(request)
            hits = len(blocks) * SIZE
            needed = min(num_new_tokens, len(request.all_token_ids) - hits)
            got = allocate(request, needed, hits, blocks)
            if got is not None:
                request.num_computed_tokens = found[request.request_id] = hits
            return got

        self.kv_cache_manager.allocate_slots = looking_up
        try:
            return self._cut(super().schedule(throttle_prefills))
        finally:
            self.kv_cache_manager.allocate_slots = allocate

    def _cut(self, plan):
        """The plan asked for the whole prompt: what was found is not computed again."""
        for name, count in plan.num_scheduled_tokens.items():
            request = self.requests[name]
            beyond = request.num_computed_tokens - len(request.all_token_ids)
            if beyond > 0:
                request.num_computed_tokens -= beyond
                plan.num_scheduled_tokens[name] = count - beyond
        plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens.values())
        return plan

    def update_from_output(self, scheduler_output, model_runner_output):
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is not None and request.num_computed_tokens >= request.num_prompt_tokens + request.given:
                request.append(1000 + len(request.all_token_ids) * 7919 % 50_000)
        return super().update_from_output(scheduler_output, model_runner_output)


class AsyncScheduler(Scheduler):
    pass
