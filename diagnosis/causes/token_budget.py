"""Prompts wait for a token budget so small that every step's fixed cost is paid for few tokens."""

import math

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import tightest
from sojourn.diagnosis.proposal import CONTENTION, QUEUE
from sojourn.diagnosis.statements import token_budget
from sojourn.diagnosis.statements.accounts import propose, room_evidence, scale_setting, waited_for
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.symptom_tree.reading import waiting_for

CHEAP = 0.2  # of a full step: below it a larger one is hardly faster, and everybody in it waits longer


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    short, chunks = facts.waits.get("token_budget", 0.0), facts.chunks
    budget = facts.token_budget
    if not budget or budget >= token_budget.LARGEST_BUDGET:
        return None
    fixed, cut = token_budget.fixed_share(facts, budget), chunks.cut_by_budget if chunks else 0.0
    # The wait for the budget, and of the prompt work the fixed cost of steps that a larger budget would spare
    spared = fixed * cut if chunks and chunks.per_prompt > 1 else 0.0
    # Where hardly anything of a full step is fixed, a larger one is as much slower: it only changes who waits
    claims = dict.fromkeys(QUEUE, short * min(1.0, fixed / CHEAP)) | dict.fromkeys(token_budget.PROMPT_WORK, spared)
    if sum(excess.share(name) * part for name, part in claims.items()) < 0.1:
        return None
    larger = token_budget.larger_budget(budget, token_budget.LARGEST_BUDGET)
    values = list(dict.fromkeys([*_enough(facts, budget), *larger]))
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


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """Requests wait for room in the token budget of a step."""
    found = [*excess_evidence(excess, QUEUE), *waited_for(facts, "token_budget"), *room_evidence(facts, wanted=True)]
    return propose(excess, "requests wait for room in the token budget of a step", found,
                   "a larger max_num_batched_tokens", None,
                   scale_setting(facts, "max_num_batched_tokens", 2))  # fmt: skip


def _enough(facts: Records, budget: int) -> list[int]:
    """The budget at which the fixed cost is CHEAP of a full step, within the time per token; [] if it is unknown."""
    model, bound = facts.steps.model if facts.steps is not None else None, tightest(facts, "tpot_ms")
    if model is None or model.token_ns <= 0:
        return []
    tokens = model.step_ns * (1 - CHEAP) / CHEAP / model.token_ns
    if bound is not None:
        tokens = min(tokens, (bound * 1e6 - model.step_ns) / model.token_ns)
    value = math.ceil(tokens / token_budget.SMALLEST_BUDGET) * token_budget.SMALLEST_BUDGET
    return [min(value, token_budget.LARGEST_BUDGET)] if value > budget else []


CAUSE = Cause(
    key="token_budget",
    lifecycles=("request", "compute"),
    object="token budget of a step (max_num_batched_tokens)",
    kind="policy",
    rival="overload: the device is full at any budget",
    rival_key="overload",
    name="token budget of a step, too small",
    asks="Do prompts wait because a step may hold too few tokens?",
    measurement="the same scenario with twice the max_num_batched_tokens",
    figures=(waiting_for("token_budget", "the token budget"),),
    booked=(*CONTENTION, "compute.prefill"),
    complaints={"high_ttft": 4, "low_device_utilisation": 3},
    reads={
        Records: Rule(read_records),
        Accounts: Rule(
            read_accounts, accounts=QUEUE, reason="token_budget", object="token budget of a step", rival="overload"
        ),
    },
)
