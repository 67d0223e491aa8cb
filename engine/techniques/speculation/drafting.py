"""Asks the proposer for drafts behind a step, and drops what the next step could not accept."""

import time
from collections.abc import Sequence

from sojourn.engine.request.plan import ScheduledTokens, StepPlan
from sojourn.engine.request.request import State
from sojourn.engine.runner.batch import Batch
from sojourn.engine.techniques.grammar.guides import Guides
from sojourn.engine.techniques.speculation.proposers.proposer import ComputedStep, Proposer, SequenceStep
from sojourn.engine.token.models.taps import Taps


class Drafting:
    """Owns the proposer. `begin_ns` and `end_ns` are the readings around its last work."""

    def __init__(self, proposer: Proposer, guides: Guides, vocab_size: int, *, follows_steps: bool):
        self.proposer = proposer
        self._guides, self._vocab_size = guides, vocab_size
        self._follows_steps = follows_steps
        self.taps = Taps(layers=proposer.reads_layers) if proposer.reads_layers else None  # of a step's forward pass
        self.begin_ns = self.end_ns = self.flops = self.moved_bytes = 0

    @property
    def cost(self) -> dict[str, int]:
        """Of its last work, as fields of a StepOutcome."""
        return {
            "draft_ns": self.end_ns - self.begin_ns, "draft_flops": self.flops, "draft_bytes": self.moved_bytes,
        }  # fmt: skip

    def propose(
        self, plan: StepPlan, batch: Batch, sampled: dict[str, list[int]], ended: Sequence[str]
    ) -> dict[str, tuple[int, ...]]:
        """Request id → drafts for the next step, of requests that go on."""
        self.begin_ns = self.end_ns = self.flops = self.moved_bytes = 0
        sequences = self._sequences(plan, batch, sampled, ended)
        if not self._follows_steps and not any(each.wanted for each in sequences):
            return {}
        self.begin_ns = time.monotonic_ns()
        results = batch.results
        transfers = plan.parts.get("tiers")
        loaded = [] if transfers is None else [block for _, block in transfers.loads]
        step = ComputedStep(sequences, results.hidden, results.layer_outputs, plan.copies, loaded)
        proposal = self.proposer.propose(step)
        found = {}
        for each in sequences:
            if each.wanted and (drafts := self._usable(each, proposal.drafts.get(each.request.id, ()))):
                found[each.request.id] = drafts
        self.end_ns, self.flops, self.moved_bytes = time.monotonic_ns(), proposal.flops, proposal.moved_bytes
        return found

    def _sequences(
        self, plan: StepPlan, batch: Batch, sampled: dict[str, list[int]], ended: Sequence[str]
    ) -> list[SequenceStep]:
        sequences, row = [], 0
        for item in batch.items:
            if item.request.state is not State.RUNNING:  # aborted since: its blocks are gone
                row += item.new_tokens
                continue
            tokens = sampled.get(item.request.id, []) if item.samples else []
            wanted = plan.wanted.get(item.request.id, 0) if tokens else 0
            if wanted and (item.request.id in ended or _ends(item, tokens)):
                wanted = 0
            sequences.append(SequenceStep(item.request, item.past_tokens, item.new_tokens, row, tokens, wanted))
            row += item.new_tokens
        return sequences

    def _usable(self, sequence: SequenceStep, drafts: Sequence[int]) -> tuple[int, ...]:
        """Up to one that ends the request, which the row before it samples as well, or that its grammar forbids."""
        sampling = sequence.request.sampling
        found = []
        for draft in drafts[: sequence.wanted]:
            is_end = draft in sampling.stop_token_ids and not sampling.ignore_eos
            if is_end or not 0 <= draft < self._vocab_size:
                break
            found.append(draft)
        if sampling.grammar is not None and found:
            found = self._guides.allowed(sequence.request.id, found)
        return tuple(found)


def _ends(item: ScheduledTokens, tokens: list[int]) -> bool:
    request = item.request
    return request.ending(tokens[-1], request.output_tokens + len(tokens)) is not None
