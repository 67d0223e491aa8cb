"""A step between the plan and the device: its inputs, its results, and the log-probabilities that requests want."""

from dataclasses import dataclass, field

import torch

from engine.request.plan import ScheduledTokens
from engine.request.request import Request
from engine.runner.rows import PackedStep
from engine.sampling import TokenLogprobs
from engine.token.grammar.masks import MaskFill
from engine.token.sampling.entropy import EntropySample
from engine.token.sampling.logprobs import Scores
from engine.token.sampling.sampler import SamplingInputs


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
    entropy: torch.Tensor | None = None  # [2] float64: entropy in nats, and the mass that truncation left
    prompt_scores: list[Scores] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """One step as the device is given it. Sequences with one new token stand first."""

    step: PackedStep
    query_lens: list[int]
    context_lens: list[int]
    sampling: SamplingInputs
    request_ids: list[str]  # of the rows that sample
    scored: list[int] = field(default_factory=list)  # sampling rows that want log-probabilities
    scored_tops: list[int] = field(default_factory=list)  # ... and of how many other tokens
    prompts: PromptRows | None = None
    constrained: list[Request] = field(default_factory=list)  # that sample by a grammar
    masks: MaskFill | None = None  # theirs, under way
    entropy_sample: EntropySample | None = None
    graph_size: int | None = None  # of the CUDA graph that replays the step
    results: Results = field(default_factory=Results)

    @property
    def all_sampled(self) -> bool:
        """A step of decodes: a token is sampled behind every input token."""
        return len(self.request_ids) == len(self.step.known_ids)

    @property
    def logit_rows(self) -> int:
        """Rows that the head computes."""
        return len(self.request_ids) + (0 if self.prompts is None else len(self.prompts.rows))


def prompt_rows(scored: list[tuple[ScheduledTokens, int]]) -> PromptRows | None:
    """The positions that were not scored before, of items and the places of their first tokens in the step."""
    rows, token_ids, tops, spans = [], [], [], []
    for item, offset in scored:
        request, known = item.request, len(item.request.prompt_logprobs)
        assert known >= item.past_tokens, "a prompt that is scored skips no position"
        begin, end = known, min(item.past_tokens + item.new_tokens, request.prompt_tokens - 1)
        if begin < end:  # else a preempted request computes again what was scored
            rows += range(offset + begin - item.past_tokens, offset + end - item.past_tokens)
            token_ids += request.token_ids[begin + 1 : end + 1]
            tops += [request.sampling.prompt_logprobs] * (end - begin)
            spans.append((request.id, end - begin))
    return PromptRows(rows, token_ids, tops, spans) if rows else None


def sampled_logprobs(batch: Batch, scores: Scores) -> dict[str, TokenLogprobs]:
    owners = [batch.request_ids[row] for row in batch.scored]
    return dict(zip(owners, scores.logprobs_of(batch.scored_tops), strict=True))


def prompt_logprobs(prompts: PromptRows, chunks: list[Scores]) -> dict[str, list[TokenLogprobs]]:
    found: list[TokenLogprobs] = []
    for scores in chunks:
        found += scores.logprobs_of(prompts.tops[len(found) : len(found) + len(scores.token_ids)])
    owned, begin = {}, 0
    for request_id, count in prompts.spans:
        owned[request_id] = found[begin : begin + count]
        begin += count
    return owned
