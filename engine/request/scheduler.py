"""Plans how many tokens each request computes in the next step. Deterministic, without torch and clock."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.lower_tiers import NoTiers
from sojourn.engine.memory.observer import BlockObserver
from sojourn.engine.request.kv_block_manager import KVBlockManager
from sojourn.engine.request.micro_batches import MicroBatches
from sojourn.engine.request.plan import Preemption, ScheduledTokens, StepOutcome, StepPlan, next_tokens
from sojourn.engine.request.policies.policy import Phase, Phases, Policy
from sojourn.engine.request.request import Request, State
from sojourn.engine.request.technique import Technique
from sojourn.engine.request.token_budget import FixedBudget, TokenBudget
from sojourn.engine.request.waiting import WaitingQueue

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

    Drafts of a running request are computed behind its last token. Of their positions only those of accepted drafts
    count as computed; what the cache holds behind them is overwritten.
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
        techniques: Sequence[Technique] = (),
        micro_batches: int = 1,
    ):
        self.pool = pool
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        is_number = isinstance(max_num_batched_tokens, int)
        self.budget = FixedBudget(max_num_batched_tokens) if is_number else max_num_batched_tokens
        self.chunk = min(max_prefill_chunk_tokens or self.budget.most, self.budget.most)
        self.techniques = tuple(techniques)
        self.drafting = next((each.drafting for each in techniques if each.drafting is not None), None)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self.block_observer = block_observer
        self.micro_batches = MicroBatches(micro_batches)
        for technique in self.techniques:
            technique.join(self)
        sides = [each.side_queue for each in techniques if each.side_queue is not None]
        self.waiting = WaitingQueue(policy, sides, max_long_prefills, long_prefill_tokens)
        lower_tiers = next((each.lower_tiers for each in techniques if each.lower_tiers is not None), NoTiers())
        self.block_manager = KVBlockManager(pool, block_observer, lower_tiers)

    def technique(self, name: str) -> Any:
        """The one of that name, the first where it has several parts; None: the engine does without."""
        return next((each for each in self.techniques if each.name == name), None)

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
        for technique in self.techniques:
            technique.planned(plan)
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
                tokens, computed = self.drafting.accept(item, tokens)
            counts = request.counts
            if item.kind == "recompute":
                counts.recomputed_tokens += computed
            else:
                counts.computed_tokens += computed
            if counts.first_step is None:
                counts.first_step = step
            counts.last_step = step
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
        for technique in self.techniques:
            technique.committed(plan, outcome)
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
            if request.drafts and (count := self.drafting.verify(request, room_for_drafts, plan)):
                room_for_drafts -= count
                continue
            fits = done < len(request.blocks) * size and not request.forked
            if fits or extend(request, done + 1, plan) or self._make_room(request, done + 1, plan):
                plan.add(ScheduledTokens(request, 1, done, "decode", True))

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
        self.waiting.recall()
        while (request := self.waiting.next(free_long)) is not None:
            plan.head_blocked_by = self._obstacle(request, plan)
            if plan.head_blocked_by is not None:
                return
            free_long -= self.waiting.admit(request)
            for technique in self.techniques:
                technique.entered(request)
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
        for technique in self.techniques:
            technique.left(victim)
        self.block_manager.free(victim)
        victim.counts.preemptions += 1
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
            for technique in self.techniques:
                technique.left(request)
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
