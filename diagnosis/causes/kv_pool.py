"""Requests wait for KV blocks, or lose theirs and pay for them again."""

import math

from sojourn.diagnosis.capacity import FULL, batch_within_tpot, comfortable_batch, kv_batch, kv_blocks, load
from sojourn.diagnosis.cause import Cause, Change, Evidence, Excess, Proposal, Rule, evidence
from sojourn.diagnosis.evidence import Accounts, Client, Means, Records
from sojourn.diagnosis.foreign_server import span_share
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH, all_of
from sojourn.diagnosis.statements.accounts import propose, scale_setting, waited_for
from sojourn.diagnosis.statements.blame import blamed_group
from sojourn.diagnosis.statements.excess import excess_evidence, load_evidence, missing_share
from sojourn.diagnosis.statements.kv_memory import (
    BLOCK_SIZE,
    BLOCKS,
    KV_ACCOUNTS,
    LEAKED,
    USUAL_SIZES,
    WASTED,
    SameMemory,
    is_sized_in_bytes,
)
from sojourn.diagnosis.statements.means import COUNTERS, GAUGES, MOSTLY, PREEMPTED_OFTEN, queue_evidence, time_gained
from sojourn.diagnosis.statements.prefixes import ROUND_BLOCKS
from sojourn.diagnosis.statements.refutations import LINE_THAT_WENT
from sojourn.diagnosis.step_facts import StepFacts
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading
from sojourn.interop.sources.pressure import KV_FULL, PROMPTS
from sojourn.interop.sources.view import ServerView
from sojourn.metrics.compute.cost_model import shape_from
from sojourn.metrics.run.directory import section

OUTPUTS = "sojourn_request_output_length_tokens"
KV_HEADROOM = 1.25  # requests grow while they run, and lengths vary around their mean
IN_8_BITS = {"float32": 3.5, "bfloat16": 1.8, "float16": 1.8}  # tokens in the same memory, heads of 32 or more
LEAST_WINDOW = 512  # tokens: what most answers refer to; a smaller one costs more of their quality
WORTH_A_WINDOW = 1.25  # times the requests in the same blocks: for less nobody should change the outputs


def read_records(facts: Records, excess: Excess | None) -> Proposal | None:
    steps, by_blocks = facts.steps, facts.waits.get("kv_blocks", 0.0)
    accounts = (*KV_ACCOUNTS, "request.queue") if by_blocks >= 0.5 else KV_ACCOUNTS
    matters = by_blocks >= 0.5 or steps.preemptions if excess is None else excess.share(*accounts) >= EXPLAINS_ENOUGH
    if not matters:
        return None
    cap = facts.engine.get("max_num_seqs") or math.inf
    now, relieved = load(facts), load(facts, batch=min(cap, batch_within_tpot(facts)))
    blocks = suggested_blocks(facts)
    chosen = "num_kv_blocks" in facts.chosen
    smaller = [found for found in (smaller_kv(facts), window(facts)) if found is not None]
    in_bytes, own = is_sized_in_bytes(facts), tuple(each.fix for each in smaller[:1])
    more = tuple(Change(settings={"num_kv_blocks": size}) for size in (blocks, 2 * blocks))
    preempted = f"preemptions fall from {steps.preemptions} to 0, " if steps.preemptions else ""
    return Proposal(
        cause=_room_and_need(facts),
        kind="policy" if chosen else "capacity",
        evidence=[
            *excess_evidence(excess, accounts),
            *blamed_group(facts, excess),
            evidence(f"{by_blocks:.0%} of the waiting was for KV blocks, or behind a request that waited for them",
                     by_blocks, "share", "requests: waits; steps: refusals", supports=by_blocks >= 0.5),
            *_use_evidence(steps),
            load_evidence(f"load / capacity is {now:.2f} with this pool and {relieved:.2f} with enough blocks", now,
                          supports=relieved < FULL, weight=2 if relieved >= FULL else 0.5),
            *_lost_room(facts),
        ],
        measurement=f"the same scenario with {'smaller keys and values' if in_bytes and own else 'a larger pool'}",
        settings=dict(own[0].settings) if in_bytes and own else {"num_kv_blocks": blocks},
        if_cause=f"{preempted}load / capacity falls from {now:.2f} to {relieved:.2f}",
        if_rival=f"{missing_share(excess)} stays, with the waiting booked to request.queue",
        change="" if chosen else _more_room(blocks, smaller),
        claims=all_of(accounts),
        fixes=own or more if in_bytes else (*more, *own),
    )  # fmt: skip


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """Requests wait for blocks, or lose theirs and compute again."""
    claims = dict.fromkeys(("memory.blocked", "memory.preempted", "memory.recompute"), 1.0)
    claims["request.queue"] = facts.waits.get("kv_blocks", 0.0)
    found = [*excess_evidence(excess, tuple(claims)), *waited_for(facts, "kv_blocks")]
    return propose(excess, "requests wait for KV blocks, or lose theirs and compute again", found,
                   "a larger num_kv_blocks, or fewer requests at a time", claims,
                   scale_setting(facts, "num_kv_blocks", 2))  # fmt: skip


