"""More arrives than the device can serve, whatever the policy."""

from dataclasses import replace

from sojourn.diagnosis.capacity import COMFORTABLE, FULL, LARGEST_BATCH, batch_within_tpot, best_load, load
from sojourn.diagnosis.cause import Cause, Change, Evidence, Excess, Proposal, Rule, evidence
from sojourn.diagnosis.client_signs import signs_of
from sojourn.diagnosis.evidence import Accounts, Client, Means, Records
from sojourn.diagnosis.excess import SERVED
from sojourn.diagnosis.proposal import CONTENTION, EXPLAINS_ENOUGH, QUEUE, Gain, all_of
from sojourn.diagnosis.statements.accounts import batch_gain_evidence, is_saturated, propose, room_evidence
from sojourn.diagnosis.statements.client_only import GROWS, has_room, hint, queue_signs
from sojourn.diagnosis.statements.excess import excess_evidence, load_evidence, missing_share, residual_evidence
from sojourn.diagnosis.statements.means import (
    FEW,
    FEWEST_SAMPLES,
    MOSTLY,
    queue_evidence,
    queue_share,
    stands_at_cap,
    time_gained,
)
from sojourn.diagnosis.statements.prefixes import OUTCOMES, WORTH_SHARING, hit_with, pool_for_reuse, saved_share
from sojourn.diagnosis.statements.refusals import REFUSED
from sojourn.diagnosis.statements.refutations import (
    ADAPTERS_WAIT,
    BATCH_THAT_GAINS,
    CHUNKED_PROMPTS,
    GRAMMARS_WAIT,
    LINE_THAT_EMPTIES,
    PREEMPTED,
    PROMPTS_BELOW_A_LARGE_BLOCK,
    ROOM_ELSEWHERE,
)
from sojourn.diagnosis.statements.sensors import room_in_device
from sojourn.diagnosis.statements.speculation import COSTS, RECORDS, drafts_of, load_without
from sojourn.diagnosis.symptom_tree.reading import Reading

NEARLY_FULL = 0.8  # load / capacity from which overload is looked at: the estimate is good to a tenth, and half of that
DEVICE_IDLES = 0.8  # of the time with a request in the server: a device that works less is not what is short
CROWDED = (*QUEUE, "request.interference")  # time that others cost, but for their blocks
ALWAYS, OFTEN = 0.8, 0.5  # of the samples, with requests waiting
GROWS_CLEARLY = 1.0  # of the mean: a queue that stands is far below it


