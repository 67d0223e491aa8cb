"""Prompt lookup: what followed the last occurrence of the newest tokens is proposed again (Saxena, 2023, "Prompt Lookup
Decoding"; Yang et al., 2023, "Inference with Reference", arXiv 2304.04487)."""

from sojourn.engine.techniques.speculation.proposers.ngram_index import NgramIndex
from sojourn.engine.techniques.speculation.proposers.proposer import ComputedStep, Proposal


class NgramProposer:
    """Needs nothing of the model."""

    reads_hidden = False
    reads_layers = ()

    def __init__(self, longest: int):
        self._longest = longest
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, step: ComputedStep) -> Proposal:
        drafts = {}
        for sequence in step.sequences:
            if sequence.wanted:
                request = sequence.request
                index = self._indexes.get(request.id)
                if index is None:
                    index = self._indexes[request.id] = NgramIndex(self._longest)
                index.extend(request.token_ids[len(index.token_ids) :])
                index.extend(sequence.sampled)
                drafts[request.id] = index.continuation(sequence.wanted)
        return Proposal(drafts)

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