def read_means(facts: Means, excess: Excess | None) -> Proposal | None:
    """The KV cache is full while requests wait, or running requests lose theirs."""
    view = facts.server
    full_at = view.waiting.kv_full_at if view.waiting is not None else KV_FULL
    if view.kv_largest is None or view.kv_largest < full_at:
        return None
    queue, preemptions = view.queue, view.preemptions or 0.0
    waited = (view.waiting.with_kv_full or 0.0) if view.waiting is not None else 0.0
    often = view.finished and preemptions >= PREEMPTED_OFTEN * view.finished
    waits = waited >= MOSTLY and (excess is None or span_share(queue, excess) >= EXPLAINS_ENOUGH)
    if not (waits or (preemptions if excess is None else often)):
        return None
    settings = view.settings.get("KV block pool", "the server's setting for KV memory")
    queued = f"{queue.mean_ms:,.0f} ms" if queue is not None else "the time in the queue"
    return Proposal(
        cause=_words(view, storm=bool(often) and excess is not None and excess.objective == "tpot_ms"),
        evidence=[
            *queue_evidence(view, excess),
            evidence(f"{waited:.0%} of the samples with requests waiting show a KV use of at least {full_at:.0%}",
                     waited, "share", GAUGES, supports=waited >= MOSTLY),
            *([] if view.preemptions is None else [
                evidence(f"{preemptions:,.0f} preemptions, {view.finished or 0:,.0f} requests finished", preemptions,
                         "preemptions", COUNTERS, supports=preemptions > 0)
            ]),
            *_recomputed(view),
        ],
        measurement=f"the same scenario with more room for KV ({settings})",
        settings={},
        if_cause=f"the mean queue time of {queued} falls, and preemptions come to 0"
        if view.preemptions is None
        else f"preemptions fall from {preemptions:,.0f} to 0, and the mean queue time of {queued} with them",
        if_rival=f"the KV use falls, and {missing_share(excess)} stays",
        change=f"more room for KV: {settings}; or shorter contexts, or fewer requests at a time",
        gain=time_gained(view, f"mean queue time, {queued}"),
    )  # fmt: skip


def _words(view: ServerView, *, storm: bool) -> str:
    count = "" if view.preemptions is None else f"{view.preemptions:,.0f} preemptions"
    if storm:
        ended = f"{view.finished or 0:,.0f} requests finished"
        return f"running requests lose their KV blocks and compute them again: {count}, {ended}"
    peak = f"{view.kv_largest:.0%} at its peak"
    return (
        f"the KV cache has no room for a further prompt while requests wait: {', '.join(filter(None, (peak, count)))}"
    )


