"""What a page shows that contradicts a cause: lengths of prompts, counters of the cache and of preemptions, KV use.

A rule of means declares which of these refute it. So it need not look for what it would not explain.
"""

from sojourn.diagnosis.cause import Refutation
from sojourn.diagnosis.evidence import Means
from sojourn.diagnosis.statements.accounts import gains
from sojourn.diagnosis.statements.means import (
    FEWEST_SAMPLES,
    FULL_CORE,
    FULL_STEP,
    MOSTLY,
    PREEMPTED_OFTEN,
    PROMPT_WORK,
    TTFT,
    before_core,
    draft_counts,
    prompt_work,
    uneven_engines,
)
from sojourn.diagnosis.statements.prefixes import reuse_beyond_pool
from sojourn.interop.sources.pressure import GAPS, KV_FREE, PROMPTS
from sojourn.interop.sources.source import EXTERNAL_HITS, EXTERNAL_LOOKUPS, FRONT_CPU

FEW_COMPUTED = 64  # prompt tokens of a request: so many cost a step about as much as its decodes
GAINS_SOME = 0.05  # of the tokens that an external cache is asked for
EVEN_WORK = 1.1  # tokens of an engine over the mean: with no more it has a longer line because it is slow
ALIKE = ("p50", "p99")  # of the lengths of prompts: in one bucket where none is long beside the others
LARGEST_DEFAULT_BLOCK = 128  # tokens: of a larger one somebody chose, or a hybrid model needs, prompts may share less
TOGETHER = 2.0  # requests that ran at once: one alone shows no gap while its prompt is computed
MANY_STEPS, EVEN_STEPS = 8.0, 0.05  # that a prompt takes; of the time between tokens, in gaps that stall
GONE = 0.2  # of the last samples with a line: fewer are no line


def _short_prompts(facts: Means) -> str:
    longest = facts.server.longest_prompt
    if longest is None or longest > FULL_STEP:
        return ""
    return f"all prompts that ended have at most {longest:,.0f} tokens, which fill no step"


def _cached_prompts(facts: Means) -> str:
    prompts, hits = facts.server.latencies.get(PROMPTS), facts.server.hit_rate
    if prompts is None or not hits or prompts.mean * (1 - hits) > FEW_COMPUTED:
        return ""
    return f"the prefix cache has {hits:.0%} of the prompt tokens, so that steps compute few of them"


def _preempted(facts: Means) -> str:
    count, ended = facts.server.preemptions or 0.0, facts.server.finished or 0.0
    if count < PREEMPTED_OFTEN * max(ended, 1.0):
        return ""
    return f"{count:,.0f} preemptions beside {ended:,.0f} requests that ended: KV blocks are short"


def _full_pool(facts: Means) -> str:
    waiting = facts.server.waiting
    share = waiting.with_kv_full if waiting is not None else None
    return f"the KV cache is full in {share:.0%} of the samples with requests waiting" if (share or 0) >= MOSTLY else ""


def _line_that_empties(facts: Means) -> str:
    waiting = facts.server.waiting
    if waiting is None or waiting.since_first is None:
        return ""
    if waiting.lately is not None and waiting.lately < GONE:
        return "hardly a request waits now"
    if waiting.since_first >= MOSTLY:
        return ""
    return f"the line empties again: {1 - waiting.since_first:.0%} of the samples since the first have none"


def _line_that_went(facts: Means) -> str:
    waiting = facts.server.waiting
    if waiting is None or waiting.lately is None or waiting.lately >= GONE or facts.server.preemptions:
        return ""
    return "hardly a request waits now, and none was preempted"


def _batch_that_gains(facts: Means) -> str:
    return f"a larger batch gave {facts.batch_gain:.1f} times the tokens" if gains(facts) else ""


def _counted_hits(facts: Means) -> str:
    hits = facts.server.hit_rate
    return f"the page counts hits: {hits:.0%} of the looked-up tokens" if hits else ""


