"""Each step takes so few tokens of a prompt that the prompt needs many steps, and every step has its fixed cost."""

from sojourn.diagnosis.cause import Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import CONTENTION
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.token_budget import LARGEST_BUDGET, PROMPT_WORK, fixed_share, larger_budget
from sojourn.diagnosis.symptom_tree.reading import Reading

INTERFERENCE = "request.interference"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    chunks, limit = facts.chunks, facts.engine.get("max_prefill_chunk_tokens")
    budget = facts.token_budget
    if not limit or chunks is None or (budget and limit >= budget):
        return None
    fixed = fixed_share(facts, limit)
    claims = {"compute.prefill": chunks.cut_by_chunk_limit * fixed, INTERFERENCE: chunks.cut_by_chunk_limit * fixed}
    if sum(excess.share(name) * part for name, part in claims.items()) < 0.1:
        return None
    values = larger_budget(limit, budget or LARGEST_BUDGET)
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


def show_chunk_limit(facts: Client) -> Reading | None:
    chunk, budget = facts.engine.get("max_prefill_chunk_tokens"), facts.token_budget
    if budget is None:
        return None
    if not isinstance(chunk, int) or chunk >= budget:
        return Reading(f"no chunk limit is below the token budget of {budget}", True, "run.json: engine")
    chunks = facts.chunks if isinstance(facts, Records) else None
    taken = "" if chunks is None else f"; a prompt took {chunks.per_prompt:.1f} steps"
    return Reading(
        f"a prompt advances by at most {chunk} tokens per step, of a budget of {budget}{taken}",
        False,
        "run.json: max_prefill_chunk_tokens; steps: new_tokens",
        1 - chunk / budget,
    )


CAUSE = Cause(
    key="prefill_chunk",
    lifecycles=("request", "compute"),
    object="limit of a prompt's chunk (max_prefill_chunk_tokens)",
    kind="policy",
    rival="token budget of a step",
    rival_key="token_budget",
    name="chunk limit of a prompt",
    asks="Is a prompt cut into too many chunks?",
    measurement="the same scenario without max_prefill_chunk_tokens",
    figures=(show_chunk_limit,),
    booked=(*CONTENTION, "compute.prefill"),
    complaints={"high_ttft": 6},
    reads={Records: Rule(read_records, needs=("excess", "step model"))},
)
