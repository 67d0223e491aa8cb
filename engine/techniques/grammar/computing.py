"""The grammars of requests, as a runner calls them."""

from typing import ClassVar

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import Preparation, StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.runner.batch import NOTHING_LEFT, Batch
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.technique import ComputingTechnique
from sojourn.engine.techniques.grammar.guides import Guides


class Grammars(ComputingTechnique):
    """A part of a batch are the requests that sample by a grammar."""

    name: ClassVar[str] = "grammar"

    def load(self, model: PlacedModel) -> None:
        self.guides = Guides(model.folder, model.model.config.vocab_size)

    def begin(self, request: Request) -> Preparation | None:
        return self.guides.begin(request)

    def forget(self, request_id: str) -> None:
        self.guides.forget(request_id)

    def allow(self, request: Request, drafts: list[int]) -> list[int]:
        return drafts if request.sampling.grammar is None else self.guides.allowed(request.id, drafts)

    def prepare(self, plan: StepPlan, batch: Batch) -> None:
        if batch.sampling.edits is None:  # every grammar is an edit
            return
        constrained = [item for item in batch.items if item.samples and item.request.sampling.grammar is not None]
        if constrained:
            requests = batch.parts[self.name] = [item.request for item in constrained]
            batch.masks = self.guides.fill(requests, [item.drafts for item in constrained])

    def collect(self, plan: StepPlan, batch: Batch, outcome: StepOutcome) -> None:
        """Where a grammar ends, the tokens behind the end are none."""
        finishes = outcome.finishes
        for request in batch.parts.get(self.name, ()):
            if not self.guides.knows(request.id):
                continue
            tokens = outcome.sampled[request.id]
            end, consumed = self.guides.advance(request, tokens)
            has_nothing_left = finishes.get(request.id) == ("error", NOTHING_LEFT)
            if end is not None and (has_nothing_left or request.id not in finishes):
                finishes[request.id] = end
                del tokens[consumed:]
            elif has_nothing_left and self.guides.may_end(request.id):
                # Only the end is left, and the request has no stop token, or may not sample it.
                finishes[request.id] = ("stop", None)


def make(config: EngineConfig) -> Grammars:
    return Grammars()
