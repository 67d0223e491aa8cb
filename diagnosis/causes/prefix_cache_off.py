"""Prompts begin alike, and each pays for the beginning again, because the cache is off."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Client, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import declared_classes
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH, WAITS
from sojourn.diagnosis.statements import means
from sojourn.diagnosis.statements.accounts import DEFINING, lose_prompts
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.prefixes import (
    PROMPT_ACCOUNTS,
    WORTH_SHARING,
    claims_of_spared,
    missed_tokens,
    saved_share,
    spent_on_prompts,
)
from sojourn.diagnosis.statements.refutations import COUNTED_HITS, PROMPTS_BELOW_A_BLOCK
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, PREFILL_TIME, Reading


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    if facts.engine.get("prefix_caching") is not False:
        return None
    kv = facts.kv()
    share = kv.use.infinite_share if kv is not None and kv.use is not None else facts.declared_shared_share
    if share < WORTH_SHARING:
        return None
    saved = saved_share(kv, share) if kv is not None and kv.use is not None else share
    return Proposal(
        cause=f"{share:.0%} of the prompt tokens stand at the beginning of earlier prompts, and the cache is off",
        evidence=[
            *(missed_tokens(kv, "miss_disabled", "would have been hits if the cache were on")
              if kv is not None and kv.use is not None else
              [evidence(f"the scenario shares {share:.0%} of the prompt tokens", share, "share",
                        "run.json: scenario.workload", weight=2)]),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
        ],
        measurement="the same scenario with the prefix cache on",
        settings={"prefix_caching": True},
        if_cause=f"cached tokens rise to about {share:.0%} of the prompt",
        if_rival=f"cached tokens stay near 0%, and {missing_share(excess)} stays",
        claims=claims_of_spared(facts, saved),
        fixes=(Change(settings={"prefix_caching": True}),),
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Prompts take the time, and the server says that its prefix cache is off. Only a scenario shows repeats."""
    view = facts.server
    if excess.objective != "ttft_ms" or view.reported_settings.get("prefix_caching", "").lower() != "false":
        return None
    spent, work = spent_on_prompts(view, excess), means.prompt_work(view)
    shared = facts.declared_shared_share
    classes = declared_classes(facts.meta)  # of a trace there is none
    # Turns of a session repeat their history, which no class declares as shared
    known = shared >= WORTH_SHARING or (bool(classes) and not any(each.get("session") for each in classes))
    if (known and shared < WORTH_SHARING) or spent < EXPLAINS_ENOUGH or work is None or work < means.PROMPT_WORK:
        return None
    repeats = (
        evidence(f"the scenario shares {shared:.0%} of the prompt tokens", shared, "share",
                 "run.json: scenario.workload", weight=DEFINING)
        if known else
        evidence("whether prompts repeat is in no metric of this server", 0.0, "unknown", means.COUNTERS,
                 supports=False)
    )  # fmt: skip
    on = view.settings.get("prefix cache", "the prefix cache on")
    return Proposal(
        cause=f"prompts are computed whole, as the prefix cache is off: they are {work:.0%} of the computed tokens",
        evidence=[
            evidence("the server says that its prefix cache is off", 0.0, "setting", means.GAUGES, weight=DEFINING),
            evidence(f"{spent:.0%} of {means.quantity(excess)} is queue and prefill, on average over all requests",
                     spent, "share", means.HISTOGRAMS),
            repeats,
        ],
        measurement=f"one replica with {on}: its hits tell how much of the prompts repeats",
        settings={},
        if_cause=f"a part of the prompts hits, and {missing_share(excess)} falls",
        if_rival=f"nothing hits, and {missing_share(excess)} stays",
        change=on,
        explained=spent * shared if known else spent,
        gain=means.time_gained(view, f"{spent:.0%} in queue and prefill"),
    )  # fmt: skip


def show_prefixes_repeat(facts: Accounts) -> Reading | None:
    """What a cache without limit would have hit, against what was hit."""
    if facts.cached_share is None:
        return None
    ideal = max(facts.prefix.infinite_share if facts.prefix is not None else 0.0, facts.declared_shared_share)
    gap = max(0.0, ideal - facts.cached_share)
    return Reading(
        f"{facts.cached_share:.0%} of the prompt tokens came from the cache, and a cache without limit "
        f"would have had {ideal:.0%}",
        gap < NEGLIGIBLE,
        "requests: cached_tokens, infinite_hit_tokens",
        gap,
    )


def show_prefix_cache_is_on(facts: Client) -> Reading | None:
    setting = facts.engine.get("prefix_caching")
    if setting is None:
        return None
    found = show_prefixes_repeat(facts) if isinstance(facts, Accounts) else None
    if setting:
        return Reading("prefix_caching is on", True, "run.json: engine")
    return found and Reading(f"prefix_caching is off; {found.statement}", found.rules_out, found.source, found.share)


CAUSE = Cause(
    key="prefix_cache_off",
    lifecycles=("memory", "compute", "request"),
    object="prefix cache",
    kind="policy",
    rival="cold traffic: prompts that only look alike",
    rival_key="own_prefill",
    name="prefix cache, off",
    asks="Is the prefix cache off, though prompts repeat?",
    measurement="the same scenario with prefix_caching=true",
    figures=(show_prefix_cache_is_on,),
    booked=(*PREFILL_TIME, *WAITS),
    complaints={"high_ttft": 3, "vram_fills_quickly": 6, "product_latency_poor": 2},
    reads={
        Records: Rule(read_records, accounts=PROMPT_ACCOUNTS),
        Accounts: lose_prompts(
            outcome="miss_disabled",
            words="the prefix cache is off",
            change="prefix_caching=true",
            settings=lambda facts: {"prefix_caching": True},
            rival="cold traffic",
            rival_key="",
        ),
        Means: Rule(
            read_means,
            rival="prompts that share nothing",
            rival_key="overload",
            refuted_by=(COUNTED_HITS, PROMPTS_BELOW_A_BLOCK),
        ),
    },
)
