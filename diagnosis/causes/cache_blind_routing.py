"""Prompts go to a server that does not hold their beginning, while another server does."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import WAITS
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.fleet import flags, in_words, other_servers
from sojourn.diagnosis.statements.prefixes import PROMPT_ACCOUNTS, WORTH_SHARING
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, PREFILL_TIME, Reading

CACHE_AWARE = {"vllm-router": ("kv_aware", "cache_aware", "consistent_hash"), "ray": ("consistent_hash",)}
HASHES = "requests: server, prompt_block_hashes, output_block_hashes, prefix_outcomes"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    fleet = facts.fleet()
    pooled = None if fleet is None else fleet.pooled
    if fleet is None or pooled is None or pooled.fleet.lost_share < WORTH_SHARING:
        return None
    use = pooled.fleet
    part = min(1.0, use.lost_tokens / max(use.prompt_tokens - use.hit_tokens, 1))
    rates = ", ".join(f"{each.server} {each.hit_rate:.0%}" for each in pooled.servers)
    policies = other_servers(CACHE_AWARE, fleet)
    is_aware = fleet.policy in CACHE_AWARE.get(fleet.router, ())
    return Proposal(
        cause=f"{use.lost_share:.0%} of the prompt tokens were in the cache of another server: the fleet hits "
        f"{use.hit_rate:.0%}, one cache of all servers would hit {use.pooled_rate:.0%}",
        evidence=[
            evidence(f"routing lost {use.lost_tokens:,} prompt tokens, about {use.lost_ns / 1e9:.1f} s of prefill",
                     use.lost_share, "share", HASHES, weight=3),
            evidence(f"hit rates are {rates}; one cache of all would hit {use.pooled_rate:.0%}",
                     use.pooled_rate - use.hit_rate, "share", HASHES),
            evidence(f"eviction cost {use.evicted_tokens:,} tokens on the servers that were chosen",
                     use.evicted_tokens / max(use.lost_tokens, 1), "ratio", HASHES,
                     supports=use.evicted_tokens < use.lost_tokens),
            *([evidence(f"the policy {fleet.policy} looks at caches already", 1, "policy", "run.json: router",
                        supports=False, weight=2)] if is_aware else []),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
        ],
        measurement=f"the same scenario with {flags(policies)}",
        if_cause=f"cached tokens rise from {use.hit_rate:.0%} towards {use.pooled_rate:.0%} of the prompts",
        if_rival=f"cached tokens stay at {use.hit_rate:.0%}, and {missing_share(excess)} with them",
        claims=dict.fromkeys(PROMPT_ACCOUNTS, part),
        change=f"a policy that looks at caches or keeps sessions together ({in_words(policies)})",
        fixes=(Change(routing="prefix-aware"), Change(routing="consistent-hash")),
    )  # fmt: skip


def show_lost_by_routing(facts: Records) -> Reading | None:
    """One server holds all that was ever computed."""
    fleet = facts.fleet()
    if fleet is None or fleet.pooled is None:
        return None
    use = fleet.pooled.fleet
    return Reading(
        f"{use.lost_share:.0%} of the prompt tokens were in the cache of another server than the one that was chosen",
        use.lost_share < NEGLIGIBLE / 10,
        "requests: server, prompt_block_hashes",
        use.lost_share,
    )


CAUSE = Cause(
    key="cache_blind_routing",
    lifecycles=("memory", "request"),
    object="choice of the router",
    kind="policy",
    rival="a pool that is too small for what prompts share",
    rival_key="cache_thrash",
    of_fleet=True,
    asks="Are prompts sent to servers that do not hold their beginning?",
    measurement="the same scenario with a policy of the router that looks at caches",
    figures=(show_lost_by_routing,),
    booked=(*PREFILL_TIME, *WAITS),
    missing="hashes of KV blocks of several servers (requests: prompt_block_hashes)",
    complaints={"high_ttft": 13, "devices_do_not_help": 3},
    reads={Records: Rule(read_records, accounts=PROMPT_ACCOUNTS)},
)
