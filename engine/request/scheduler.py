"""Which request computes how many tokens in the next step. Deterministic; knows no torch and no clock."""

import heapq
from dataclasses import dataclass

from engine.memory.block_pool import BlockPool
from engine.request.plan import ScheduledTokens, StepOutcome, StepPlan
from engine.request.policies import Policy, fcfs
from engine.request.request import Request, State


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token that left the loop."""

    request: Request
    token_id: int
    finish_reason: str | None


class Scheduler:
    """Owns the waiting and the running requests. One token budget: decodes, then running prompts, then new ones.

    A request is admitted only if its whole prompt fits in the pool, so that no prefill stops half-way for memory. When
    a running request cannot grow, the newest one gives up its blocks and computes them again later.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_chunk_tokens: int | None = None,
        policy: Policy = fcfs,
    ):
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.chunk = min(max_prefill_chunk_tokens or max_num_batched_tokens, max_num_batched_tokens)
        self.policy = policy
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self._waiting: list[tuple[tuple, Request]] = []  # a heap; finished ones are skipped
        self.num_waiting = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def add(self, request: Request) -> None:
        assert request.id not in self.requests, f"request {request.id} is known already"
        self.requests[request.id] = request
        self._wait(request)

    def abort(self, request: Request) -> None:
        """Forgets a request, wherever it is."""
        self._finish(request, "abort")

    def schedule(self) -> StepPlan:
        plan = StepPlan(self.budget, self.budget)
        self._continue_running(plan)
        if not plan.preempted:  # memory that was just taken from a request is not given to a new one
            self._admit(plan)
        elif self.num_waiting:
            self._refuse(plan, "kv_blocks")
        plan.num_waiting = self.num_waiting
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, step: int) -> list[Emitted]:
        """Takes in what a step computed; who drew a token emits it."""
        emitted = []
        for item in plan.scheduled:
            request = item.request
            request.num_computed_tokens += item.new_tokens
            if item.kind == "recompute":
                request.recomputed_tokens += item.new_tokens
            else:
                request.computed_tokens += item.new_tokens
            request.computed_high_water = max(request.computed_high_water, request.num_computed_tokens)
            request.first_step = step if request.first_step is None else request.first_step
            request.last_step = step
            self._publish_full_blocks(request)
            request.prompt_logprobs += outcome.prompt_logprobs.get(request.id, ())
            if request.id in outcome.sampled:
                emitted.append(self._append(request, outcome.sampled[request.id]))
        return emitted

    def _continue_running(self, plan: StepPlan) -> None:
        decodes = [request for request in self.running if not request.is_prefilling]
        prompts = [request for request in self.running if request.is_prefilling]
        for request in decodes + prompts:
            if request.state is not State.RUNNING:  # it gave way to one before it
                continue
            new_tokens = self._share(request, plan)
            if new_tokens and self._grow(request, request.num_computed_tokens + new_tokens, plan):
                plan.add(_scheduled(request, new_tokens))

    def _admit(self, plan: StepPlan) -> None:
        while (request := self._head()) is not None:
            if len(self.running) >= self.max_num_seqs:
                return self._refuse(plan, "batch_cap")
            if plan.budget_left == 0:
                return self._refuse(plan, "token_budget")
            if not self._place(request):
                return self._refuse(plan, "kv_blocks")
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            request.state = State.RUNNING
            self.running.append(request)
            plan.admitted.append(request)
            plan.add(_scheduled(request, self._share(request, plan)))

    def _place(self, request: Request) -> bool:
        """Gives a request the blocks of its whole prompt, cached ones first; no change where they do not fit."""
        size = self.pool.block_size
        # The last position is always computed: its logits give the next token.
        hashes = request.block_hashes(size, (request.num_tokens - 1) // size)
        # A prompt whose tokens are scored is computed from its beginning.
        cached = self.pool.match(hashes) if request.sampling.prompt_logprobs is None else []
        self.pool.take(cached)
        # Every running request may need one more block in a moment: do not admit what would be thrown out at once.
        reserve = len(self.running)
        missing = self.pool.blocks_for(request.num_tokens) - len(cached)
        fresh = self.pool.allocate(missing) if missing + reserve <= self.pool.available else None
        if fresh is None:
            self.pool.release(cached)
            return False
        request.blocks = cached + fresh
        request.num_computed_tokens = len(cached) * size
        request.published_blocks = len(cached)
        if request.preemptions == 0:
            request.cached_tokens = min(request.num_computed_tokens, request.prompt_tokens)
        return True

    def _grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Makes room for a running request, at the cost of the newest; False if it was itself the newest."""
        while (missing := self.pool.blocks_for(num_tokens) - len(request.blocks)) > 0:
            fresh = self.pool.allocate(missing)
            if fresh is not None:
                request.blocks += fresh
                break
            victim = max(self.running, key=self.policy)
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        plan.drop(victim)
        plan.preempted.append(victim)
        self.running.remove(victim)
        self._give_back(victim)
        victim.preemptions += 1
        self._wait(victim, State.PREEMPTED)

    def _share(self, request: Request, plan: StepPlan) -> int:
        """Tokens that a request may compute in this step: never some of them again and some for the first time."""
        done, again = request.num_computed_tokens, request.computed_high_water
        until = again if done < again else request.num_tokens
        return min(until - done, self.chunk, plan.budget_left)

    def _refuse(self, plan: StepPlan, reason: str) -> None:
        plan.held_back_by = reason
        plan.refusals[reason] = 1
        if self.num_waiting > 1:
            plan.refusals["behind_head"] = self.num_waiting - 1

    def _wait(self, request: Request, state: State = State.WAITING) -> None:
        request.state = state
        heapq.heappush(self._waiting, (self.policy(request), request))
        self.num_waiting += 1

    def _head(self) -> Request | None:
        while self._waiting and self._waiting[0][1].state is State.FINISHED:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _publish_full_blocks(self, request: Request) -> None:
        size = self.pool.block_size
        full = request.num_computed_tokens // size
        hashes = request.block_hashes(size, full)
        for index in range(request.published_blocks, full):
            parent = hashes[index - 1] if index else b""
            self.pool.publish(request.blocks[index], hashes[index], parent, at_root=index == 0)
        request.published_blocks = full

    def _append(self, request: Request, token_id: int) -> Emitted:
        request.token_ids.append(token_id)
        sampling = request.sampling
        if not sampling.ignore_eos and token_id in sampling.stop_token_ids:
            self._finish(request, "stop")
        elif request.output_tokens >= sampling.max_tokens:
            self._finish(request, "length")
        return Emitted(request, token_id, request.finish_reason)

    def _finish(self, request: Request, reason: str) -> None:
        if request.state is State.RUNNING:
            self.running.remove(request)
        else:
            self.num_waiting -= 1  # its place in the heap is skipped when it comes up
        self._give_back(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        del self.requests[request.id]

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []


def _scheduled(request: Request, new_tokens: int) -> ScheduledTokens:
    past = request.num_computed_tokens
    if past < request.computed_high_water:
        kind = "recompute"
    else:
        kind = "prefill" if past < request.prompt_tokens else "decode"
    return ScheduledTokens(request, new_tokens, past, kind, samples=past + new_tokens == request.num_tokens)
