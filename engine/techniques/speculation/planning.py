"""Speculation around the loop: which drafts a step verifies, how many are wanted behind it, and what came of them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import ScheduledTokens, StepOutcome, StepPlan
from sojourn.engine.request.request import Request, State
from sojourn.engine.request.technique import Technique
from sojourn.engine.settings.speculation import PROPOSING
from sojourn.engine.techniques.speculation.draft_lengths import AdaptiveLengths, DraftLengths, FixedLengths
from sojourn.metrics.records import StepRecord
from sojourn.metrics.records.step import Drafts


class DraftPlanning(Technique):
    """Drafts of a running request are computed behind its last token, where free blocks and the budget have room. Of
    their positions only those of accepted drafts count as computed."""

    name = "speculation"

    def __init__(self, lengths: DraftLengths):
        self.lengths = lengths
        self.drafting = self

    def verify(self, request: Request, room: int, plan: StepPlan) -> int:
        """With blocks for the drafts. They take no block of another request."""
        drafts, request.drafts = request.drafts, ()
        left = min(room, request.sampling.max_tokens - request.output_tokens - 1)
        drafts = drafts[: max(0, left)]
        past = request.num_computed_tokens
        if drafts and not self._has_blocks(request, past + 1 + len(drafts), plan):
            in_blocks = len(request.blocks) * self.scheduler.pool.block_size - past - 1
            drafts = () if request.forked else drafts[: max(0, in_blocks)]
        if drafts:
            plan.add(ScheduledTokens(request, 1 + len(drafts), past, "verify", True, drafts))
        return len(drafts)

    def accept(self, item: ScheduledTokens, tokens: Sequence[int]) -> tuple[Sequence[int], int]:
        request, tokens = item.request, item.request.until_end(tokens)
        computed, accepted = max(1, len(tokens)), max(0, len(tokens) - 1)
        counts = request.parts.setdefault(self.name, Counter())
        counts["drafted_tokens"] += len(item.drafts)
        counts["accepted_tokens"] += accepted
        self.scheduler.policy.accepted(request, accepted)
        request.num_computed_tokens = item.past_tokens + computed
        request.computed_high_water = max(request.computed_high_water, request.num_computed_tokens)
        return tokens, computed

    def planned(self, plan: StepPlan) -> None:
        """Says for which requests drafts are wanted behind this step, with blocks for what the proposer writes."""
        lengths = self.lengths
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
                count = min(count, len(request.blocks) * self.scheduler.pool.block_size - known)
            if count > 0:
                plan.wanted[request.id] = count
                plan.needs_commit = True
            else:
                reason = "last_token" if left <= 0 else "memory"
                plan.undrafted[reason] = plan.undrafted.get(reason, 0) + 1

    def committed(self, plan: StepPlan, outcome: StepOutcome) -> None:
        self.lengths.observe(plan, outcome)
        for request_id, drafts in outcome.drafts.items():
            known = self.scheduler.requests.get(request_id)
            if known is not None and known.state is State.RUNNING:
                known.drafts = drafts

    def report(self, request: Request) -> dict[str, Any]:
        return request.parts.get(self.name, {})

    def record(self, record: StepRecord, plan: StepPlan, outcome: StepOutcome) -> None:
        if not (plan.wanted or plan.num_drafts or plan.undrafted):
            return
        longest = max((len(item.drafts) for item in plan.scheduled), default=0)
        drafted, accepted = [0] * longest, [0] * longest
        for item in plan.scheduled:
            count = len(outcome.sampled.get(item.request.id, ())) - 1
            for position in range(len(item.drafts)):
                drafted[position] += 1
                accepted[position] += position < count
        record.drafts = Drafts(
            drafted_tokens=sum(drafted),
            accepted_tokens=sum(accepted),
            drafted_by_position=drafted,
            accepted_by_position=accepted,
            drafts_wanted=sum(plan.wanted.values()),
            draft_ns=outcome.draft_ns,
            draft_flops=outcome.draft_flops,
            draft_bytes=outcome.draft_bytes,
            undrafted=plan.undrafted,
        )

    def _has_blocks(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for drafts, or for what drafts them. Each running request can still take the next one."""
        return self.scheduler.block_manager.extend_for_drafts(request, num_tokens, len(self.scheduler.running), plan)


def make_draft_lengths(config: EngineConfig) -> DraftLengths:
    """How many drafts requests get."""
    kind = FixedLengths if config.speculation_adaptive == "off" else AdaptiveLengths
    proposing = PROPOSING[config.speculation]
    return kind(config.speculation_tokens, writes_ahead=proposing.writes_ahead, follows_steps=proposing.follows_steps)
