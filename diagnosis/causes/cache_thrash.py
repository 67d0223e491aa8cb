"""What prompts share is evicted before it is asked for again: the reuse does not fit into the pool."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Client, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.kv_facts import KvFacts
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH, WAITS
from sojourn.diagnosis.statements import means, prefixes
from sojourn.diagnosis.statements.accounts import DEFINING, lose_prompts, scale_setting
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.kv_memory import SameMemory, host_gib, is_sized_in_bytes
from sojourn.diagnosis.statements.refutations import NO_SIGN_OF_EVICTIONS, RATE_THAT_STAYS
from sojourn.diagnosis.symptom_tree.reading import EVICTED, KNOWN_OUTCOMES, PREFILL_TIME
from sojourn.interop.sources.view import ServerView
from sojourn.metrics.run.directory import section

MOSTLY = 0.5  # of the waiting


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    kv = facts.kv()
    if kv is None or kv.use is None or kv.eviction is None or kv.eviction.missed_share < prefixes.WORTH_SHARING:
        return None
    curve, lost = kv.curve, kv.eviction
    target = prefixes.pool_for_reuse(kv)
    hit = prefixes.hit_with(kv, target)
    chosen = {"num_kv_blocks", "kv_cache_gib", "memory_fraction"} & facts.chosen
    polluted = lost.one_shot_share >= prefixes.ONE_SHOT
    # The curve is of prefixes.LRU. What another policy gives away of it at this very size is no matter of size.
    in_this_pool = max(kv.use.hit_share, kv.curve.hit_share(kv.pool_blocks) if curve is not None else 0.0)
    is_lru = facts.engine.get("eviction_policy", prefixes.LRU) == prefixes.LRU
    by_policy = 0.0 if is_lru else in_this_pool - kv.use.hit_share
    host = host_tier(facts, target, kv.pool_blocks)
    more = tuple(Change(settings={"num_kv_blocks": size}) for size in (target, 2 * target) if size)
    # A tier keeps what nobody reads. Requests that run need blocks of the device.
    keeps_size = host is not None and is_sized_in_bytes(facts) and facts.waits.get("kv_blocks", 0.0) < MOSTLY
    return Proposal(
        kind="policy" if chosen else "capacity",
        cause=f"{lost.missed_share:.0%} of the prompt tokens were in the cache and had been evicted: a pool of "
        f"{kv.pool_blocks} blocks is smaller than the prefixes that are reused",
        evidence=[
            *prefixes.missed_tokens(kv, "miss_evicted", "had been in the cache and were evicted"),
            *([evidence(f"a pool of {target} blocks would have hit {hit:.0%} for the same requests in the same order",
                        hit, "share", "requests: resized_hit_tokens", supports=hit > kv.use.hit_share + 0.05,
                        weight=2)] if curve is not None else []),
            *([evidence(f"half of the reused blocks lie more than {lost.reuse_distance_p50_blocks:,.0f} blocks "
                        "back", lost.reuse_distance_p50_blocks, "blocks", "steps: reuse_distance_blocks",
                        supports=lost.thrashes)] if lost.reuse_distance_p50_blocks is not None else []),
            *([evidence(f"{lost.one_shot_share:.0%} of it was taken by prompts that share nothing: they pollute the "
                        "cache", lost.one_shot_share, "share", "requests: evicted_by, prefix_source", supports=False,
                        weight=3)] if polluted else []),
            *([evidence(f"LRU would have hit {in_this_pool:.0%} in a pool of this very size", in_this_pool, "share",
                        "requests: resized_hit_tokens", supports=False, weight=3)]
              if by_policy >= prefixes.WORTH_SHARING else []),
            *excess_evidence(excess, prefixes.PROMPT_ACCOUNTS),
        ],
        measurement=f"the same scenario with {'a tier in host memory' if keeps_size else 'a larger pool'}",
        # No target where nobody recorded how large the pool is
        settings=dict(host.fix.settings) if keeps_size else {"num_kv_blocks": target} if target else None,
        if_cause=f"cached tokens rise from {kv.use.hit_share:.0%} to about {hit:.0%} of the prompt",
        if_rival=f"cached tokens stay, and so does {missing_share(excess)}",
        change=_more_room(kv, target, host, host_first=keeps_size),
        claims=prefixes.claims_of_hits(facts, kv, max(0.0, hit - kv.use.hit_share - by_policy)),
        fixes=(host.fix,) if keeps_size else more,
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """The prefix cache hit until its pool was short, and hardly at all since. Why it stopped is in no metric."""
    view, fall = facts.server, prefixes.fallen_hits(facts.server, excess)
    if fall is None:
        return _read_small_pool(facts, excess)
    return Proposal(
        cause=fall.words,
        evidence=[
            *fall.evidence,
            evidence("whether prompts share less since then is in no metric of this server", 0.0, "unknown",
                     means.COUNTERS, supports=False),
        ],
        measurement="one prompt of two blocks or more, sent twice in a row: whether the second one hits",
        settings={},
        if_cause="the second one misses, or hits only at once: the cache lost what it had, or lost it soon",
        if_rival="the second one hits: prompts share less since that moment",
        change=f"what changed at that moment: other prompts, a filled pool ({_pool_setting(view)}), an offload, a "
        "restart of a router",
        explained=fall.explained,
        gain=means.time_gained(view, fall.work),
    )  # fmt: skip


def _read_small_pool(facts: Means, excess: Excess) -> Proposal | None:
    """The scenario reuses more than the pool holds, and the cache has less than half of what is shared."""
    view, shared, reuse = facts.server, facts.declared_shared_share, prefixes.reuse_beyond_pool(facts)
    spent = prefixes.spent_on_prompts(view, excess)
    if reuse is None or excess.objective == "tpot_ms" or spent < EXPLAINS_ENOUGH:
        return None
    if shared < prefixes.WORTH_SHARING or view.hit_rate is None or view.hit_rate >= prefixes.CACHE_WORKS * shared:
        return None
    missed = shared - view.hit_rate
    return Proposal(
        cause=f"a pool of {reuse.pool:,} tokens is smaller than the {reuse.shared:,} tokens of all shared beginnings: "
        "they are evicted before they come again",
        evidence=[
            evidence(f"the scenario shares {shared:.0%} of the prompt tokens; {view.hit_rate:.0%} of the looked-up "
                     "tokens were hits", view.hit_rate, "share", "run.json: scenario.workload; scrapes: counters",
                     weight=DEFINING),
            evidence(f"all shared beginnings have {reuse.shared:,} tokens, and the pool {reuse.pool:,}",
                     reuse.shared / reuse.pool, "ratio", "run.json: scenario.workload; scrapes: settings", weight=2),
            evidence(f"{spent:.0%} of {means.quantity(excess)} is queue and prefill, on average over all requests",
                     spent, "share", means.HISTOGRAMS),
        ],
        measurement="the same scenario with twice the pool",
        settings={},
        if_cause=f"hits rise towards {shared:.0%} of the prompt tokens",
        if_rival=f"hits stay near {view.hit_rate:.0%}, and {missing_share(excess)} stays",
        change=f"a larger pool: {_pool_setting(view)}; or a router that sends each beginning to one server",
        explained=spent * missed / (1 - view.hit_rate),
        gain=means.time_gained(view, f"{missed:.0%} of the prompts' work"),
    )  # fmt: skip


def _pool_setting(view: ServerView) -> str:
    return view.settings.get("KV block pool", "the server's setting for KV memory")


def _more_room(kv: KvFacts, target: int, host: SameMemory | None, *, host_first: bool) -> str:
    """The larger pool and the tier below it, in words; first what the memory of the device allows."""
    pool = f"num_kv_blocks={target} (now {kv.pool_blocks})" if target else "a larger pool"
    ways = [pool] if host is None else [host.words, pool] if host_first else [pool, host.words]
    return ", or ".join([*ways, "a cache that more servers share by prefix"])


def host_tier(facts: Client, target_blocks: int, pool_blocks: int) -> SameMemory | None:
    """Host memory that keeps what the pool evicts. None where there is a tier, or where a block's size is unknown."""
    of_token = section(facts.meta, "model_shape").get("kv_bytes_per_token")
    has_tier = any(facts.engine.get(name) is not None for name in ("kv_host_gib", "kv_disk_path", "kv_remote_url"))
    if has_tier or not of_token or not target_blocks or not pool_blocks:
        return None
    size = float(f"{max(host_gib(facts, target_blocks), 0.01):.2g}")
    words = f"kv_host_gib={size:g}: host memory keeps what the pool evicts"
    # How fast the tier would be was not measured: the room is taken for free.
    return SameMemory(words, Change(settings={"kv_host_gib": size}, kv_scale=max(1.1, target_blocks / pool_blocks)))