def read_records(facts: Records, excess: Excess | None) -> Proposal | None:
    if excess is not None and excess.objective == SERVED and not excess.error.startswith(REFUSED):
        return None
    now, best = load(facts), best_load(facts)
    if best < NEARLY_FULL:
        return None
    capacity, batch = facts.offered_rps / best, batch_within_tpot(facts)
    limit = "meets every objective on the time per output token" if batch < LARGEST_BATCH else "the model reaches"
    admit = COMFORTABLE * capacity
    return Proposal(
        cause=f"{facts.offered_rps:.1f} requests/s arrive, and the device serves at most {capacity:.1f} of this "
        f"length: {_policy(facts)}" if best >= FULL else
        f"{facts.offered_rps:.1f} requests/s arrive, {best:.0%} of what the device serves of this length: so near to "
        "its capacity the queue is longer than the objective",
        evidence=[
            load_evidence(f"load / capacity is {now:.2f} with these settings, and {best:.2f} at the best batch of "
                          f"{batch:.0f} that {limit}", best, supports=best >= FULL, weight=2),
            *excess_evidence(excess, CONTENTION),
            *_growth(facts),
            *_busy(facts),
            *residual_evidence(facts),
            *avoidable_prompts(facts),
            *avoidable_drafts(facts, best),
        ],
        measurement=f"the same scenario at {admit:.1f} requests/s",
        rate_rps=admit,
        if_cause=f"step times stay as they are, and {missing_share(excess)} falls to none or few",
        if_rival="steps of the same composition still take as long, and the time per output token stays high",
        change=f"{facts.offered_rps / admit:.1f} times the devices, or admit at most {admit:.1f} requests/s and answer "
        "429 to the rest",
        explained=None if excess is None or excess.accounts else 1.0,
        capacity_rps=capacity,
        fixes=(Change(arrival_rate=min(1.0, COMFORTABLE / best)),),
        gain=Gain(f"load / capacity {best:.2f} → {COMFORTABLE:.2f}",
                  basis="step times fitted to this run; good to about 10%"),
    )  # fmt: skip


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """The queue grows over the run, and tokens come as slowly as the objective allows."""
    grows = _growth_without_steps(facts)
    stands = is_saturated(facts) and _wait_share(facts) >= ALWAYS
    if not facts.waits or (grows is None and not stands):  # without the reasons a limit looks alike
        return None
    words = "more arrives than is served, and the queue grows over the run"
    if grows is None:
        words = "requests wait all the time, and more of them in a batch give hardly more tokens"
    found = [*excess_evidence(excess, CROWDED), *filter(None, [grows]), *room_evidence(facts, wanted=False)]
    for_place = sum(facts.waits.get(reason, 0.0) for reason in ("batch_cap", "token_budget"))
    claims = all_of(QUEUE, for_place) | {"request.interference": 1.0}
    return propose(excess, words, found,
                   "fewer requests, or more devices", claims)  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Requests wait, and more of them at a time gave hardly more tokens, or nobody has seen what they give."""
    view, waiting, queue = facts.server, facts.server.waiting, facts.server.queue
    if waiting is None or waiting.samples < FEWEST_SAMPLES:
        return None
    if not is_saturated(facts) and (waiting.with_kv_free or 0.0) < MOSTLY:
        return None
    if facts.batch_gain is None and stands_at_cap(view) and (waiting.largest_batch or 0.0) <= FEW:
        return None  # nothing but the cap was seen
    if queue_share(view, excess) < EXPLAINS_ENOUGH:
        return None
    return Proposal(
        cause=f"up to {waiting.largest:,.0f} requests wait, and "
        + (
            "a larger batch gives hardly more tokens: the device is full"
            if is_saturated(facts)
            else "the device may be full"
        ),
        evidence=[
            *queue_evidence(view, excess),
            *batch_gain_evidence(facts, wanted=False),
            *room_in_device(facts, wanted=False),
        ],
        measurement="the same load at half the rate",
        rate_rps=facts.offered_rps / 2,
        if_cause=f"nobody waits, and the mean queue time of {queue.mean_ms:,.0f} ms goes",
        if_rival=f"requests still wait for each other, and {missing_share(excess)} stays",
        change="fewer requests, or more devices",
        explained=None if excess.share("request.queue") else queue_share(view, excess),
        gain=time_gained(view, f"mean queue time, {queue.mean_ms:,.0f} ms"),
    )


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """First tokens come later and later, and the tokens themselves come slowly."""
    signs = signs_of(facts)
    if excess.objective == "tpot_ms" or (signs.growth or 0.0) < GROWS or has_room(facts):
        return None
    return hint(excess, "more arrives than is served, and the queue grows over the run", queue_signs(signs), 0.6,
                 "fewer requests, or more devices")  # fmt: skip


def _policy(facts: Accounts) -> str:
    """Whether a policy could help. Without records of prefixes nobody knows what a cache that is off would spare."""
    unknown = facts.prefix is None and facts.measured_by == "server"
    if facts.engine.get("prefix_caching") is False and unknown:
        return "the prefix cache is off, and no policy will help unless prompts repeat"
    return "no policy will help"


def _busy(facts: Records) -> list[Evidence]:
    """A device that idles while requests are in the server is not what is short."""
    if facts.device_busy is None:
        return []
    return [
        evidence(f"the device works {facts.device_busy:.0%} of the time in which a request is in the server",
                 facts.device_busy, "share", "steps: device_ns; requests: arrived_ns, finished_ns",
                 supports=facts.device_busy >= DEVICE_IDLES)
    ]  # fmt: skip


def _growth(facts: Client) -> list[Evidence]:
    """Whether waits grow over the run, as they must under overload."""
    ttft = facts.rows.ttft_ms.astype("float64").dropna()
    third = len(ttft) // 3
    if third < 5:
        return []
    first, last = float(ttft.iloc[:third].mean()), float(ttft.iloc[-third:].mean())
    return [
        evidence(f"the mean time to first token goes from {first:,.0f} ms in the first third of the run to "
                 f"{last:,.0f} ms in the last", last / max(first, 1e-9), "ratio", "client: first_token_ns, due_ns",
                 supports=last > first)
    ]  # fmt: skip


def avoidable_prompts(facts: Records) -> list[Evidence]:
    """Against a load that is called too high: prompt tokens that a larger cache, smaller blocks or another order would
    not compute."""
    kv = facts.kv()
    if kv is None or kv.use is None or facts.work is None:
        return []
    in_pool = hit_with(kv, pool_for_reuse(kv))
    spared = {
        "were evicted before their next use": min(kv.use.outcomes.get("miss_evicted", 0.0),
                                                            max(0.0, in_pool - kv.use.hit_share)),
        "would be hits if the cache were on": kv.use.outcomes.get("miss_disabled", 0.0),
        "are shared in parts that fill no block": kv.use.outcomes.get("miss_sub_block", 0.0),
        "stand behind a part that differs": kv.order.movable_share if kv.order is not None else 0.0,
    }  # fmt: skip
    why, share = max(spared.items(), key=lambda item: item[1])
    if share < WORTH_SHARING:
        return []
    saved = saved_share(kv, share)
    then = best_load(facts, replace(facts.work, computed_tokens=max(1.0, facts.work.computed_tokens * (1 - saved))))
    return [evidence(f"{share:.0%} of the prompt tokens {why}: without them load / capacity would be {then:.2f}", then,
                     "ratio", OUTCOMES, supports=then >= FULL, weight=4 if then < FULL else 0.5)]  # fmt: skip


def avoidable_drafts(facts: Records, load: float) -> list[Evidence]:
    """Against a load that is called too high: drafts that cost more than they save. `load` is load / capacity."""
    drafts = drafts_of(facts)
    if drafts is None or drafts.lost_share < COSTS or facts.work is None:
        return []
    then = load_without(facts, drafts, load)
    return [evidence(f"drafts cost {drafts.lost_share:.0%} of the decoding more than they save: without them load / "
                     f"capacity would be {then:.2f}", then, "ratio", RECORDS, supports=then >= FULL,
                     weight=4 if then < FULL else 0.5)]  # fmt: skip


def _growth_without_steps(facts: Means | Accounts) -> Evidence | None:
    """That the queue grows: by the times to first token, or where no client measured them by the gauge."""
    growth = signs_of(facts).growth
    if growth is not None and growth >= GROWS_CLEARLY:
        return evidence(f"the time to first token grows over the run by {growth:.1f} times its mean", growth, "ratio",
                        "client: due_ns, first_token_ns")  # fmt: skip
    waiting = facts.server.waiting if facts.server is not None and growth is None else None
    if waiting is None or waiting.growth is None or waiting.growth < GROWS_CLEARLY or waiting.share < OFTEN:
        return None
    return evidence(f"the number of waiting requests grows by {waiting.growth:.1f} times its mean", waiting.growth,
                    "ratio", "scrapes: gauges")  # fmt: skip


def _wait_share(facts: Means | Accounts) -> float:
    waiting = facts.server.waiting if facts.server is not None else None
    return waiting.share if waiting is not None else 0.0


def show_offered_load(facts: Records) -> Reading | None:
    load = best_load(facts)
    if load != load:
        return None
    return Reading(
        f"the offered load is {load:.0%} of what this device serves at its best batch",
        load < FULL,
        "client: due_ns; steps: fit of wall time",
        min(1.0, load),
    )


CAUSE = Cause(
    key="overload",
    lifecycles=("request", "compute"),
    object="offered load",
    kind="capacity",
    rival="a fault that slows every step",
    rival_key="slow_device",
    asks="Does more arrive than the device can serve?",
    measurement="the same scenario at 70% of the rate",
    figures=(show_offered_load,),
    booked=CONTENTION,
    complaints={"high_ttft": 1, "high_itl": 4, "vram_fills_quickly": 1},
    reads={
        Records: Rule(read_records, accounts=CONTENTION, needs=("load",)),
        Accounts: Rule(read_accounts, accounts=CROWDED, rival="a limit on the batch", rival_key="batch_cap"),
        Means: Rule(
            read_means,
            rival="a limit on the batch",
            rival_key="batch_cap",
            refuted_by=(
                BATCH_THAT_GAINS,
                PREEMPTED,
                LINE_THAT_EMPTIES,
                ROOM_ELSEWHERE,
                ADAPTERS_WAIT,
                GRAMMARS_WAIT,
                PROMPTS_BELOW_A_LARGE_BLOCK,
                CHUNKED_PROMPTS,
            ),
        ),
        Client: Rule(read_client, rival="a limit on the batch", rival_key="batch_cap"),
    },
)