def _recomputed(view: ServerView) -> list[Evidence]:
    """What preempted requests compute again, where lengths are known: half of what a mean request holds at its end,
    beyond its prompt. The prefix cache may spare some of it."""
    lengths = [view.latencies.get(name) for name in (PROMPTS, OUTPUTS)]
    if not view.preemptions or None in lengths or not view.finished:
        return []
    prompt, output = (each.mean for each in lengths)
    again = view.preemptions * (prompt + output / 2)
    share = again / (again + view.finished * (prompt + output))
    return [evidence(f"preempted requests compute about {prompt + output / 2:,.0f} tokens again: up to {share:.0%} of "
                     "all that is computed", share, "share", f"{COUNTERS}, histograms")]  # fmt: skip


def _room_and_need(facts: Records) -> str:
    room, needed = kv_batch(facts), comfortable_batch(facts)
    need = f"the load needs {needed}" if needed > round(room) else "the peaks of the load need more"
    return (
        f"the pool of {facts.steps.pool_blocks} blocks holds {room:.0f} requests of this length at a time, and {need}"
    )


def _use_evidence(steps: StepFacts) -> list[Evidence]:
    recomputed = steps.recomputed_tokens / steps.tokens if steps.tokens else 0.0
    return [
        evidence(f"KV use was {steps.kv_use_p50:.0%} at the median and {steps.kv_use_max:.0%} at its peak",
                 steps.kv_use_max, "share", "steps: blocks_active", supports=steps.kv_use_max > 0.9),
        evidence(f"{steps.preemptions} preemptions, {recomputed:.1%} of all tokens were computed again",
                 steps.preemptions, "preemptions", "steps: preempted_ids, kinds", supports=steps.preemptions > 0),
    ]  # fmt: skip


def _more_room(blocks: int, smaller: list[SameMemory]) -> str:
    room = ", ".join([*(each.words for each in smaller), "more device memory", "shorter contexts"])
    return f"room for {blocks} blocks: {room}"


def suggested_blocks(facts: Records) -> int:
    """Blocks with which the pool no longer limits the batch: what the requests of a moderate load hold together, and
    at least half as much again as there is."""
    needed = KV_HEADROOM * kv_blocks(facts) * max(comfortable_batch(facts), _at_once(facts))
    return math.ceil(max(1.5 * facts.steps.pool_blocks, needed) / ROUND_BLOCKS) * ROUND_BLOCKS


def _at_once(facts: Client) -> float:
    """Requests in the server at once if none waited, by Little's law; 0 where no rate was offered."""
    served = facts.rows[facts.rows.status == "ok"]
    waits = served[[f"ledger_{name}_ns" for name in ("request_queue", "memory_blocked", "memory_preempted")]]
    inside = served.finished_ns.astype("float64") - served.arrived_ns.astype("float64")
    mean_s = float((inside - waits.astype("float64").sum(axis=1)).mean()) / 1e9
    found = facts.offered_rps * mean_s
    return found if math.isfinite(found) else 0.0


def _lost_room(facts: Records) -> list:
    """Against a pool that is too small: what of it nobody can use."""
    kv, found = facts.kv(), []
    if kv is None:
        return found
    if kv.leak is not None and kv.leak.stays and kv.leak.share_of_pool >= LEAKED:
        found.append(evidence(f"{kv.leak.share_of_pool:.0%} of the pool is held by no request", kv.leak.share_of_pool,
                              "share", BLOCKS, supports=False, weight=4))  # fmt: skip
    if kv.fragmentation is not None and kv.fragmentation.tail_share >= WASTED and kv.block_size > USUAL_SIZES[-1]:
        share = kv.fragmentation.tail_share
        found.append(evidence(f"{share:.0%} of the positions in active blocks hold nothing", share, "share", BLOCKS,
                              supports=False, weight=4))  # fmt: skip
    return found


