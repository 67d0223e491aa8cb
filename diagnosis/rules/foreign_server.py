"""Causes that a server's own metrics can name: what limits the queue, as far as gauges and counters show it.

These causes know means over all requests and gauges once a second. They say what was seen beside the waiting, never
that nothing else could have been the cause; no such metric shows whether the device had room for more.
"""

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts, declared_classes
from sojourn.diagnosis.foreign_server import span_share
from sojourn.diagnosis.rules.arrivals import OFFERED_LOAD
from sojourn.diagnosis.rules.cause import EXPLAINS_ENOUGH, Gain, Proposal, cause
from sojourn.diagnosis.rules.shared_evidence import missing_share
from sojourn.diagnosis.rules.without_steps import DEFINING, batch_gain_evidence, is_saturated
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.interop.sources.pressure import KV_FULL
from sojourn.interop.sources.translate import of_family
from sojourn.interop.sources.view import ServerView

FEWEST_SAMPLES = 3  # of a gauge with requests waiting: one or two may be chance
MOSTLY = 0.5  # of those samples
AT_ONE_SIZE = 0.8  # ... with as many running as ever: a batch that grows and shrinks has no limit that shows
PREEMPTED_OFTEN = 0.1  # preemptions a finished request
GAUGES, HISTOGRAMS, COUNTERS = "scrapes: gauges", "scrapes: histograms", "scrapes: counters"
PROMPT, OUTPUT = "sojourn_token_prompt_tokens_total", "sojourn_token_generated_tokens_total"
PROMPT_WORK = 0.5  # of the tokens that are computed: below it prompts are no large part of what steps do
STALLED_TIME = 0.2  # of the time between tokens, at least: less is no great part of what a request waits
# A prefix is worth a cache when it is a fifth of the prompts, and the cache fails when it gives less than half of that.
WORTH_SHARING = 0.2
CACHE_WORKS = 0.5


@cause(lifecycles=("memory", "request"), object="KV block pool", kind="capacity", reads="metrics",
       needs=(), rival="overload: the device is full, and the cache fills because of it",
       symptom="vram_fills_quickly")  # fmt: skip
def kv_pool(facts: Facts, excess: Excess | None) -> Proposal | None:
    """The KV cache is full while requests wait, or running requests lose theirs."""
    view = facts.server
    full_at = view.waiting.kv_full_at if view.waiting is not None else KV_FULL
    if view.kv_largest is None or view.kv_largest < full_at:
        return None
    queue, preemptions = view.span("request.queue"), view.preemptions or 0.0
    waited = (view.waiting.with_kv_full or 0.0) if view.waiting is not None else 0.0
    often = view.finished and preemptions >= PREEMPTED_OFTEN * view.finished
    waits = waited >= MOSTLY and (excess is None or span_share(queue, excess) >= EXPLAINS_ENOUGH)
    if not (waits or (preemptions if excess is None else often)):
        return None
    settings = view.settings.get("KV block pool", "the server's setting for KV memory")
    queued = f"{queue.mean_ms:,.0f} ms" if queue is not None else "the time in the queue"
    return Proposal(
        cause=f"the KV cache has no room for a further prompt while requests wait: {view.kv_largest:.0%} at its peak, "
        f"{preemptions:,.0f} preemptions",
        evidence=[
            *_queue_evidence(view, excess),
            evidence(f"{waited:.0%} of the samples with requests waiting show a KV use of at least {full_at:.0%}",
                     waited, "share", GAUGES, supports=waited >= MOSTLY),
            evidence(f"{preemptions:,.0f} preemptions, {view.finished or 0:,.0f} requests finished", preemptions,
                     "preemptions", COUNTERS, supports=preemptions > 0),
        ],
        measurement=f"the same scenario with more room for KV ({settings})",
        settings={},
        if_cause=f"preemptions fall from {preemptions:,.0f} to 0, and the mean queue time of {queued} with them",
        if_rival=f"the KV use falls, and {missing_share(excess)} stays",
        change=f"more room for KV: {settings}; or shorter contexts, or fewer requests at a time",
        gain=_gain(view, f"mean queue time, {queued}"),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object="batch cap", kind="policy", reads="metrics",
       rival="overload: the device is full at any batch")  # fmt: skip
