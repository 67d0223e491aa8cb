"""Causes in the order of requests: a policy that holds back, the wrong order, one class or tenant before the rest."""

from typing import Any

import numpy as np

from sojourn.diagnosis.capacity import FULL, best_load, load
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import CONTENTION, QUEUE, Proposal, cause
from sojourn.diagnosis.rules.shared_evidence import (
    Blamed,
    blamed_on,
    excess_evidence,
    load_evidence,
    missing_share,
)
from sojourn.diagnosis.rules.token_budget import SMALLEST_BUDGET, tokens_within_tpot
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change, settings_text

INTERFERENCE = "request.interference"
# What a policy that the engine offers does, and why it holds requests back.
HOLDS_BACK = {"static": "static batching admits nobody before the last request of its batch has ended"}
ORDERS = {
    "prefill-first": "prompts go before running decodes, and stop them for whole steps",
    "priority": "requests of a higher priority go first, whenever they came",
    "shortest-prefill-first": "requests with shorter prompts go first, whenever they came",
    "fair-share": "the tenant with the least service goes first, whenever its requests came",
}
OF_POLICY = ("priority_ageing", "shortest_ageing", "fair_output_weight", "prefill_patience")
LONGER = 4.0  # times the median prompt of the late requests: what such a prompt takes, several of theirs could share
MOSTLY = 0.5
USUAL_BUDGET = 512  # tokens of a step, where nobody recorded any
OVERTAKEN = 1.0  # later arrivals that go ahead of a late request, on average: in order of arrival there are none


def policy(name: str, facts: Facts) -> dict[str, Any]:
    """The settings that choose a policy; those that belong to the one in force are taken back."""
    return {"policy": name} | {each: None for each in OF_POLICY if facts.engine.get(each) is not None}


@cause(lifecycles=("request",), object="admission policy", kind="policy", accounts=QUEUE, reason="policy",
       rival="overload: the device is full, whichever request is admitted", rival_key="overload")  # fmt: skip
