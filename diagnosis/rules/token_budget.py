"""Causes in what a step may hold: the token budget, too small or too large, and the limit of a prompt's chunk."""

import math

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts, tightest
from sojourn.diagnosis.rules.cause import CONTENTION, QUEUE, Proposal, cause
from sojourn.diagnosis.rules.shared_evidence import (
    excess_evidence,
    long_prompt_share,
    missing_share,
    residual_evidence,
)
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change

PROMPT_WORK = ("compute.prefill", "request.interference")
INTERFERENCE = "request.interference"
LONG_PROMPT = 4.0  # times the median prompt of the late requests: it fills steps that they would share
SMALLEST_BUDGET = 32  # below it a step's fixed cost outweighs the tokens it carries on any device
LARGEST_BUDGET = 2048  # a candidate: beyond it a step of a mixed batch holds whole prompts, and decodes wait for it
CHEAP = 0.2  # of a full step: below it a larger one is hardly faster, and everybody in it waits longer
LONGER_STEPS = 1.25  # a mixed step that is a quarter longer than one of decodes only is a measured effect


def fixed_share(facts: Facts, tokens: float) -> float:
    """The part of a step of so many tokens that it would cost without any; 0 where no step model is known."""
    model = facts.steps.model if facts.steps is not None else None
    if model is None:
        return 0.0
    return model.step_ns / max(model.predict(tokens, 0.0), 1.0)


def tokens_within_tpot(facts: Facts) -> int:
    """As `tokens_within` the tightest time per token; SMALLEST_BUDGET where nothing bounds them."""
    bound = tightest(facts, "tpot_ms")
    if bound is None or facts.steps is None or facts.steps.model is None:
        return SMALLEST_BUDGET
    return tokens_within(facts, bound)


