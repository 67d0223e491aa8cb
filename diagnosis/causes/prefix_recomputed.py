"""Prompts begin alike as the scenario declares it, and the prefix cache had less than half of that."""

from sojourn.diagnosis.cause import Cause, Excess, Means, Proposal, Rule, evidence
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH
from sojourn.diagnosis.statements import prefixes
from sojourn.diagnosis.statements.excess import missing_share
from sojourn.diagnosis.statements.means import HISTOGRAMS, quantity, time_gained
from sojourn.diagnosis.statements.refutations import CACHED_PROMPTS
from sojourn.interop.sources.view import ServerView

# A prefix is worth a cache when it is a fifth of the prompts.
WORTH_SHARING = 0.2


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    view, shared = facts.server, facts.declared_shared_share
    if view.hit_rate is None or shared < WORTH_SHARING or view.hit_rate >= prefixes.CACHE_WORKS * shared:
        return None
    if prefixes.beginning_below_a_block(facts) is not None or prefixes.reuse_beyond_pool(facts) is not None:
        return None  # causes of their own
    spent = prefixes.spent_on_prompts(view, excess)
    if spent < EXPLAINS_ENOUGH:
        return None
    cause, change = _why_no_hits(view)
    return Proposal(
        cause=f"{shared:.0%} of the prompt tokens are alike between requests, and {cause}",
        evidence=[
            evidence(f"the scenario shares {shared:.0%} of the prompt tokens; {view.hit_rate:.0%} of the looked-up "
                     "tokens were hits", view.hit_rate, "share", "run.json: scenario.workload; scrapes: counters"),
            evidence(f"{spent:.0%} of {quantity(excess)} is queue and prefill, on average over all requests", spent,
                     "share", HISTOGRAMS),
        ],
        measurement=f"the same scenario with {change}",
        settings={},
        if_cause=f"hits rise to about {shared:.0%} of the prompt tokens",
        if_rival=f"hits stay near {view.hit_rate:.0%}, and {missing_share(excess)} stays",
        change=change,
        gain=time_gained(view, f"{spent:.0%} in queue and prefill"),
    )  # fmt: skip


def _why_no_hits(view: ServerView) -> tuple[str, str]:
    """What is known of the reason, and what to change."""
    on = view.settings.get("prefix cache", "the prefix cache on")
    if view.reported_settings.get("prefix_caching", "").lower() == "false":
        return "the prefix cache is off", on
    return f"the cache gave only {view.hit_rate:.0%}", f"{on} and, if it is on, more room for KV"


CAUSE = Cause(
    key="prefix_recomputed",
    lifecycles=("memory", "compute", "request"),
    object="prefix cache",
    kind="policy",
    rival="cold traffic: prompts that only look alike",
    reads={Means: Rule(read_means, refuted_by=(CACHED_PROMPTS,))},
)