def admission_policy(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait because the policy says so, not because a place, tokens or blocks are short."""
    waited, batch = facts.waits.get("policy", 0.0), facts.steps.mean_batch if facts.steps is not None else None
    name, limit = str(facts.engine.get("policy") or "fcfs"), facts.engine.get("max_long_prefills")
    by_limit = name not in HOLDS_BACK
    if by_limit and not limit:
        return None
    why = f"at most {limit} long prompts are computed at a time" if by_limit else HOLDS_BACK[name]
    cap, best = facts.engine.get("max_num_seqs"), best_load(facts)
    room = f", while {batch:.1f} of {cap} places were taken" if cap and batch is not None else ""
    settings = {"max_long_prefills": 2 * int(limit)} if by_limit else policy("fcfs", facts)
    fixes = [settings]
    if by_limit:
        fixes += [{"max_long_prefills": None, "long_prefill_tokens": None}, {"max_long_prefills": 4 * int(limit)}]
    return Proposal(
        object="limit of long prompts (max_long_prefills)" if by_limit else "admission policy",
        cause=f"{why}{room}",
        evidence=[
            *excess_evidence(excess, QUEUE),
            evidence(f"{waited:.0%} of the waiting was for the policy: neither a place, nor tokens, nor KV blocks were "
                     "short", waited, "share", "requests: waits; steps: refusals", supports=waited >= MOSTLY, weight=2),
            *([load_evidence(f"load / capacity is {load(facts):.2f}, and {best:.2f} at the best batch", best,
                             supports=best < FULL)] if best == best else []),
        ],
        measurement=f"the same scenario with {settings_text(settings)}",
        settings=settings,
        if_cause=f"waiting for the policy falls from {waited:.0%} to none",
        if_rival=f"{missing_share(excess)} stays, and the waiting is for places or tokens instead",
        fixes=tuple(Change(settings=each) for each in fixes),
        rival_fix=Change(device_speed=2.0),
    )  # fmt: skip


@cause(lifecycles=("request",), object="scheduling policy", kind="policy", needs=("excess", "steps"),
       rival="overload: in any order somebody is late", rival_key="overload")  # fmt: skip
def scheduling_policy(facts: Facts, excess: Excess) -> Proposal | None:
    """The order in which requests are served makes some of them late that another order would serve in time."""
    name = str(facts.engine.get("policy") or "fcfs")
    if name not in ORDERS:
        return None
    overtaken, starved = _overtaken(facts, excess), facts.steps.starved_share
    if name == "prefill-first":
        size, claims = starved, {INTERFERENCE: 1.0}
        fact = evidence(f"in {starved:.0%} of the steps' time requests that decode are left out for others' prompts",
                        starved, "share", "steps: request_ids, kinds", supports=starved >= 0.1, weight=2)  # fmt: skip
    else:
        size = _in_order_share(overtaken)
        claims = dict.fromkeys(CONTENTION, size)
        fact = evidence(f"{overtaken:.1f} requests that came later got a place before a late one, on average",
                        overtaken, "requests", "requests: arrived_ns, scheduled_ns",
                        supports=overtaken >= OVERTAKEN, weight=2)  # fmt: skip
    if size < 0.05 or sum(excess.share(each) * part for each, part in claims.items()) < 0.1:
        return None
    others = [each for each in ("fcfs", "shortest-prefill-first", "fair-share") if each != name]
    return Proposal(
        cause=f"policy {name}: {ORDERS[name]}",
        evidence=[*excess_evidence(excess, tuple(claims)), fact],
        measurement="the same scenario in order of arrival",
        settings=policy("fcfs", facts),
        if_cause=f"the requests that are late now are served in time, and {missing_share(excess)} falls",
        if_rival=f"others are late instead, and {missing_share(excess)} stays",
        claims=claims,
        fixes=tuple(Change(settings=policy(each, facts)) for each in others),
        rival_fix=Change(device_speed=2.0),
    )


@cause(lifecycles=("request", "compute"), object="order of the queue", kind="policy", needs=("excess", "steps"),
       rival="overload: in any order somebody is late", rival_key="overload")  # fmt: skip
def head_of_line(facts: Facts, excess: Excess) -> Proposal | None:
    """A few requests with huge prompts, or one class, stand before the others and take the steps."""
    blamed = _huge_ahead(facts, excess)
    if blamed is None:
        return None
    name = str(facts.engine.get("policy") or "fcfs")
    longest = int(blamed.prompt_tokens)
    typical = float(facts.rows.loc[excess.missing].server_prompt_tokens.astype("float64").median())
    budget = facts.token_budget or USUAL_BUDGET
    one = {"max_long_prefills": 1, "long_prefill_tokens": max(SMALLEST_BUDGET, int(2 * typical))}
    short_first = [policy("shortest-prefill-first", facts)] if name != "shortest-prefill-first" else []
    chunks = (max(SMALLEST_BUDGET, budget // 4), tokens_within_tpot(facts))
    first, *rest = (*short_first, one)
    fixes = [
        first,
        *(one | {"max_prefill_chunk_tokens": min(chunk, budget)} for chunk in dict.fromkeys(chunks)),
        *(each | {"max_prefill_chunk_tokens": min(chunks)} for each in short_first),
        *rest,
        *({"max_prefill_chunk_tokens": chunk} for chunk in (budget // 2, budget // 4) if chunk >= SMALLEST_BUDGET),
    ]
    return Proposal(
        cause=f"{blamed.who} stand before the others: {blamed.share:.0%} of the waiting of late requests is for them",
        evidence=[
            *excess_evidence(excess, CONTENTION),
            evidence(f"{blamed.share:.0%} of the waiting of late requests was caused by {blamed.who}, which are "
                     f"{blamed.of_requests:.0%} of the requests", blamed.share, "share",
                     "steps: request_ids, new_tokens, refusals; requests: ledger_*_ns", weight=2),
            evidence(f"their prompts have {longest:,} tokens at the median, those of late requests {typical:,.0f}",
                     longest / max(typical, 1), "ratio", "requests: prompt_tokens", supports=longest >= 2 * typical),
            *_put_first(facts, excess, name),
        ],
        measurement=f"the same scenario with {'short prompts first' if short_first else 'one long prompt at a time'}",
        settings=first,
        if_cause=f"{missing_share(excess)} falls, and only the long prompts wait longer",
        if_rival=f"{missing_share(excess)} stays",
        claims=dict.fromkeys(CONTENTION, blamed.share),
        fixes=tuple(Change(settings=each) for each in fixes),
        rival_fix=Change(device_speed=2.0),
        request_ids=blamed.request_ids,
    )  # fmt: skip


@cause(lifecycles=("request",), object="share of a tenant", kind="policy", needs=("excess", "steps"),
       rival="overload by all tenants together", rival_key="overload")  # fmt: skip
def tenant_share(facts: Facts, excess: Excess) -> Proposal | None:
    """One tenant sends so much that the requests of the others wait for it."""
    if facts.engine.get("policy") == "fair-share" or facts.rows.tenant.nunique() < 2:
        return None
    found = [each for each in blamed_on(facts, excess, "tenant") if each.share >= MOSTLY]
    if not found or not found[0].of_others:
        return None
    blamed = found[0]
    fair = 1 / facts.rows.tenant.nunique()
    work = _share_of_tokens(facts, blamed.name)
    return Proposal(
        object=f"share of tenant {blamed.name}",
        cause=f"tenant {blamed.name} takes {work:.0%} of the tokens, and the others wait for it",
        evidence=[
            *excess_evidence(excess, CONTENTION),
            evidence(f"{blamed.share:.0%} of the waiting of late requests, most of them of other tenants, was for "
                     f"{blamed.who}", blamed.share, "share", "steps: request_ids, refusals; requests: ledger_*_ns",
                     weight=2),
            evidence(f"it sends {work:.0%} of the tokens; an equal share would be {fair:.0%}", work, "share",
                     "requests: tenant, prompt_tokens, output_tokens", supports=work > 1.25 * fair, weight=2),
        ],
        measurement="the same scenario with a fair share for each tenant",
        settings=policy("fair-share", facts),
        if_cause=f"the other tenants' requests are served in time, and those of {blamed.name} wait",
        if_rival=f"{missing_share(excess)} stays for every tenant",
        change=f"policy=fair-share, or a limit of requests for tenant {blamed.name}",
        claims=dict.fromkeys(CONTENTION, blamed.share),
        fixes=(Change(settings=policy("fair-share", facts)),),
        rival_fix=Change(device_speed=2.0),
        request_ids=blamed.request_ids,
    )  # fmt: skip


def _huge_ahead(facts: Facts, excess: Excess) -> Blamed | None:
    """The class, or else the band of lengths, that caused most of the waiting of late requests of other groups, if its
    prompts are far longer than theirs."""
    typical = float(facts.rows.loc[excess.missing].server_prompt_tokens.astype("float64").median())
    for trait in ("klass", "band"):
        for each in blamed_on(facts, excess, trait):
            if each.share >= 0.3 and each.of_others and each.prompt_tokens >= LONGER * typical:
                return each
    return None


def _put_first(facts: Facts, excess: Excess, name: str) -> list[Evidence]:
    """Against a queue whose head came first: a policy that lets later arrivals go ahead."""
    overtaken = _overtaken(facts, excess) if name in ORDERS else 0.0
    if overtaken < OVERTAKEN:
        return []
    return [evidence(f"{overtaken:.1f} requests that came later went ahead of a late one, on average: policy {name} "
                     "puts them there", overtaken, "requests", "requests: arrived_ns, scheduled_ns", supports=False,
                     weight=2)]  # fmt: skip


def _overtaken(facts: Facts, excess: Excess) -> float:
    """Requests that came after a late one and got a place before it, on average."""
    rows = facts.rows[facts.rows.scheduled_ns.notna() & facts.rows.arrived_ns.notna()].sort_values("arrived_ns")
    placed = rows.scheduled_ns.to_numpy(dtype="float64")
    late = np.isin(rows.index.to_numpy(), excess.missing.to_numpy())
    counts = [int((placed[at + 1 :] < placed[at]).sum()) for at in np.flatnonzero(late)]
    return float(np.mean(counts)) if counts else 0.0


def _in_order_share(overtaken: float) -> float:
    """The part of the waiting that the order explains: of k overtaking requests and one's own turn, k are its doing."""
    return overtaken / (1.0 + overtaken)


def _share_of_tokens(facts: Facts, tenant: str) -> float:
    tokens = facts.rows[["server_prompt_tokens", "output_tokens"]].astype("float64").fillna(0).sum(axis=1)
    return float(tokens[facts.rows.tenant == tenant].sum() / max(tokens.sum(), 1.0))