def tokens_within(facts: Facts, step_ms: float) -> int:
    """Prompt tokens beside the decodes of a step that takes so long, at least SMALLEST_BUDGET. Takes a step model."""
    steps = facts.steps
    context = steps.mean_batch * (facts.work.context_tokens if facts.work else 0)
    room = (step_ms * 1e6 - steps.model.predict(0, context)) / max(steps.model.token_ns, 1)
    return max(SMALLEST_BUDGET, int(room) // SMALLEST_BUDGET * SMALLEST_BUDGET)


def _larger(value: int, most: int) -> list[int]:
    """Twice, four times … the value, up to the most; the most itself at last."""
    found, next_ = [], 2 * value
    while next_ < most:
        found.append(next_)
        next_ *= 2
    return [*found[:5], most]


def _enough(facts: Facts, budget: int) -> list[int]:
    """The budget at which the fixed cost is CHEAP of a full step, within the time per token; [] if it is unknown."""
    model, bound = facts.steps.model if facts.steps is not None else None, tightest(facts, "tpot_ms")
    if model is None or model.token_ns <= 0:
        return []
    tokens = model.step_ns * (1 - CHEAP) / CHEAP / model.token_ns
    if bound is not None:
        tokens = min(tokens, (bound * 1e6 - model.step_ns) / model.token_ns)
    value = math.ceil(tokens / SMALLEST_BUDGET) * SMALLEST_BUDGET
    return [min(value, LARGEST_BUDGET)] if value > budget else []


@cause(lifecycles=("request", "compute"), object="token budget of a step (max_num_batched_tokens)", kind="policy",
       rival="overload: the device is full at any budget", rival_key="overload")  # fmt: skip
def token_budget(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts wait for a token budget so small that every step's fixed cost is paid for few tokens."""
    short, chunks = facts.waits.get("token_budget", 0.0), facts.chunks
    budget = facts.token_budget
    if not budget or budget >= LARGEST_BUDGET:
        return None
    fixed, cut = fixed_share(facts, budget), chunks.cut_by_budget if chunks else 0.0
    # The wait for the budget, and of the prompt work the fixed cost of steps that a larger budget would spare
    spared = fixed * cut if chunks and chunks.per_prompt > 1 else 0.0
    # Where hardly anything of a full step is fixed, a larger one is as much slower: it only changes who waits
    claims = dict.fromkeys(QUEUE, short * min(1.0, fixed / CHEAP)) | dict.fromkeys(PROMPT_WORK, spared)
    if sum(excess.share(name) * part for name, part in claims.items()) < 0.1:
        return None
    values = list(dict.fromkeys([*_enough(facts, budget), *_larger(budget, LARGEST_BUDGET)]))
    per_prompt = chunks.per_prompt if chunks else 1.0
    return Proposal(
        cause=f"a step may hold {budget} tokens: a prompt takes {per_prompt:.0f} steps, and {fixed:.0%} of a full step "
        "is its fixed cost",
        evidence=[
            *excess_evidence(excess, tuple(claims)),
            evidence(f"{short:.0%} of the waiting was refused by the token budget", short, "share",
                     "requests: waits; steps: refusals", supports=short >= 0.3, weight=2 if short >= 0.3 else 0.5),
            *([
                evidence(f"{cut:.0%} of the cuts of prompts were in steps that were full", cut, "share",
                         "steps: new_tokens, budget", supports=cut >= 0.5),
                evidence(f"{fixed:.0%} of a full step does not depend on its tokens", fixed, "share", "steps: fit",
                         supports=fixed >= 0.3, weight=2),
            ] if chunks else []),
        ],
        measurement="the same scenario with a larger token budget",
        settings={"max_num_batched_tokens": values[0]},
        if_cause=f"prompts take fewer steps than {per_prompt:.0f}, and the waiting for tokens ends",
        if_rival=f"{missing_share(excess)} stays",
        claims=claims,
        fixes=tuple(Change(settings={"max_num_batched_tokens": value}) for value in values),
        rival_fix=Change(device_speed=2.0),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object="limit of a prompt's chunk (max_prefill_chunk_tokens)",
       kind="policy", needs=("excess", "step model"), rival="token budget of a step",
       rival_key="token_budget")  # fmt: skip
def prefill_chunk(facts: Facts, excess: Excess) -> Proposal | None:
    """Each step takes so few tokens of a prompt that the prompt needs many steps, and every step has its fixed cost."""
    chunks, limit = facts.chunks, facts.engine.get("max_prefill_chunk_tokens")
    budget = facts.token_budget
    if not limit or chunks is None or (budget and limit >= budget):
        return None
    fixed = fixed_share(facts, limit)
    claims = {"compute.prefill": chunks.cut_by_chunk_limit * fixed, INTERFERENCE: chunks.cut_by_chunk_limit * fixed}
    if sum(excess.share(name) * part for name, part in claims.items()) < 0.1:
        return None
    values = _larger(limit, budget or LARGEST_BUDGET)
    return Proposal(
        cause=f"a step takes at most {limit} tokens of a prompt: a prompt takes {chunks.per_prompt:.0f} steps, while "
        f"{1 - chunks.budget_use:.0%} of the token budget is left",
        evidence=[
            *excess_evidence(excess, PROMPT_WORK),
            evidence(f"{chunks.cut_by_chunk_limit:.0%} of the cuts of prompts are at the limit of {limit} tokens",
                     chunks.cut_by_chunk_limit, "share", "steps: new_tokens, kinds",
                     supports=chunks.cut_by_chunk_limit >= 0.5, weight=2),
            evidence(f"steps with a cut prompt use {chunks.budget_use:.0%} of the token budget", chunks.budget_use,
                     "share", "steps: new_tokens, budget", supports=chunks.budget_use < 0.5),
            evidence(f"{fixed:.0%} of a step with one chunk does not depend on its tokens", fixed, "share",
                     "steps: fit", supports=fixed >= 0.3, weight=2),
        ],
        measurement="the same scenario with a larger limit of a chunk",
        settings={"max_prefill_chunk_tokens": values[-1]},
        if_cause=f"prompts take fewer steps than {chunks.per_prompt:.0f}",
        if_rival="prompts take as many steps as before, cut by the budget",
        claims=claims,
        fixes=tuple(Change(settings={"max_prefill_chunk_tokens": value}) for value in reversed(values)),
        rival_fix=Change(settings={"max_num_batched_tokens": min(2 * (budget or limit), LARGEST_BUDGET)}),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object="token budget of a step (max_num_batched_tokens)", kind="policy",
       accounts=(INTERFERENCE,), needs=("excess", "step model"),
       rival="a slow device: steps that are long for what they hold", rival_key="slow_device")  # fmt: skip
def token_budget_large(facts: Facts, excess: Excess) -> Proposal | None:
    """Steps hold so many prompt tokens that everybody who decodes in them waits."""
    steps, bound = facts.steps, tightest(facts, "tpot_ms")
    budget = facts.token_budget
    if steps.prefill_step_p95_ns is None or steps.prefill_tokens_p95 is None:
        return None
    mixed_ms, plain_ms = steps.prefill_step_p95_ns / 1e6, (steps.decode_step_p50_ns or 0) / 1e6
    if mixed_ms < LONGER_STEPS * plain_ms:
        return None
    target_ms = bound if bound is not None and bound < mixed_ms else mixed_ms / 2
    value = tokens_within(facts, target_ms)
    largest = min(budget or LARGEST_BUDGET, int(steps.prefill_tokens_p95))
    removed = max(0.0, 1 - value / largest)
    if removed <= 0:
        return None
    values = [value, *(part for part in (largest // 2, largest // 4, largest // 8) if part >= SMALLEST_BUDGET)]
    who, blamed = _long_prompts(facts, excess)
    over = bound is not None and mixed_ms > bound
    return Proposal(
        cause=f"{who} fill whole steps, and everybody in them waits" if who
        else "others' prompt chunks make the steps longer than the objective",
        evidence=[
            *excess_evidence(excess, CONTENTION),
            *blamed,
            evidence(f"a step with prompt tokens beside decodes takes {mixed_ms:,.0f} ms (p95), one with decodes only "
                     f"{plain_ms:,.0f} ms (p50)", mixed_ms, "ms", "steps: begin_ns, end_ns, kinds",
                     supports=over or bound is None, weight=2),
            *residual_evidence(facts),
        ],
        measurement="the same scenario with a smaller token budget",
        settings={"max_num_batched_tokens": value},
        if_cause=f"mixed steps fall from {mixed_ms:,.0f} to about {target_ms:,.0f} ms; long prompts take more of them",
        if_rival=f"steps stay long beside decodes alone, and {missing_share(excess)} stays",
        change=f"max_num_batched_tokens={value}" + (f" (now {budget})" if budget else "")
        + ", or send long prompts to a server of their own",
        claims={INTERFERENCE: removed},
        fixes=tuple(Change(settings={"max_num_batched_tokens": each}) for each in dict.fromkeys(values)),
    )  # fmt: skip


def _long_prompts(facts: Facts, excess: Excess) -> tuple[str, list[Evidence]]:
    """Who they are if long prompts caused most of the delay by others, and that as evidence."""
    prompts = facts.rows.set_index("request_id").server_prompt_tokens.astype("float64")
    typical = float(prompts.loc[facts.rows.request_id[excess.missing]].median())
    share, offenders = long_prompt_share(facts, excess, LONG_PROMPT * typical)
    if share < 0.5 or not len(offenders):  # of all delay by prompts: who causes more than half of it is the offender
        return "", []
    classes = ", ".join(sorted(set(offenders.klass.dropna()) - {""}))
    who = f"{len(offenders)} requests{f' of {classes}' if classes else ''} with "
    who += f"{offenders.prompt_tokens.median():,.0f} prompt tokens"
    blamed = f"{share:.0%} of the delay that others cost late requests is caused by {who}; late requests have "
    source = "steps: new_tokens, kinds, request_ids; requests"
    return who, [evidence(f"{blamed}{typical:,.0f}", share, "share", source)]
