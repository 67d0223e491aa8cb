"""The KV blocks that a request reads and writes: cached ones, its leader's, fresh ones. No order and no budget."""

from collections.abc import Sequence

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.lower_tiers import LowerTiers
from sojourn.engine.memory.observer import BlockObserver
from sojourn.engine.memory.window import HOLE
from sojourn.engine.request.plan import StepPlan
from sojourn.engine.request.request import Request


class KVBlockManager:
    """Allocates and frees the blocks of requests. A block that another request reads is copied before it is written.

    A fork has its leader's prompt from the moment it is computed. If it still waits when memory runs short, it is the
    first to lose it, and computes the prompt itself.
    """

    def __init__(self, pool: BlockPool, observer: BlockObserver, tiers: LowerTiers):
        self.pool = pool
        self.observer = observer
        self._waiting_forks: dict[int, Request] = {}  # arrival index → a waiting request that has blocks
        self._evicted: list[bytes] = []  # keys, for the observer
        self._tiers = tiers
        if observer.wants_evictions or tiers.wants_evictions:
            pool.on_evict = self._on_evict

    def allocate(self, request: Request, reserve: int, plan: StepPlan) -> bool:
        """Blocks for all tokens of a waiting request, if `reserve` others stay available; else no change."""
        assert not request.num_unread_tokens, "all tokens of an admitted request are known"
        has_blocks = request.arrival_index in self._waiting_forks
        loaded: list[bytes] = []
        if not has_blocks:
            self._reuse(request)
            loaded = self._tiers.found(request, len(request.blocks))
        if not self._extend(request, self._admitted_tokens(request), plan, reserve):
            if not has_blocks:
                self.observer.on_lookup_failed(request)
                self._clear(request)
            elif reserve == 0:  # nothing runs: its own blocks are in the way, which it may not write to
                self.free(request)
                return self.allocate(request, reserve, plan)
            return False
        self._waiting_forks.pop(request.arrival_index, None)
        self.pool.used(request.blocks[: request.published_blocks])
        if not has_blocks:
            self._load(request, loaded)
        found = request.num_computed_tokens
        if found > request.computed_high_water:  # also after a preemption: others may have computed more of its prompt
            request.counts.cached_tokens += found - request.computed_high_water
            request.computed_high_water = found
        self.observer.on_admit(request, request.num_tokens, request.counts.preemptions == 0)
        if loaded:
            self.observer.on_fill(request, request.published_blocks)
        return True

    def would_fit(self, request: Request, reserve: int, victims: Sequence[Request]) -> bool:
        """Whether `allocate` would work without the running requests `victims`."""
        read = request.blocks or self.pool.match(request.reusable_hashes(self.pool.block_size))
        available = self.pool.available_without([other.blocks for other in victims], read)
        tokens = self._admitted_tokens(request, len(read) * self.pool.block_size)
        return self.pool.blocks_for(tokens) - len(read) + bool(request.blocks) + reserve <= available

    def _admitted_tokens(self, request: Request, cached: int = 0) -> int:
        """Tokens for which a request gets blocks when it is admitted."""
        window = self.pool.window
        if window is None:
            return request.num_tokens
        return window.admitted_tokens(max(request.num_computed_tokens, cached), request.num_tokens)

    def leave_window(self, request: Request) -> None:
        """Gives back the blocks that no later position of the request reads. One that is findable stays cached.

        A step under way may still read them: their new contents are written by a later step.
        """
        pool = self.pool
        begin, end = pool.window.hole(request.num_committed_tokens, pool.block_size)
        first = max(begin, request.hole_end)
        if end <= first:
            return
        self.observer.on_leave_window(request, first, end)
        for index in range(first, end):
            pool.release(request.blocks[index : index + 1], pool.block_size)
            request.blocks[index] = HOLE
        request.hole_end = end

    def extend(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Room to write the positions that are not computed yet, up to `num_tokens`; False (and no change) if none."""
        fits = self._extend(request, num_tokens, plan, 0)
        if fits:
            self.observer.on_grow(request)
        return fits

    def extend_for_drafts(self, request: Request, num_tokens: int, reserve: int, plan: StepPlan) -> bool:
        """`extend`, where that leaves `reserve` blocks and takes none from a fork that waits."""
        lacking = self.pool.blocks_for(num_tokens) - len(request.blocks) + request.forked
        if lacking > 0 and lacking + reserve > self.pool.available:
            return False
        return self.extend(request, num_tokens, plan)

    def _extend(self, request: Request, num_tokens: int, plan: StepPlan, reserve: int) -> bool:
        pool, blocks = self.pool, request.blocks
        lacking = max(0, pool.blocks_for(num_tokens) - len(blocks))
        if lacking + reserve == 0 and not request.forked:
            return True
        tail = request.num_computed_tokens // pool.block_size  # only the first block that is written can be shared
        forks: list[Request] | None = None
        while True:
            copied = request.forked and tail < len(blocks) and not pool.writable(blocks[tail])
            missing = lacking + copied
            if missing + reserve <= pool.available:
                break
            if forks is None:
                forks = self._reclaimable(request, lacking + reserve)
            if not forks:
                return False
            self.free(forks.pop())
        request.forked = False
        self._evicted.clear()  # those that had expired
        fresh = pool.allocate(missing)
        if self._evicted and self.observer.wants_evictions:
            self.observer.on_evict(request, self._evicted.copy())
        if copied:
            plan.copies.append((blocks[tail], fresh[-1]))
            written = max(0, request.num_committed_tokens - tail * pool.block_size)
            pool.release(blocks[tail : tail + 1], written)
            pool.wrote(written)
            self.observer.on_copy(request, tail)
            blocks[tail] = fresh.pop()
            request.first_changed_block = min(request.first_changed_block, tail)
        blocks += fresh
        return True

    def fork(self, request: Request, leader: Request) -> None:
        """A waiting request reads its leader's blocks. It computes its last prompt token itself, for the logits."""
        shared = request.prompt_tokens - 1
        blocks = leader.blocks[: self.pool.blocks_for(shared)]
        window = self.pool.window
        # The leader may have left behind what this prompt's last position reads.
        is_held = window is None or leader.hole_end <= window.hole(shared, self.pool.block_size)[1]
        if blocks and is_held:
            self.pool.take_from(blocks, shared)
            request.blocks = blocks
            request.hole_end = leader.hole_end
            request.num_computed_tokens = request.num_committed_tokens = shared
            request.published_blocks = shared // self.pool.block_size
            request.share_hashes(leader, self.pool.block_size, request.published_blocks)
            request.prompt_logprobs = list(leader.prompt_logprobs)
            request.forked = leader.forked = True
            self._waiting_forks[request.arrival_index] = request
            self.observer.on_share(request, leader, len(blocks))

    def publish(self, request: Request) -> None:
        """Makes newly filled blocks findable by their prefix. A cached block of the same tokens replaces a filled one.

        A step under way may still read a block that is freed here: its new contents are written by a later step, and
        the device works in order.
        """
        size = self.pool.block_size
        full = request.num_committed_tokens // size
        if full == request.published_blocks:
            return
        hashes, events = request.block_hashes(size, full), self.pool.events
        for index in range(request.published_blocks, full):
            parent = hashes[index - 1] if index else None
            block = self.pool.publish(request.blocks[index], hashes[index], parent)
            self._tiers.filled(hashes[index], block)
            if block != request.blocks[index]:
                request.blocks[index] = block
                request.first_changed_block = min(request.first_changed_block, index)
            elif events is not None:
                events.stored(request, index, hashes[index], parent)
        self.observer.on_fill(request, full)
        if self._waiting_forks:
            self._share_filled(request, range(request.published_blocks, full))
        request.published_blocks = full

    def _share_filled(self, leader: Request, filled: range) -> None:
        """The step may have filled a block of which waiting forks read the beginning."""
        for index in filled:
            block = leader.blocks[index]
            if self.pool.num_readers(block) > 1:
                for fork in self._waiting_forks.values():
                    if index >= fork.published_blocks and fork.blocks[index : index + 1] == [block]:
                        self.observer.on_share(fork, leader, index + 1)

    def _load(self, request: Request, keys: Sequence[bytes]) -> None:
        """The next step copies these blocks from the tiers, behind those that the device had. They count as cached, and
        can be found: whoever reads them does so in that step or in a later one."""
        pool, first = self.pool, request.published_blocks
        hashes = request.block_hashes(pool.block_size, first + len(keys))
        self._tiers.reused(hashes[:first], request.blocks[:first])
        until = first + len(keys)
        tiers = self._tiers.load(request, keys, request.blocks[first:until])
        self._tiers.release(request)
        if not keys:
            return
        for index in range(first, until):
            parent = hashes[index - 1] if index else None
            block = pool.publish(request.blocks[index], hashes[index], parent)
            assert block == request.blocks[index], "a block behind an unknown one is unknown"
            if pool.events is not None:
                pool.events.stored(request, index, hashes[index], parent)
        pool.wrote(len(keys) * pool.block_size)
        request.published_blocks = until
        request.num_computed_tokens = request.num_committed_tokens = until * pool.block_size
        self.observer.on_load(request, tiers)

    def _on_evict(self, block: int, key: bytes) -> None:
        self._evicted.append(key)
        self._tiers.evicted(block, key)

    def free(self, request: Request) -> None:
        self._waiting_forks.pop(request.arrival_index, None)
        self._tiers.release(request)
        self.observer.on_release(request, request.num_committed_tokens)
        self._clear(request)

    def _clear(self, request: Request) -> None:
        self.pool.release(request.blocks, request.num_committed_tokens)
        request.blocks = []
        request.num_computed_tokens = request.num_committed_tokens = 0
        request.published_blocks = request.first_changed_block = request.hole_end = 0

    def _reuse(self, request: Request) -> None:
        size = self.pool.block_size
        request.blocks = self.pool.match(request.reusable_hashes(size))
        self.observer.on_lookup(len(request.blocks))
        self.pool.take(request.blocks)
        request.published_blocks = len(request.blocks)
        if self.pool.window is not None and request.blocks:
            request.hole_end = self.pool.window.hole(len(request.blocks) * size, size)[1]
        request.num_computed_tokens = request.num_committed_tokens = len(request.blocks) * size

    def _reclaimable(self, request: Request, wanted: int) -> list[Request]:
        """Waiting forks but `request` itself, the newest last; none where all their blocks are not enough."""
        forks = [fork for fork in self._waiting_forks.values() if fork is not request]
        enough = self.pool.available_without([fork.blocks for fork in forks], []) >= wanted
        return forks if enough else []