def _prompts_below_a_block(facts: Means) -> str:
    longest, block = facts.server.longest_prompt, facts.server.reported_settings.get("block_size", "")
    if longest is None or not block.isdigit() or longest > int(block):
        return ""
    return f"all prompts have at most {longest:,.0f} tokens, less than a block of {block}: none can be shared"


def _drafts_that_pay(facts: Means) -> str:
    drafts = draft_counts(facts.server)
    if drafts is None or facts.batch_gain is None or drafts.lost_share(facts.batch_gain) > 0:
        return ""
    return f"a step with drafts gives {1 + drafts.accepted:.1f} tokens, more than its further rows cost"


def _external_hits(facts: Means) -> str:
    asked, found = (facts.server.further.get(name, 0.0) for name in (EXTERNAL_LOOKUPS, EXTERNAL_HITS))
    if not asked or found < GAINS_SOME * asked:
        return ""
    return f"the external cache had {found / asked:.0%} of the tokens that it was asked for"


def _room_elsewhere(facts: Means) -> str:
    uneven = uneven_engines(facts.server)
    if uneven is None or uneven.work < EVEN_WORK:
        return ""
    return (
        f"engine {uneven.fullest.engine} has {uneven.times:.1f} times the mean number of requests, and engine "
        f"{uneven.emptiest.engine} has room"
    )


def _even_engines(facts: Means) -> str:
    uneven = uneven_engines(facts.server)
    if uneven is None or uneven.work >= EVEN_WORK:
        return ""
    return f"engine {uneven.fullest.engine} gets no more work than the others: it is slower, and its line is longer"


def _rate_that_stays(facts: Means) -> str:
    if facts.server.courses.hit_change is not None or reuse_beyond_pool(facts) is not None:
        return ""
    return "the hit rate did not fall at a moment"


def _no_evictions(facts: Means) -> str:
    """Cold prompts miss as evicted ones do. Only a pool under pressure before the fall speaks for evictions."""
    change = facts.server.courses.hit_change
    if change is None or change.preemptions or (change.kv_use or 0.0) > 1 - KV_FREE:
        return ""
    use = "no KV use is shown" if change.kv_use is None else f"KV use was at most {change.kv_use:.0%}"
    return (
        f"hits fell from {change.before:.0%} to {change.after:.0%} {change.ago_s:,.0f} s ago without a sign of "
        f"evictions ({use} until then, no preemption): prompts may share less since"
    )


def _evictions(facts: Means) -> str:
    change = facts.server.courses.hit_change
    if change is None or _no_evictions(facts):
        return ""
    signs = f"KV use was up to {change.kv_use:.0%} until the hits fell" if change.kv_use is not None else ""
    return signs if not change.preemptions else f"{change.preemptions:,.0f} preemptions until the hits fell"


def _adapters_wait(facts: Means) -> str:
    used = facts.server.courses.adapters
    if used is None or used.samples < FEWEST_SAMPLES or used.blocked < MOSTLY:
        return ""
    return f"requests wait for an adapter that has no slot in {used.blocked:.0%} of the samples in which some wait"


def _grammars_wait(facts: Means) -> str:
    courses = facts.server.courses
    if (share := courses.deferred_share or 0.0) < MOSTLY:
        return ""
    what = "something else than room" if courses.grammar_share is None else "a grammar"
    return f"{share:.0%} of those that wait do so for {what}"


def _idle_front(facts: Means) -> str:
    cpu = facts.server.further.get(FRONT_CPU)
    if cpu is None or not facts.server.seconds or cpu >= FULL_CORE * facts.server.seconds:
        return ""
    return f"the process of the front used {cpu / facts.server.seconds:.0%} of one core"


def _alike_prompts(facts: Means) -> str:
    """Where no prompt is longer than the others, none of them stands in the others' way."""
    prompts = facts.server.latencies.get(PROMPTS)
    usual, longest = (prompts.between.get(name) for name in ALIKE) if prompts is not None else (None, None)
    if usual is None or usual != longest or usual[1] is None:  # above the last bound lengths differ unseen
        return ""
    return f"half of the prompts and the longest are between {usual[0]:,.0f} and {usual[1]:,.0f} tokens: none is long"


