"""What prompts share, and what a prefix cache did with it."""

import math
from dataclasses import dataclass, replace

from sojourn.diagnosis.capacity import load
from sojourn.diagnosis.evidence import Client, Means, Records, declared_classes
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.foreign_server import span_share
from sojourn.diagnosis.kv_facts import KvFacts
from sojourn.diagnosis.memory_facts import ENOUGH
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH
from sojourn.diagnosis.statements import means
from sojourn.diagnosis.statements.accounts import DEFINING
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.interop.sources.view import ServerView

# Work on prompts, and the waits that it makes longer.
PROMPT_ACCOUNTS = ("compute.prefill", "request.interference", "request.queue", "memory.blocked")
NEARLY_ONE = 0.95  # of a load: above it the formula has waits that no run is long enough for
CACHE_WORKS = 0.5  # of what prompts share: a cache that gives less fails
WORTH_SHARING = 0.15  # of the prompt tokens: a hit of less changes a time to first token by less than its noise
FROZEN = 0.01  # of the looked-up tokens: hits that stopped
ONE_SHOT = 0.5  # of what was evicted and missed: taken by prompts that nobody asks for again
ROUND_BLOCKS = 16  # a suggestion is rounded up to a number that one would type
LRU = "lru"  # the policy by default
OUTCOMES = "requests: prefix_outcomes, infinite_hit_tokens"


def saved_share(kv: KvFacts, share: float) -> float:
    """Of the prompt tokens that are computed now, the part that a hit of `share` more of all would spare."""
    return min(1.0, share / max(1.0 - kv.use.hit_share, 1e-9))


def claims_of_hits(facts: Records, kv: KvFacts, share: float) -> dict[str, float]:
    """What a hit of `share` more of all prompt tokens spares."""
    return claims_of_spared(facts, saved_share(kv, share))


def claims_of_spared(facts: Records, saved: float) -> dict[str, float]:
    """Of each account of prompts, what goes with so much of their work: of waits more, the fuller the server was."""
    return dict.fromkeys(PROMPT_ACCOUNTS, _spared_waits(facts, saved)) | {"compute.prefill": saved}


def _spared_waits(facts: Records, saved: float) -> float:
    """By the mean wait in a queue with one server, which goes with ρ / (1 - ρ)."""
    now = load(facts) if facts.work is not None else math.nan
    if now != now:
        return saved
    then = load(facts, work=replace(facts.work, computed_tokens=max(1.0, facts.work.computed_tokens * (1 - saved))))
    before, after = (min(each, NEARLY_ONE) / (1 - min(each, NEARLY_ONE)) for each in (now, then))
    return max(saved, 1 - after / before) if before > 0 else saved


def beginning_below_a_block(facts: Means) -> int | None:
    """Tokens that the scenario says the requests of a class share, where no block holds so few; None elsewhere."""
    block = facts.server.reported_settings.get("block_size", "")
    beginning = max((int(each.get("shared_prefix_tokens") or 0) for each in declared_classes(facts.meta)), default=0)
    shares = facts.declared_shared_share >= WORTH_SHARING and block.isdigit()
    return beginning if shares and beginning < int(block) else None


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of all beginnings that a scenario reuses, and of the pool that is to keep them."""

    shared: int
    pool: int


def reuse_beyond_pool(facts: Means) -> Reuse | None:
    """None where the pool holds them, or one of the two is not known."""
    settings = facts.server.reported_settings
    blocks, size = (settings.get(name, "") for name in ("num_kv_blocks", "block_size"))
    shared = sum(
        int(each.get("shared_prefix_tokens") or 0) * int(each.get("num_shared_prefixes") or 1)
        for each in declared_classes(facts.meta)
    )
    if not blocks.isdigit() or not size.isdigit() or shared <= int(blocks) * int(size):
        return None
    return Reuse(shared, int(blocks) * int(size))


def spent_on_prompts(view: ServerView, excess: Excess) -> float:
    """The share of queue and prefill in what was late."""
    return sum(span_share(view.span(name), excess) for name in ("compute.prefill", "request.queue"))


@dataclass(frozen=True, slots=True)
class FallenHits:
    """The hits of a prefix cache fell at a moment, and prompts have taken the time since."""

    words: str
    evidence: list[Evidence]
    explained: float  # of the lost time: prompts that are computed since and were hits before
    work: str  # that came on top


def fallen_hits(view: ServerView, excess: Excess) -> FallenHits | None:
    """None where hits did not fall, or prompts and the queue take little of the time."""
    change = view.courses.hit_change
    spent = spent_on_prompts(view, excess)
    if change is None or excess.objective == "tpot_ms" or spent < EXPLAINS_ENOUGH:
        return None
    word = "stopped" if change.after < FROZEN else f"fell to {change.after:.0%}"
    lost = change.before - change.after
    return FallenHits(
        words=f"hits of the prefix cache {word} {change.ago_s:,.0f} s before the last page: they were "
        f"{change.before:.0%} of the prompt tokens until then",
        evidence=[
            evidence(f"{change.before:.0%} of the looked-up tokens hit before that moment, {change.after:.0%} since",
                     lost, "share", means.COUNTERS, weight=DEFINING),
            evidence(f"{spent:.0%} of {means.quantity(excess)} is queue and prefill, on average over all requests",
                     spent, "share", means.HISTOGRAMS),
        ],
        explained=spent * lost / (1 - change.after),
        work=f"{lost:.0%} of the prompts' work",
    )  # fmt: skip


def missed_tokens(kv: KvFacts, outcome: str, what: str) -> list[Evidence]:
    share = kv.use.outcomes.get(outcome, 0.0)
    return [
        evidence(f"{share:.0%} of the prompt tokens {what} (recorded as `{outcome}`)", share, "share", OUTCOMES,
                 weight=3),
        evidence(f"a cache without eviction would have hit {kv.use.infinite_share:.0%} of the prompt tokens; this one "
                 f"hit {kv.use.hit_share:.0%}", kv.use.hit_share, "share", OUTCOMES, weight=0),
    ]  # fmt: skip


def pool_for_reuse(kv: KvFacts) -> int:
    """Blocks that hold nearly all of what is asked for again, and beside it what requests that run hold."""
    running = 0.0 if kv.fragmentation is None else kv.fragmentation.pool_use * kv.pool_blocks
    if kv.curve is None:
        return 2 * kv.pool_blocks
    blocks = kv.curve.blocks_for()
    if blocks is None:
        # Twice the middle distance: half of what is asked for again lies beyond the middle, little beyond twice of it
        distance = kv.eviction.reuse_distance_p50_blocks if kv.eviction is not None else None
        blocks = max(int(kv.curve.blocks[-1]), int(2 * (distance or 0.0)))
    return math.ceil((max(blocks, kv.pool_blocks) + running) / ROUND_BLOCKS) * ROUND_BLOCKS


def hit_with(kv: KvFacts, blocks: int) -> float:
    """The share of the prompt tokens that a pool of so many blocks hits; beyond the curve nearly all that is shared."""
    if kv.curve is None or blocks > kv.curve.blocks[-1]:
        return ENOUGH * kv.use.infinite_share
    return kv.curve.hit_share(blocks)


def block_size(facts: Client, kv: KvFacts, size: int) -> dict[str, int]:
    """Another block size with the same room: a number of blocks that was chosen counts in blocks of the old size."""
    settings = {"block_size": size}
    if "num_kv_blocks" in facts.chosen:
        settings["num_kv_blocks"] = max(1, kv.pool_blocks * kv.block_size // size)
    return settings
