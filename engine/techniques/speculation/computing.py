"""Drafts behind each step: asks the proposer, and drops what the next step could not accept."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import ScheduledTokens, StepOutcome, StepPlan
from sojourn.engine.request.request import State
from sojourn.engine.runner.batch import Batch, Results
from sojourn.engine.runner.graphs import Decoded
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.technique import ComputingTechnique, Reserved
from sojourn.engine.settings.speculation import PROPOSING
from sojourn.engine.techniques.speculation.proposers.drafters import outlined_drafter
from sojourn.engine.techniques.speculation.proposers.proposer import (
    ComputedStep,
    NoProposer,
    Proposal,
    Proposer,
    SequenceStep,
)
from sojourn.engine.techniques.speculation.proposers.proposers import make_proposer
from sojourn.engine.token.models.taps import Taps

if TYPE_CHECKING:
    from sojourn.engine.runner.runner import ModelRunner


class Drafting(ComputingTechnique):
    """Owns the proposer. While the memory is measured there is none."""

    name: ClassVar[str] = "speculation"

    def __init__(self, config: EngineConfig):
        self._config = config
        self._follows_steps = False
        self.proposer: Proposer = NoProposer()
        self._taps: Taps | None = None  # of a step's forward pass

    def reserve(self, model: PlacedModel) -> Reserved:
        """What a drafter with weights adds. Raises ModelError where it does not fit the target."""
        drafter = outlined_drafter(self._config, model)
        if drafter is None:
            return Reserved()
        work = model.max_tokens * drafter.widest_activation * model.activation_bytes
        return Reserved(drafter.weight_bytes, work, kv_bytes_per_token=drafter.kv_bytes_per_token)

    def allocate(self, runner: "ModelRunner") -> None:
        eager = runner.eager
        self._allow, self._call, self._vocab_size = runner.allow, runner.stream.call, runner.shape.vocab_size
        self.proposer = make_proposer(self._config, runner.placed, eager.kv_cache, eager.attention, eager.operations)
        self._follows_steps = PROPOSING[self._config.speculation].follows_steps
        if self.proposer.reads_layers:
            self._taps = eager.taps = Taps(layers=self.proposer.reads_layers)

    def weights(self) -> Sequence[Any]:
        return (self.proposer,)

    def forget(self, request_id: str) -> None:
        self.proposer.forget(request_id)

    preempt = forget

    def behind_forward(self, found: Results | Decoded, hidden: torch.Tensor | None) -> None:
        if self.proposer.reads_hidden:
            found.hidden = hidden
        if self._taps is not None:
            found.layer_outputs = list(self._taps.streams)

    def collect(self, plan: StepPlan, batch: Batch, outcome: StepOutcome) -> None:
        """Drafts for the next step, by request id, of requests that go on."""
        sequences = self._sequences(plan, batch, outcome)
        if not self._follows_steps and not any(each.wanted for each in sequences):
            return
        results = batch.results
        step = ComputedStep(sequences, results.hidden, results.layer_outputs, plan.copies, batch.loaded_blocks)
        self._call(lambda: self._propose(step, outcome))

    def _propose(self, step: ComputedStep, outcome: StepOutcome) -> None:
        """In the thread of the steps."""
        begin_ns = time.monotonic_ns()
        proposal: Proposal = self.proposer.propose(step)
        for each in step.sequences:
            if each.wanted and (drafts := self._usable(each, proposal.drafts.get(each.request.id, ()))):
                outcome.drafts[each.request.id] = drafts
        outcome.draft_ns = time.monotonic_ns() - begin_ns
        outcome.draft_flops, outcome.draft_bytes = proposal.flops, proposal.moved_bytes

    def _sequences(self, plan: StepPlan, batch: Batch, outcome: StepOutcome) -> list[SequenceStep]:
        sequences, row = [], 0
        for item in batch.items:
            if item.request.state is not State.RUNNING:  # aborted since: its blocks are gone
                row += item.new_tokens
                continue
            tokens = outcome.sampled.get(item.request.id, []) if item.samples else []
            wanted = plan.wanted.get(item.request.id, 0) if tokens else 0
            if wanted and (item.request.id in outcome.finishes or _ends(item, tokens)):
                wanted = 0
            sequences.append(SequenceStep(item.request, item.past_tokens, item.new_tokens, row, tokens, wanted))
            row += item.new_tokens
        return sequences

    def _usable(self, sequence: SequenceStep, drafts: Sequence[int]) -> tuple[int, ...]:
        """Up to one that ends the request, which the row before it samples as well, or that it may not get."""
        sampling = sequence.request.sampling
        found = []
        for draft in drafts[: sequence.wanted]:
            is_end = draft in sampling.stop_token_ids and not sampling.ignore_eos
            if is_end or not 0 <= draft < self._vocab_size:
                break
            found.append(draft)
        return tuple(self._allow(sequence.request, found) if found else ())


def _ends(item: ScheduledTokens, tokens: list[int]) -> bool:
    request = item.request
    return request.ending(tokens[-1], request.output_tokens + len(tokens)) is not None


def make(config: EngineConfig) -> Drafting:
    return Drafting(config)