def batch_cap(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait while the KV cache has room and the batch stays at one size: something caps it."""
    view, waiting, queue = facts.server, facts.server.waiting, facts.server.span("request.queue")
    if waiting is None or waiting.samples < FEWEST_SAMPLES or span_share(queue, excess) < EXPLAINS_ENOUGH:
        return None
    if (waiting.with_kv_free or 0.0) < MOSTLY or (waiting.at_largest_batch or 0.0) < AT_ONE_SIZE:
        return None
    if is_saturated(facts):
        return None
    batch, setting = waiting.largest_batch, view.settings.get("batch cap", "the limit on running requests")
    larger, queued = f"{setting} above {batch:,.0f}", f"mean queue time of {queue.mean_ms:,.0f} ms"
    return Proposal(
        cause=f"up to {waiting.largest:,.0f} requests wait while never more than {batch:,.0f} run and the KV cache has "
        "room: the batch is capped",
        evidence=[
            *_queue_evidence(view, excess),
            evidence(f"{waiting.with_kv_free:.0%} of the {waiting.samples} samples with requests waiting show room for "
                     "more in the KV cache", waiting.with_kv_free, "share", GAUGES),
            evidence(f"{waiting.at_largest_batch:.0%} of them show as many running as ever, {batch:,.0f}",
                     waiting.at_largest_batch, "share", GAUGES),
            *batch_gain_evidence(facts, wanted=True),
        ],
        measurement=f"the same scenario with a larger batch ({larger})",
        settings={},
        if_cause=f"more than {batch:,.0f} run at a time, and the {queued} falls",
        if_rival=f"more run at a time, each token takes longer, and {missing_share(excess)} stays",
        change=larger,
        gain=_gain(view, f"mean queue time, {queue.mean_ms:,.0f} ms"),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object=OFFERED_LOAD, kind="capacity", reads="metrics",
       rival="a limit on the batch", rival_key="batch_cap")  # fmt: skip
def overload(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait, and more of them at a time gave hardly more tokens, or nobody has seen what they give."""
    view, waiting, queue = facts.server, facts.server.waiting, facts.server.span("request.queue")
    if waiting is None or waiting.samples < FEWEST_SAMPLES:
        return None
    unseen = facts.batch_gain is None and (waiting.with_kv_free or 0.0) >= MOSTLY
    if not (is_saturated(facts) or unseen):
        return None
    if (view.preemptions or 0.0) >= PREEMPTED_OFTEN * (view.finished or 1.0):  # more of them would take turns, too
        return None
    if span_share(queue, excess) < EXPLAINS_ENOUGH:
        return None
    return Proposal(
        cause=f"up to {waiting.largest:,.0f} requests wait, and "
        + ("the device may be full" if unseen else "a larger batch gives hardly more tokens: the device is full"),
        evidence=[*_queue_evidence(view, excess), *batch_gain_evidence(facts, wanted=False)],
        measurement="the same load at half the rate",
        settings=None,
        if_cause=f"nobody waits, and the mean queue time of {queue.mean_ms:,.0f} ms goes",
        if_rival=f"requests still wait for each other, and {missing_share(excess)} stays",
        change="fewer requests, or more devices",
        gain=_gain(view, f"mean queue time, {queue.mean_ms:,.0f} ms"),
    )


@cause(lifecycles=("memory", "compute", "request"), object="prefix cache", kind="policy",
       reads="metrics", rival="cold traffic: prompts that only look alike")  # fmt: skip
def prefix_recomputed(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts begin alike as the scenario declares it, and the prefix cache had less than half of that."""
    view, shared = facts.server, facts.declared_shared_share
    if view.hit_rate is None or shared < WORTH_SHARING or view.hit_rate >= CACHE_WORKS * shared:
        return None
    spent = sum(span_share(view.span(name), excess) for name in ("compute.prefill", "request.queue"))
    if spent < EXPLAINS_ENOUGH:
        return None
    cause, change = _why_no_hits(facts, view)
    return Proposal(
        cause=f"{shared:.0%} of the prompt tokens are alike between requests, and {cause}",
        evidence=[
            evidence(f"the scenario shares {shared:.0%} of the prompt tokens; {view.hit_rate:.0%} of the looked-up "
                     "tokens were hits", view.hit_rate, "share", "run.json: scenario.workload; scrapes: counters"),
            evidence(f"{spent:.0%} of {_quantity(excess)} is queue and prefill, on average over all requests", spent,
                     "share", HISTOGRAMS),
        ],
        measurement=f"the same scenario with {change}",
        settings={},
        if_cause=f"hits rise to about {shared:.0%} of the prompt tokens",
        if_rival=f"hits stay near {view.hit_rate:.0%}, and {missing_share(excess)} stays",
        change=change,
        gain=_gain(view, f"{spent:.0%} in queue and prefill"),
    )  # fmt: skip


@cause(lifecycles=("memory", "compute", "request"), object="prefix cache", kind="policy", reads="metrics",
       rival="prompts that share nothing", rival_key="overload")  # fmt: skip
def prefix_cache_off(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts take the time, and the server says that its prefix cache is off. Whether they repeat is in no metric."""
    view = facts.server
    if excess.objective != "ttft_ms" or view.reported_settings.get("prefix_caching", "").lower() != "false":
        return None
    spent, work = sum(span_share(view.span(name), excess) for name in ("compute.prefill", "request.queue")), _work(view)
    if facts.declared_shared_share or spent < EXPLAINS_ENOUGH or work is None or work < PROMPT_WORK:
        return None
    on = view.settings.get("prefix cache", "the prefix cache on")
    return Proposal(
        cause=f"prompts are computed whole, as the prefix cache is off: they are {work:.0%} of the computed tokens",
        evidence=[
            evidence("the server says that its prefix cache is off", 0.0, "setting", GAUGES, weight=DEFINING),
            evidence(f"{spent:.0%} of {_quantity(excess)} is queue and prefill, on average over all requests", spent,
                     "share", HISTOGRAMS),
            evidence("whether prompts repeat is in no metric of this server", 0.0, "unknown", COUNTERS, supports=False),
        ],
        measurement=f"one replica with {on}: its hits tell how much of the prompts repeats",
        settings={},
        if_cause=f"a part of the prompts hits, and {missing_share(excess)} falls",
        if_rival=f"nothing hits, and {missing_share(excess)} stays",
        change=on,
        gain=_gain(view, f"{spent:.0%} in queue and prefill"),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object="token budget of a step", kind="policy", reads="metrics",
       rival="a batch that is too large", rival_key="slow_decode")  # fmt: skip
def token_budget_large(facts: Facts, excess: Excess) -> Proposal | None:
    """Most tokens come quickly and some very late, and prompts are most of what steps compute: steps with long prompts
    stall the tokens of the others."""
    view = facts.server
    stalls, work = view.stalls, _work(view)
    if excess.objective != "tpot_ms" or stalls is None or work is None or work < PROMPT_WORK:
        return None
    if (view.preemptions or 0.0) >= PREEMPTED_OFTEN * (view.finished or 1.0):  # it delays tokens, too
        return None
    if stalls.share < STALLED_TIME:
        return None
    budget = view.settings.get("token budget", "the token budget of a step")
    return Proposal(
        cause=f"steps with long prompts stall the others' tokens: half of the tokens come within "
        f"{1e3 * stalls.usual_s:,.0f} ms, and others take more than {1e3 * stalls.above_s:,.0f} ms",
        evidence=[
            evidence(f"at least {stalls.share:.0%} of the time between tokens is in gaps above "
                     f"{1e3 * stalls.above_s:,.0f} ms", stalls.share, "share", HISTOGRAMS, weight=DEFINING),
            evidence(f"{work:.0%} of the tokens that steps compute are of prompts", work, "share", COUNTERS),
        ],
        measurement=f"the same load with half of {budget}",
        settings={},
        if_cause=f"the longest gaps halve, and {missing_share(excess)} falls",
        if_rival=f"the gaps stay, and {missing_share(excess)} with them",
        change=f"a smaller token budget: {budget}",
        gain=_gain(view, f"{stalls.share:.0%} of the time between tokens"),
    )  # fmt: skip


def _work(view: ServerView) -> float | None:
    """The share of prompts in the tokens that the server computed; None where it does not count them."""
    prompt, output = (of_family(view.totals, name) for name in (PROMPT, OUTPUT))
    if prompt is None or not output:
        return None
    computed = prompt * (1 - (view.hit_rate or 0.0))
    return computed / (computed + output)


def _why_no_hits(facts: Facts, view: ServerView) -> tuple[str, str]:
    """What is known of the reason, and what to change."""
    on = view.settings.get("prefix cache", "the prefix cache on")
    if view.reported_settings.get("prefix_caching", "").lower() == "false":
        return "the prefix cache is off", on
    block = view.reported_settings.get("block_size", "")
    shared = [int(klass.get("shared_prefix_tokens") or 0) for klass in declared_classes(facts.meta)]
    beginning = max(shared, default=0)  # of the requests of one class
    if block.isdigit() and beginning < int(block):
        cause = f"their common beginning of {beginning} tokens is less than a block of {block}, so none is shared"
        return cause, f"a smaller block ({view.settings.get('block', 'the block size')})"
    return f"the cache gave only {view.hit_rate:.0%}", f"{on} and, if it is on, more room for KV"


def _queue_evidence(view: ServerView, excess: Excess | None) -> list[Evidence]:
    queue = view.span("request.queue")
    if queue is None or excess is None:
        return []
    share = span_share(queue, excess)
    return [
        evidence(f"{share:.0%} of {_quantity(excess)} is {view.title}'s queue ({queue.mean_ms:,.0f} ms), on average "
                 "over all requests, late or not", share, "share", "scrapes: histograms",
                 supports=share >= EXPLAINS_ENOUGH)
    ]  # fmt: skip


def _quantity(excess: Excess) -> str:
    return "the time to first token" if excess.objective == "ttft_ms" else "the latency"


def _gain(view: ServerView, time: str) -> Gain:
    unseen = f"{view.title} does not show whether the device could serve more"
    return Gain(f"at most the {time}", basis=f"means over {view.finished or 0:,.0f} requests; {unseen}")
