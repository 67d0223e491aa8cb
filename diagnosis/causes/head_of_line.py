"""A few requests with huge prompts, or one class, stand before the others and take the steps."""

from sojourn.diagnosis.cause import Cause, Change, Client, Evidence, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import tightest
from sojourn.diagnosis.proposal import CONTENTION
from sojourn.diagnosis.statements.blame import Blamed, blamed_on
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.scheduling import ORDERS, OVERTAKEN, overtaken_share, policy
from sojourn.diagnosis.statements.token_budget import SMALLEST_BUDGET, tokens_within
from sojourn.diagnosis.symptom_tree.reading import Reading

LONGER = 4.0  # times the median prompt of the late requests: what such a prompt takes, several of theirs could share
USUAL_BUDGET = 512  # tokens of a step, where nobody recorded any
LONG_PROMPT = 4.0  # times the median prompt: it fills steps that the others would share


def read_records(facts: Records, excess: Excess) -> Proposal | None:
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


def _huge_ahead(facts: Records, excess: Excess) -> Blamed | None:
    """The class, or else the band of lengths, that caused most of the waiting of late requests of other groups, if its
    prompts are far longer than theirs."""
    typical = float(facts.rows.loc[excess.missing].server_prompt_tokens.astype("float64").median())
    for trait in ("klass", "band"):
        for each in blamed_on(facts, excess, trait):
            if each.share >= 0.3 and each.of_others and each.prompt_tokens >= LONGER * typical:
                return each
    return None


def _put_first(facts: Client, excess: Excess, name: str) -> list[Evidence]:
    """Against a queue whose head came first: a policy that lets later arrivals go ahead."""
    overtaken = overtaken_share(facts, excess) if name in ORDERS else 0.0
    if overtaken < OVERTAKEN:
        return []
    return [evidence(f"{overtaken:.1f} requests that came later went ahead of a late one, on average: policy {name} "
                     "puts them there", overtaken, "requests", "requests: arrived_ns, scheduled_ns", supports=False,
                     weight=2)]  # fmt: skip


def tokens_within_tpot(facts: Records) -> int:
    """As `tokens_within` the tightest time per token; SMALLEST_BUDGET where nothing bounds them."""
    bound = tightest(facts, "tpot_ms")
    if bound is None or facts.steps is None or facts.steps.model is None:
        return SMALLEST_BUDGET
    return tokens_within(facts, bound)


def show_longest_prompt(facts: Client) -> Reading | None:
    tokens = facts.rows.server_prompt_tokens.astype("float64").fillna(facts.rows.prompt_tokens.astype("float64"))
    if not tokens.notna().any():
        return None
    longest, median = float(tokens.max()), float(tokens.median())
    return Reading(
        f"the longest prompt has {longest:,.0f} tokens, the median {median:,.0f}",
        longest < LONG_PROMPT * median,
        "requests: prompt_tokens",
    )


CAUSE = Cause(
    key="head_of_line",
    lifecycles=("request", "compute"),
    object="order of the queue",
    kind="policy",
    rival="overload: in any order somebody is late",
    rival_key="overload",
    name="head of the queue",
    asks="Does one huge prompt hold all others up?",
    measurement="the same scenario without its longest prompts",
    figures=(show_longest_prompt,),
    booked=CONTENTION,
    complaints={"high_ttft": 9, "high_itl": 3, "vram_fills_quickly": 3, "product_latency_poor": 3},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