def _prompts_below_a_large_block(facts: Means) -> str:
    block = facts.server.reported_settings.get("block_size", "")
    below = _prompts_below_a_block(facts) if block.isdigit() and int(block) > LARGEST_DEFAULT_BLOCK else ""
    return f"{below}; whether they begin alike is not shown" if below else ""


def _chunked_prompts(facts: Means) -> str:
    """Prompts that take many steps, none of them long beside the others: so each step computes few of their tokens."""
    view = facts.server
    prefill, gaps, prompts = view.span("compute.prefill"), view.latencies.get(GAPS), view.latencies.get(PROMPTS)
    work, batch = prompt_work(view), view.waiting.largest_batch if view.waiting is not None else None
    if prefill is None or gaps is None or prompts is None or (work or 0.0) < PROMPT_WORK or (batch or 0.0) < TOGETHER:
        return ""
    stalled = view.stalls.share if view.stalls is not None else 0.0
    steps = prefill.mean_ms / (1e3 * gaps.mean)
    computed = prompts.mean * (1 - (view.hit_rate or 0.0))
    if steps < MANY_STEPS or computed / steps > FEW_COMPUTED or stalled > EVEN_STEPS:
        return ""
    return f"a prompt takes about {steps:,.0f} steps of the usual length: each computes few of its tokens"


CHUNKED_PROMPTS = Refutation("prefill time, gaps between tokens", _chunked_prompts)
ALIKE_PROMPTS = Refutation("lengths of prompts", _alike_prompts)
PROMPTS_BELOW_A_LARGE_BLOCK = Refutation("lengths of prompts, block size", _prompts_below_a_large_block)


def _long_steps(facts: Means) -> str:
    """The core takes in what came at the end of a step."""
    stalls, waits, ttft = facts.server.stalls, before_core(facts.server), facts.server.latencies.get(TTFT)
    if stalls is None or waits is None or ttft is None or waits * ttft.mean > stalls.wait_s:
        return ""
    return f"steps take long: who comes waits up to {1e3 * stalls.wait_s:,.0f} ms on average for the running one"


IDLE_FRONT = Refutation("CPU time of the front", _idle_front)
LONG_STEPS = Refutation("gaps between tokens", _long_steps)
ADAPTERS_WAIT = Refutation("adapters of waiting requests", _adapters_wait)
GRAMMARS_WAIT = Refutation("requests that wait for a grammar", _grammars_wait)
SHORT_PROMPTS = Refutation("lengths of prompts", _short_prompts)
CACHED_PROMPTS = Refutation("hits of the prefix cache", _cached_prompts)
PREEMPTED = Refutation("preemptions", _preempted)
FULL_POOL = Refutation("KV use while requests wait", _full_pool)
LINE_THAT_WENT = Refutation("waiting requests over time, preemptions", _line_that_went)
LINE_THAT_EMPTIES = Refutation("waiting requests over time", _line_that_empties)
BATCH_THAT_GAINS = Refutation("gaps between tokens at several batches", _batch_that_gains)
DRAFTS_THAT_PAY = Refutation("accepted drafts, gaps between tokens at several batches", _drafts_that_pay)
EXTERNAL_CACHE_HITS = Refutation("hits of the external cache", _external_hits)
ROOM_ELSEWHERE = Refutation("requests of each engine", _room_elsewhere)
EVEN_ENGINES = Refutation("tokens of each engine", _even_engines)
RATE_THAT_STAYS = Refutation("hits of the prefix cache over time", _rate_that_stays)
NO_SIGN_OF_EVICTIONS = Refutation("KV use and preemptions before the hits fell", _no_evictions)
SIGNS_OF_EVICTIONS = Refutation("KV use and preemptions before the hits fell", _evictions)
COUNTED_HITS = Refutation("hits of the prefix cache", _counted_hits)
PROMPTS_BELOW_A_BLOCK = Refutation("lengths of prompts, block size", _prompts_below_a_block)
