"""What a step on the device gave, as the loop reads it."""

import time
from collections.abc import Callable

import torch

from sojourn.engine.compute.buffers import to_device, to_host
from sojourn.engine.request.plan import StepOutcome
from sojourn.engine.runner.accepted_drafts import sampled_tokens
from sojourn.engine.runner.batch import (
    Batch,
    PromptRows,
    failures,
    prompt_logprobs,
    sampled_logprobs,
)
from sojourn.engine.runner.expert_tokens import summed
from sojourn.engine.runner.stream import Task
from sojourn.engine.token.sampling.entropy import entropy_and_mass, recorded_entropy
from sojourn.engine.token.sampling.logprobs import Scores, chunks, score


def keep_scores(batch: Batch, logits: torch.Tensor, ids: torch.Tensor) -> None:
    """Sends the host what it wants to know of the sampling rows: `logits` [rows, vocab_size] and `ids` [rows]."""
    results = batch.results
    if batch.scored:
        rows = slice(None) if len(batch.scored) == len(ids) else sent(batch.scored, logits.device)
        results.scores = score(logits[rows].float(), ids[rows], max(batch.scored_tops)).to_host()
    if batch.entropy_sample is not None:
        results.entropy = to_host(entropy_and_mass(logits, batch.entropy_sample))
    results.ids = to_host(ids)


def prompt_scores(
    prompts: PromptRows, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
) -> list[Scores]:
    """Scores prompt tokens behind `hidden` [rows, hidden_size], some at a time."""
    ids = sent(prompts.token_ids, hidden.device)
    return [
        score(logits(hidden[part]), ids[part], max(prompts.tops[part])).to_host()
        for part in chunks(len(prompts.tops), vocab_size)
    ]


def outcome_of(batch: Batch, task: Task, wait_began_ns: int) -> StepOutcome:
    """Of a step whose task is done, before the techniques add to it."""
    size, results = batch.graph_size, batch.results
    ids = results.ids.tolist()
    sampled = sampled_tokens(batch, ids)
    entropy, mass = recorded_entropy(results.entropy)
    tokens_of_experts, expert_imbalance = summed(results.expert_tokens)
    return StepOutcome(
        sampled,
        waited_ns=max(wait_began_ns, task.forward_ns),
        sampled_ns=0,  # see `finish`
        device_begin_ns=task.begin_ns,
        device_end_ns=task.end_ns,
        sampling_ns=task.end_ns - task.forward_ns,
        padding_tokens=0 if size is None else size - len(batch.query_lens),
        graph="eager" if size is None else f"decode-{size}",
        load_ns=task.load_ns,
        store_ns=task.store_ns,
        expert_tokens=tokens_of_experts,
        expert_imbalance_percent=expert_imbalance,
        logit_rows=batch.logit_rows,
        entropy_millinats=entropy,
        nucleus_mass_ppm=mass,
        finishes=failures(sampled) if min(ids, default=0) < 0 else {},
        prompt_logprobs=prompt_logprobs(batch.prompts, results.prompt_scores) if batch.prompts else {},
    )


def finish(outcome: StepOutcome, batch: Batch) -> StepOutcome:
    """The tokens are settled."""
    if batch.scored:
        outcome.logprobs = sampled_logprobs(batch, batch.results.scores, outcome.sampled)
    outcome.sampled_ns = time.monotonic_ns()
    outcome.waited_ns = min(outcome.waited_ns, outcome.sampled_ns)
    return outcome


def sent(values: list[int], device: torch.device) -> torch.Tensor:
    """[n] int64 on the device."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)