CAUSE = Cause(
    key="cache_thrash",
    lifecycles=("memory", "request"),
    object="prefix cache",
    kind="capacity",
    rival="cold traffic: the prompts share nothing with earlier ones",
    rival_key="prefix_order",
    name="prefix cache, too small",
    asks="Are prefixes evicted before they come again?",
    measurement="the same scenario with twice the num_kv_blocks",
    figures=(EVICTED,),
    booked=(*PREFILL_TIME, *WAITS),
    missing=KNOWN_OUTCOMES,
    complaints={"high_ttft": 4, "vram_fills_quickly": 4, "product_latency_poor": 3},
    reads={
        Records: Rule(read_records, accounts=prefixes.PROMPT_ACCOUNTS),
        Accounts: lose_prompts(
            outcome="miss_evicted",
            words="prefixes were evicted before their next use",
            change="a larger num_kv_blocks",
            settings=lambda facts: scale_setting(facts, "num_kv_blocks", 2),
            lifecycles=("memory", "compute", "request"),
            rival="cold traffic",
            rival_key="",
        ),
        Means: Rule(
            read_means,
            object="prefix cache",
            kind="fault",
            rival="prompts that share less from that moment on",
            refuted_by=(RATE_THAT_STAYS, NO_SIGN_OF_EVICTIONS),
        ),
    },
)
