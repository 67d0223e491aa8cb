"""What proposes drafts sees of a step, and what it gives. The runner calls it behind each step that it may draft for.

A draft is a token that the next step computes as if it had been sampled. That step samples at each of the drafts, and
the tokens count as long as they equal the drafts. A proposer can be wrong; it can only cost time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from sojourn.engine.sampling import SamplingParams


class DraftedRequest(Protocol):
    """A request as a proposer sees it. Its tokens are those from before the step."""

    id: str
    sampling: SamplingParams
    token_ids: list[int]  # prompt, then output
    prompt_tokens: int
    blocks: list[int]  # of the KV pool: position p is slot p % block_size of blocks[p // block_size]


class SequenceStep(NamedTuple):
    """One sequence of a computed step.

    Its known tokens are `request.token_ids + sampled`. The last of them is not computed yet; of all others the model's
    keys and values are in the cache, at the positions 0 to `num_computed`.
    """

    request: DraftedRequest
    past_tokens: int  # positions that were computed before the step
    new_tokens: int  # positions that were computed in the step, with rejected drafts
    first_row: int  # of its rows in `ComputedStep.hidden`
    sampled: list[int]  # accepted drafts and one more; empty where the step ended inside of its prompt
    wanted: int  # drafts for the next step at most; 0: none

    @property
    def num_computed(self) -> int:
        """Positions whose tokens are known, and computed."""
        return self.past_tokens + self.new_tokens if not self.sampled else self.num_known - 1

    @property
    def num_known(self) -> int:
        return len(self.request.token_ids) + len(self.sampled)

    def tokens(self, begin: int, end: int) -> list[int]:
        """Known ones, by position."""
        ids = self.request.token_ids
        known = len(ids)
        return ids[begin : min(end, known)] + self.sampled[max(0, begin - known) : max(0, end - known)]


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step behind its forward pass and its sampling."""

    sequences: Sequence[SequenceStep]
    # Where the proposer reads them; else None. Rows of rejected drafts are in both.
    hidden: torch.Tensor | None = None  # [num_tokens, hidden_size]: after the last norm
    layer_outputs: Sequence[torch.Tensor] = ()  # [num_tokens, hidden_size] behind each of `reads_layers`
    copies: Sequence[tuple[int, int]] = ()  # KV blocks, from and to, that were copied before the step
    loaded: Sequence[int] = ()  # KV blocks that came from a tier, behind the copies: without what a proposer had there


class Proposal(NamedTuple):
    """What a proposer gave for a step."""

    drafts: dict[str, list[int]]  # request id → up to `wanted` tokens that may follow its known ones
    flops: int = 0  # that it computed, by the model shapes
    moved_bytes: int = 0  # that it read and wrote at least


class Proposer(Protocol):
    """Proposes drafts. All calls come from one thread, in the order of the steps.

    `reads_hidden` and `reads_layers` say what it wants of the target: hidden states after the last norm, and the
    residual streams behind these layers (0 is the first). `PROPOSING` (in settings.py) says for each what it needs of
    the loop. With `writes_ahead` a request has KV slots for its known tokens and `wanted` - 1 more.
    """

    reads_hidden: bool
    reads_layers: tuple[int, ...]

    def propose(self, step: ComputedStep) -> Proposal: ...

    def forget(self, request_id: str) -> None:
        """The request ended, or lost its blocks: it may come back. Unknown ids are ignored."""
        ...


class NoProposer:
    """Proposes nothing: for an engine that has no proposer yet."""

    reads_hidden = False
    reads_layers: tuple[int, ...] = ()

    def propose(self, step: ComputedStep) -> Proposal:
        return Proposal({})

    def forget(self, request_id: str) -> None:
        """It knows none."""
