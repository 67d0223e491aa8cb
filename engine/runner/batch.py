"""A step between the plan and the device: its inputs, and what its results mean for the requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sojourn.engine.compute.logits import OVERFLOWED
from sojourn.engine.request.plan import ScheduledTokens
from sojourn.engine.request.request import Request
from sojourn.engine.runner.rows import PackedStep
from sojourn.engine.sampling import TokenLogprobs
from sojourn.engine.token.sampling.entropy import EntropySample
from sojourn.engine.token.sampling.logprobs import Scores
from sojourn.engine.token.sampling.sampler import SamplingInputs

OVERFLOW = (
    "the model computed values that are no numbers for this request: its weights or its dtype's range are at fault; "
    "with dtype float16, serve it in bfloat16 or float32"
)
NOTHING_LEFT = (
    "the sampling controls of this request leave no token to draw; look at allowed_token_ids, bad_words, min_tokens "
    "and the grammar together"
)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Positions that score the prompt token behind them."""

    rows: list[int]  # [num_scored]: of the step's tokens
    token_ids: list[int]  # [num_scored]: the successors
    tops: list[int]  # how many of the most probable tokens each wants
    spans: list[tuple[str, int]]  # request id and number of rows, in order


@dataclass(slots=True)
class Results:
    """What a step gave, valid on the host once its task is done."""

    ids: torch.Tensor | None = None  # [num_sampling] int64; negative ones are no tokens
    scores: Scores | None = None
    rows: torch.Tensor | None = None  # [num_sampling]: of the tables, on the device
    hidden: torch.Tensor | None = None  # [num_tokens, hidden_size], on the device, where a technique wants it
    layer_outputs: list[torch.Tensor] = field(default_factory=list)  # likewise
    entropy: torch.Tensor | None = None  # [2] float64: entropy in nats, and the mass that truncation left
    prompt_scores: list[Scores] = field(default_factory=list)
    expert_tokens: list[torch.Tensor] = field(default_factory=list)  # of a counted step: see ExpertTokens


@dataclass(slots=True)
class Batch:
    """One step as the device is given it. Sequences with one new token stand first."""

    step: PackedStep
    query_lens: list[int]
    context_lens: list[int]
    sampling: SamplingInputs
    request_ids: list[str]  # of the rows that sample; a request with drafts has one row more than drafts
    items: list[ScheduledTokens]  # in the order of the batch
    has_drafts: bool = False
    scored: list[int] = field(default_factory=list)  # sampling rows that want log-probabilities
    scored_tops: list[int] = field(default_factory=list)  # of each of these rows: of how many other tokens
    prompts: PromptRows | None = None
    masks: Callable[[], torch.Tensor] | None = None  # [rows, words] int32 of rows with edits, once they are filled
    entropy_sample: EntropySample | None = None
    graph_size: int | None = None  # of the CUDA graph that replays the step
    loaded_blocks: list[int] = field(default_factory=list)  # KV blocks that another memory fills before the step
    parts: dict[str, Any] = field(default_factory=dict)  # by the name of a technique: what it keeps for its hooks
    results: Results = field(default_factory=Results)

    @property
    def all_sampled(self) -> bool:
        """A step of decodes: a token is sampled behind every input token, drafts too."""
        return len(self.step.sample_tokens) == len(self.step.known_ids)

    @property
    def logit_rows(self) -> int:
        """Rows that the head computes."""
        return len(self.step.sample_tokens) + (0 if self.prompts is None else len(self.prompts.rows))


def prompt_rows(items: list[ScheduledTokens]) -> PromptRows | None:
    """The positions whose prompt tokens are wanted and were not scored before."""
    rows, token_ids, tops, spans = [], [], [], []
    offset = 0  # of the item's first token in the step
    for item in items:
        request, past = item.request, item.past_tokens
        if request.sampling.prompt_logprobs is not None and past < request.prompt_tokens - 1:
            begin, end = len(request.prompt_logprobs), min(past + item.new_tokens, request.prompt_tokens - 1)
            assert begin >= past, "a prompt that is scored skips no position"
            if begin < end:  # else a preempted request computes again what was scored
                rows += range(offset + begin - past, offset + end - past)
                token_ids += request.token_ids[begin + 1 : end + 1]
                tops += [request.sampling.prompt_logprobs] * (end - begin)
                spans.append((request.id, end - begin))
        offset += item.new_tokens
    return PromptRows(rows, token_ids, tops, spans) if rows else None


class SampledRows(NamedTuple):
    """The rows of a step behind which tokens are sampled."""

    requests: list[Request]
    positions: list[int]  # where the tokens will stand
    drafts: list[tuple[int, ...]] | None  # that each sees behind the known tokens; None: no row sees any


def sampled_rows(items: Sequence[ScheduledTokens], *, has_drafts: bool) -> SampledRows:
    """A row behind the last token of each item that samples, and behind each of its drafts."""
    sampling = [item for item in items if item.samples]
    if not has_drafts:
        ends = [item.past_tokens + item.new_tokens for item in sampling]
        return SampledRows([item.request for item in sampling], ends, None)
    rows = SampledRows([], [], [])
    for item in sampling:
        first = item.past_tokens + item.new_tokens - len(item.drafts)
        for count in range(len(item.drafts) + 1):
            rows.requests.append(item.request)
            rows.positions.append(first + count)
            rows.drafts.append(item.drafts[:count])
    return rows


def sampled_logprobs(batch: Batch, scores: Scores, sampled: dict[str, list[int]]) -> dict[str, list[TokenLogprobs]]:
    """Of the tokens that were sampled, where they are wanted."""
    found: dict[str, list[TokenLogprobs]] = {}
    for row, scored in zip(batch.scored, scores.logprobs_of(batch.scored_tops), strict=True):
        found.setdefault(batch.request_ids[row], []).append(scored)
    return {request_id: rows[: len(sampled[request_id])] for request_id, rows in found.items()}


def prompt_logprobs(prompts: PromptRows, chunks: list[Scores]) -> dict[str, list[TokenLogprobs]]:
    found: list[TokenLogprobs] = []
    for scores in chunks:
        found += scores.logprobs_of(prompts.tops[len(found) : len(found) + len(scores.token_ids)])
    owned, begin = {}, 0
    for request_id, count in prompts.spans:
        owned[request_id] = found[begin : begin + count]
        begin += count
    return owned


def failures(sampled: dict[str, list[int]]) -> dict[str, tuple[str, str | None]]:
    """Request id → finish reason and sentence, where a row gave no token. Removes the ids that are none."""
    found = {}
    for request_id, tokens in sampled.items():
        if tokens[-1] < 0:
            found[request_id] = ("error", OVERFLOW if tokens.pop() == OVERFLOWED else NOTHING_LEFT)
    return found


def batch_order(item: ScheduledTokens) -> tuple:
    """Single tokens first; neighbours of like context share a padded gather."""
    return item.new_tokens > 1, item.past_tokens
