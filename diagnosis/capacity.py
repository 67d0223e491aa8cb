"""How many requests a second the server could serve, from its own step times: separates capacity from policy."""

import math
from dataclasses import replace

from sojourn.diagnosis.evidence import Accounts, Client, Records, Work, steps_of, tightest
from sojourn.diagnosis.kv_facts import USUAL_BLOCK_SIZE
from sojourn.diagnosis.step_facts import StepModel

LARGEST_BATCH = 512  # beyond it the fitted step model is extrapolated too far to promise anything
# An offered load above this share of the capacity is overload: the estimate itself is good to about 10%, and queues
# grow without bound near 1.
FULL, CLEARLY_FULL = 0.95, 1.1
COMFORTABLE = 0.7  # utilisation at which an M/M/c queue of this size is short; what a fix should bring the load to


def request_ns(model: StepModel, work: Work, batch: float) -> float:
    """Server time that one request costs when `batch` requests decode together and share each step's fixed cost."""
    tokens = work.computed_tokens + work.output_tokens
    context = work.output_tokens * work.context_tokens + work.prompt_tokens
    shared = model.step_ns * work.output_tokens / max(batch, 1.0)
    return model.token_ns * tokens + model.context_ns * context + shared


def kv_blocks(facts: Accounts) -> int:
    """KV blocks of one request at its mean length."""
    size = facts.engine.get("block_size") or USUAL_BLOCK_SIZE
    return math.ceil((facts.work.prompt_tokens + facts.work.output_tokens) / size)


def kv_batch(facts: Records) -> float:
    """Requests whose KV fits into the pool at the same time."""
    return max(1.0, facts.steps.pool_blocks / kv_blocks(facts))


def batch_within_tpot(facts: Records, model: StepModel | None = None) -> float:
    """Largest batch whose mixed steps meet the tightest time per output token; at most LARGEST_BATCH."""
    model, work = model or facts.steps.model, facts.work
    bound = tightest(facts, "tpot_ms")
    if bound is None:
        return LARGEST_BATCH
    per_request = model.token_ns * (1 + work.computed_tokens / work.output_tokens)
    per_request += model.context_ns * work.context_tokens
    return min(LARGEST_BATCH, max(1.0, (bound * 1e6 - model.step_ns) / max(per_request, 1.0)))


def load(
    facts: Client, *, batch: float | None = None, work: Work | None = None, model: StepModel | None = None
) -> float:
    """Offered load / capacity (ρ) with the batch given, else with the batch that the batch cap, the KV pool and the
    token budget allow.

    NaN where the steps do not suffice for a model, and where no rate was offered. What this cannot show: variation; a
    ρ below 1 can still queue.
    """
    if not _has_model(facts):
        return math.nan
    cap = facts.engine.get("max_num_seqs") or LARGEST_BATCH
    within = min(cap, kv_batch(facts)) if batch is None else batch
    model, work = model or facts.steps.model, work or facts.work
    needed_ns = request_ns(model, work, within)
    if batch is None:  # as the run was set: a step holds no more tokens than its budget
        needed_ns = max(needed_ns, budget_ns(facts, model, work))
    return facts.offered_rps * needed_ns / 1e9


def budget_ns(facts: Client, model: StepModel, work: Work) -> float:
    """Server time that one request costs when every step is full: with a tiny budget the fixed cost is most of it."""
    budget = facts.token_budget
    if not budget:
        return 0.0
    context = budget * work.context_tokens * work.output_tokens / (work.computed_tokens + work.output_tokens)
    return (work.computed_tokens + work.output_tokens) / budget * model.predict(budget, context)


def best_load(facts: Client, work: Work | None = None) -> float:
    """ρ of the device alone, with the largest batch that meets the time per output token, whatever cap and pool."""
    if not _has_model(facts):
        return math.nan
    steps, model = facts.steps, facts.steps.model
    # If the device hid all of the host's work
    model = replace(model, step_ns=max(0.0, model.step_ns - steps.host_share * steps.wall_ns / steps.count))
    return load(facts, batch=batch_within_tpot(facts, model), work=work, model=model)


def comfortable_batch(facts: Records) -> int:
    """Smallest batch that brings ρ to COMFORTABLE; at most what the time per output token allows."""
    largest = int(batch_within_tpot(facts))
    return next((batch for batch in range(1, largest + 1) if load(facts, batch=batch) <= COMFORTABLE), largest)


def _has_model(facts: Client) -> bool:
    steps = steps_of(facts)
    return steps is not None and steps.model is not None and facts.work is not None
