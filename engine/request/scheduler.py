"""Plans how many tokens each request computes in the next step. Deterministic, without torch and clock."""

from collections.abc import Sequence
from typing import NamedTuple

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.observer import BlockObserver
from sojourn.engine.request.kv_block_manager import KVBlockManager
from sojourn.engine.request.plan import Preemption, ScheduledTokens, StepOutcome, StepPlan, next_tokens
from sojourn.engine.request.policy import Phase, Phases, Policy
from sojourn.engine.request.request import Request, State
from sojourn.engine.request.token_budget import FixedBudget, TokenBudget
from sojourn.engine.request.waiting import WaitingQueue
from sojourn.engine.techniques.group.micro_batches import MicroBatches
from sojourn.engine.techniques.lora.line import AdapterLine
from sojourn.engine.techniques.lora.slots import AdapterSlots
from sojourn.engine.techniques.speculation.draft_lengths import DraftLengths
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.engine.techniques.tiers.transfers import Prefetch

_NOTHING: tuple[int, ...] = ()


class Emitted(NamedTuple):
    """A token that left the loop."""

    request: Request
    token_id: int | None  # None: it ended without one
    finish_reason: str | None
    index: int = 0  # of the tokens that the step gave to the request


class Scheduler:
    """Owns the waiting and the running requests. The policy decides who is next, who is preempted, and the phases.

    A request is admitted only if its whole prompt fits in the pool, so that no prefill stops half-way for memory, or as
    much as it holds at a time. When a running request cannot grow, the last in rank loses its blocks for a while.
    `schedule` may be called before the step that it planned last is committed, if that plan does not need its tokens.
    Positions count as computed when they are planned, for the device works in order; tokens, prefixes and forks wait
    for the commit. A planned step of a request that has ended meanwhile is computed in vain.

    Drafts of a running request are computed behind its last token, where free blocks and the budget have room. Of their
    positions only those of accepted drafts count as computed; what the cache holds behind them is overwritten.
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        block_observer: BlockObserver,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int | TokenBudget,
        max_prefill_chunk_tokens: int | None = None,
        max_long_prefills: int | None = None,
        long_prefill_tokens: int | None = None,
        draft_lengths: DraftLengths | None = None,
        max_loras: int = 1,
        tiers: KVTiers | None = None,
        micro_batches: int = 1,
    ):
        self.pool = pool
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        is_number = isinstance(max_num_batched_tokens, int)
        self.budget = FixedBudget(max_num_batched_tokens) if is_number else max_num_batched_tokens
        self.chunk = min(max_prefill_chunk_tokens or self.budget.most, self.budget.most)
        self.draft_lengths = draft_lengths  # None: no request has drafts
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self.adapters = AdapterLine(AdapterSlots(max_loras), policy.rank, patience=max_num_seqs)
        self.waiting = WaitingQueue(policy, self.adapters, max_long_prefills, long_prefill_tokens)
        self.block_observer = block_observer
        self.tiers = tiers
        self.micro_batches = MicroBatches(micro_batches)
        self.block_manager = KVBlockManager(pool, block_observer, tiers)

    @property
    def num_waiting(self) -> int:
        return self.waiting.count

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.waiting.count > 0

    def add(self, request: Request) -> None:
        assert request.id not in self.requests, f"request {request.id} is known already"
        leader = self.requests.get(request.fork_of) if request.fork_of is not None else None
        self.requests[request.id] = request
        self._wait(request, leader)

    def prefetch(self, request: Request) -> Prefetch | None:
        """Begins to read what KV tiers have of the prefix of a request that arrived. None: `add` may come at once."""
        return None if self.tiers is None else self.block_manager.prefetch(request)

    def abort(self, request: Request) -> None:
        """Forgets a request, wherever it is."""
        self._finish(request, "abort")

    def schedule(self) -> StepPlan:
        decodes, prompts = [], []
        for request in self.running:
            (prompts if request.is_prefilling else decodes).append(request)
        decodes, prompts = self.micro_batches.split(decodes, prompts)
        groups = self.policy.phases(self.running)
        budget = self._budget(decodes, prompts, groups)
        plan = StepPlan(budget, budget)
        for phases in groups:
            for phase in phases:
                if phase is Phase.ADMISSIONS:
                    self._admit(plan)
                elif phase is Phase.DECODES:
                    self._continue_decodes(decodes, plan)
                else:
                    self._continue_prompts(prompts, plan)
            if plan.scheduled:
                break
        if plan.head_blocked_by is None and self.waiting.num_in_queue:
            plan.head_blocked_by = "policy"
        plan.num_waiting = self.waiting.count
        plan.refusals = self.waiting.refusals(plan.head_blocked_by)
        plan.side_queue_moves, self.waiting.moves = self.waiting.moves, []
        if self.draft_lengths is not None:
            self._want_drafts(plan, self.draft_lengths)
        if plan.scheduled and self.adapters.has_loads:
            plan.adapter_loads = self.adapters.take_loads()
        self._advance(plan)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, step: int) -> list[Emitted]:
        """Books what a step computed, and emits its tokens. Requests that have ended since are skipped."""
        emitted, written = [], 0
        self.micro_batches.committed(plan)
        sampled, ends, scores = outcome.sampled, outcome.finishes, outcome.prompt_logprobs
        size, has_forks = self.pool.block_size, self.waiting.has_forks
        for item in plan.scheduled:
            request = item.request
            if request.state is State.FINISHED:
                continue
            tokens = sampled.get(request.id, _NOTHING) if item.samples else _NOTHING
            computed = item.new_tokens
            if item.drafts:
                tokens = request.until_end(tokens)
                computed = self._accept(item, len(tokens))
            if item.kind == "recompute":
                request.recomputed_tokens += computed
            else:
                request.computed_tokens += computed
            if request.first_step is None:
                request.first_step = step
            request.last_step = step
            if scores:
                request.prompt_logprobs += scores.get(request.id, ())
            request.token_ids += tokens  # a block that accepted drafts fill is published with their ids
            if request.state is State.RUNNING:  # else it was preempted since
                done = item.past_tokens + computed
                written += done - request.num_committed_tokens
                request.num_committed_tokens = done
                if done // size != request.published_blocks:
                    self.block_manager.publish(request)
                if has_forks and request.has_computed_prompt:
                    for fork in self.waiting.release(request):
                        self._wait(fork, request)
                if self.pool.window is not None:
                    self.block_manager.leave_window(request)
            if item.samples:
                request.num_unread_tokens -= 1
                ended = ends.get(request.id) if ends else None
                if tokens or ended is not None:
                    self._emit(request, tokens, ended, emitted)
        self.pool.wrote(written)
        if self.draft_lengths is not None:
            self.draft_lengths.observe(plan, outcome)
            for request_id, drafts in outcome.drafts.items():
                if (known := self.requests.get(request_id)) is not None and known.state is State.RUNNING:
                    known.drafts = drafts
        return emitted

    def _budget(self, decodes: list[Request], prompts: list[Request], groups: Phases) -> int:
        """Tokens of the next step. Prompts hold decodes up only where a policy lets them share it."""
        has_prompts = prompts or (self.waiting.count and len(self.running) < self.max_num_seqs)
        if not has_prompts or not any(Phase.DECODES in group and len(group) > 1 for group in groups):
            return self.budget.most
        return self.budget.beside(decodes, prompts)

    def _advance(self, plan: StepPlan) -> None:
        """The plan will be computed, and before any later plan."""
        self.policy.computed(plan)
        for item in plan.scheduled:
            request, until = item.request, item.past_tokens + item.new_tokens
            request.num_computed_tokens = until
            if item.drafts:
                until -= len(item.drafts)
                plan.needs_commit = True
            if until > request.computed_high_water:
                request.computed_high_water = until
            if item.samples:
                request.num_unread_tokens += 1
                plan.needs_commit |= request.needs_output
            if request.sampling.prompt_logprobs is not None and item.past_tokens < request.prompt_tokens:
                plan.needs_commit = True  # the positions to score next depend on those of this step
        self.micro_batches.planned(plan)

    def _continue_decodes(self, requests: list[Request], plan: StepPlan) -> None:
        size, extend = self.pool.block_size, self.block_manager.extend
        room_for_drafts = plan.budget_left - len(requests)
        for request in requests:
            if request.state is not State.RUNNING or plan.budget_left == 0 or request.is_at_max_tokens:
                continue
            done = request.num_computed_tokens
            if request.drafts and (drafts := self._fitting_drafts(request, room_for_drafts, plan)):
                room_for_drafts -= len(drafts)
                plan.add(ScheduledTokens(request, 1 + len(drafts), done, "verify", True, drafts))
                continue
            fits = done < len(request.blocks) * size and not request.forked
            if fits or extend(request, done + 1, plan) or self._make_room(request, done + 1, plan):
                plan.add(ScheduledTokens(request, 1, done, "decode", True))

    def _fitting_drafts(self, request: Request, room: int, plan: StepPlan) -> tuple[int, ...]:
        """Those drafts of a request that the step verifies, with blocks for them. They take no block of another."""
        drafts, request.drafts = request.drafts, ()
        left = min(room, request.sampling.max_tokens - request.output_tokens - 1)
        drafts = drafts[: max(0, left)]
        past = request.num_computed_tokens
        if drafts and not self._has_blocks(request, past + 1 + len(drafts), plan):
            in_blocks = len(request.blocks) * self.pool.block_size - past - 1
            drafts = () if request.forked else drafts[: max(0, in_blocks)]
        return drafts

    def _has_blocks(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for drafts, or for what drafts them. Each running request can still take the next one."""
        return self.block_manager.extend_for_drafts(request, num_tokens, len(self.running), plan)

    def _want_drafts(self, plan: StepPlan, lengths: DraftLengths) -> None:
        """Says for which requests drafts are wanted behind this step, with blocks for what the proposer writes."""
        plan.needs_commit |= lengths.follows_steps
        sampling = [item for item in plan.scheduled if item.samples]
        wanted = lengths.wanted([item.request for item in sampling], plan)
        for item in sampling:
            request = item.request
            count = wanted.get(request.id, 0)
            if not count:
                continue
            known = item.past_tokens + item.new_tokens
            left = request.sampling.max_tokens - (known + 1 - request.prompt_tokens) - 1  # if all drafts are accepted
            count = min(count, left)
            if lengths.writes_ahead and count > 0 and not self._has_blocks(request, known + count, plan):
                count = min(count, len(request.blocks) * self.pool.block_size - known)
            if count > 0:
                plan.wanted[request.id] = count
                plan.needs_commit = True
            else:
                reason = "last_token" if left <= 0 else "memory"
                plan.undrafted[reason] = plan.undrafted.get(reason, 0) + 1

    def _accept(self, item: ScheduledTokens, num_tokens: int) -> int:
        """A step gave a request with drafts so many tokens: its positions that count as computed."""
        request, computed = item.request, max(1, num_tokens)
        request.drafted_tokens += len(item.drafts)
        request.accepted_tokens += max(0, num_tokens - 1)
        self.policy.accepted(request, max(0, num_tokens - 1))
        request.num_computed_tokens = item.past_tokens + computed
        request.computed_high_water = max(request.computed_high_water, request.num_computed_tokens)
        return computed

    def _continue_prompts(self, requests: list[Request], plan: StepPlan) -> None:
        extend = self.block_manager.extend
        for request in requests:
            if request.state is not State.RUNNING:  # it was preempted for one before it
                continue
            new_tokens = self._share(request, plan)
            until = request.num_computed_tokens + new_tokens
            if new_tokens and (extend(request, until, plan) or self._make_room(request, until, plan)):
                plan.has_prompts = True
                plan.add(next_tokens(request, new_tokens))

    def _admit(self, plan: StepPlan) -> None:
        if plan.preempted:  # a new request does not get the memory of a preempted one
            plan.head_blocked_by = "kv_blocks"
            return
        free_long = self.waiting.free_long()
        self.waiting.recall_adapters()
        while (request := self.waiting.next(free_long)) is not None:
            plan.head_blocked_by = self._obstacle(request, plan)
            if plan.head_blocked_by is not None:
                return
            free_long -= self.waiting.admit(request)
            if request.adapter is not None:
                self.adapters.enter(request)
            request.state = State.RUNNING
            self.running.append(request)
            plan.admitted.append(request)
            self.policy.admitted(request)
            plan.has_prompts = True
            plan.add(next_tokens(request, self._share(request, plan)))

    def _obstacle(self, request: Request, plan: StepPlan) -> str | None:
        """Why the head of the queue cannot be admitted; None once it has its blocks. May preempt others for them."""
        if plan.budget_left == 0 or plan.has_preempted(request):
            full = len(self.running) >= self.max_num_seqs
            return "batch_cap" if full else "kv_blocks" if plan.has_preempted(request) else "token_budget"
        reason = self._allocate(request, plan)
        if reason is None:
            return None
        victims = self.micro_batches.free(self.policy.displaced_by(request, self.running))
        victims = [r for r in victims if r not in plan.admitted]
        left = len(self.running) - len(victims)
        if not victims or left >= self.max_num_seqs or not self.block_manager.would_fit(request, left, victims):
            return reason
        victims.sort(key=self.policy.rank)
        while (reason := self._allocate(request, plan)) is not None and victims:
            self._preempt(victims.pop(), request, plan)
        return reason

    def _allocate(self, request: Request, plan: StepPlan) -> str | None:
        if len(self.running) >= self.max_num_seqs:
            return "batch_cap"
        # Every running request may soon need one more block: do not admit a request that would be preempted at once.
        return None if self.block_manager.allocate(request, len(self.running), plan) else "kv_blocks"

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for a running request, at the cost of the last in rank; False if it is the last itself."""
        while (victim := max(self.micro_batches.free(self.running), key=self.policy.rank)) is not request:
            self._preempt(victim, request, plan)
            if self.block_manager.extend(request, num_tokens, plan):
                return True
        self._preempt(request, request, plan)
        return False

    def _preempt(self, victim: Request, needy: Request, plan: StepPlan) -> None:
        plan.drop(victim)
        plan.preempted.append(Preemption(victim, needy.id, victim.num_computed_tokens))
        self.running.remove(victim)
        victim.drafts = ()
        if victim.adapter is not None:
            self.adapters.give_back(victim)
        self.block_manager.free(victim)
        victim.preemptions += 1
        self.waiting.join(victim, State.PREEMPTED)

    def _share(self, request: Request, plan: StepPlan) -> int:
        """Tokens that a request may compute in this step: never recomputed and new ones together."""
        if request.is_at_max_tokens:
            return 0
        done, again = request.num_computed_tokens, request.computed_high_water
        until = again if done < again else request.num_tokens
        return min(until - done, self.chunk, plan.budget_left)

    def _wait(self, request: Request, leader: Request | None) -> None:
        """A request waits in the queue, with its leader's blocks if their prompt is computed; else for that prompt."""
        if leader is None or not request.shares_prompt_with(leader):
            self.waiting.join(request)
        elif leader.has_computed_prompt:
            self.block_manager.fork(request, leader)
            self.waiting.join(request)
        else:
            self.waiting.follow(request, leader)

    def _emit(
        self, request: Request, tokens: Sequence[int], ended: tuple[str, str | None] | None, emitted: list[Emitted]
    ) -> None:
        """Tokens leave the loop, at the end of the known ones; the last of them may end the request."""
        last = len(tokens) - 1
        for index in range(last):
            emitted.append(Emitted(request, tokens[index], None, index))
        token_id = tokens[last] if tokens else None
        if ended is not None:
            reason, request.error = ended
        else:
            reason = request.ending(token_id, request.output_tokens)
        if reason is not None:
            self._finish(request, reason)
        emitted.append(Emitted(request, token_id, reason, max(0, last)))

    def _finish(self, request: Request, reason: str) -> None:
        if request.state is State.RUNNING:
            self.running.remove(request)
            if request.adapter is not None:
                self.adapters.give_back(request)
        else:
            self.waiting.leave(request)
        self.block_manager.free(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        del self.requests[request.id]
        first: Request | None = None
        for fork in self.waiting.release(request):  # their leader's prompt is gone: the first fork computes it
            self._wait(fork, first)
            first = first or fork