def smaller_kv(facts: Client) -> SameMemory | None:
    """Keys and values in 8 bits, with a scale for each token and head. None where they have 8 bits or fewer."""
    times = IN_8_BITS.get(str(section(facts.meta, "core").get("dtype")))
    if times is None or (facts.engine.get("kv_cache_dtype") or "auto") != "auto":
        return None
    words = f"kv_cache_dtype=int8 (about {times:g} times the tokens in the same memory; outputs change a little)"
    return SameMemory(words, Change(settings={"kv_cache_dtype": "int8"}, kv_scale=times))


def window(facts: Client) -> SameMemory | None:
    """A sliding window with sinks, behind which long requests give their blocks back. None where it frees little, for a
    model with windows, and where all blocks are kept. Nothing in a run tells what the outputs are worth with it."""
    shape, engine, rows = shape_from(facts.meta), facts.engine, facts.rows
    keeps_all = any(engine.get(name) is not None for name in ("kv_host_gib", "kv_disk_path", "kv_remote_url"))
    drafts = (engine.get("speculation") or "none") not in ("none", "ngram", "medusa")
    if shape is None or shape.longest_window is not None or keeps_all or drafts or "server_prompt_tokens" not in rows:
        return None
    served = rows[rows.status == "ok"]
    context = (served.server_prompt_tokens + served.server_output_tokens).astype("float64").dropna()
    budget = engine.get("max_prefill_chunk_tokens") or engine.get("max_num_batched_tokens")
    if not len(context) or not isinstance(budget, int):
        return None
    size = max(LEAST_WINDOW, 2 ** math.ceil(math.log2(max(float(context.quantile(0.9)) / 4, 1.0))))
    held = context.clip(upper=size + 2 * budget + 2 * (engine.get("block_size") or BLOCK_SIZE))
    times = float((context**2).sum() / (context * held).sum())  # a long request holds its blocks for longer
    if times < WORTH_A_WINDOW:
        return None
    words = (f"attention_window={size} with sinks (about {times:.1f} times the requests in the same blocks; it changes "
             "the outputs, and only your own evaluation can say how much)")  # fmt: skip
    return SameMemory(words, Change(settings={"attention_window": size}, kv_scale=times))


def show_kv_pool(facts: Records) -> Reading | None:
    if facts.steps is None:
        return None
    steps, waits = facts.steps, facts.waits.get("kv_blocks", 0.0)
    return Reading(
        f"KV use peaks at {steps.kv_use_max:.0%} of {steps.pool_blocks:,} blocks, with {steps.preemptions} preemptions "
        f"and {waits:.0%} of the waiting for blocks",
        steps.preemptions == 0 and waits < NEGLIGIBLE,
        "steps: blocks_*, preempted_ids; requests: waits",
        steps.kv_use_max,
    )


CAUSE = Cause(
    key="kv_pool",
    lifecycles=("memory", "request"),
    object="KV block pool",
    kind="capacity",
    rival="overload: the device is full, and the pool fills because of it",
    asks="Do requests wait for KV blocks, or lose them?",
    measurement="the same scenario with twice the num_kv_blocks",
    figures=(show_kv_pool,),
    complaints={
        "high_ttft": 2,
        "high_itl": 1,
        "low_device_utilisation": 1,
        "vram_fills_quickly": 1,
        "product_latency_poor": 1,
        "devices_do_not_help": 1,
    },
    reads={
        Records: Rule(read_records, needs=("load",), symptom="vram_fills_quickly"),
        Accounts: Rule(
            read_accounts,
            kind="policy",
            rival="overload: the device is full, and the cache fills because of it",
            rival_key="overload",
        ),
        Means: Rule(
            read_means,
            needs=(),
            symptom="vram_fills_quickly",
            rival="overload: the device is full, and the cache fills because of it",
            refuted_by=(LINE_THAT_WENT,),
        ),
    },
)
