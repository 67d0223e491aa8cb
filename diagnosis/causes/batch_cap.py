"""Requests wait for a batch slot while the device could take more of them in a step."""

from sojourn.diagnosis.capacity import CLEARLY_FULL, batch_within_tpot, comfortable_batch, kv_batch, load
from sojourn.diagnosis.cause import Cause, Change, Evidence, Excess, Proposal, Rule, evidence
from sojourn.diagnosis.client_signs import signs_of
from sojourn.diagnosis.evidence import Accounts, Client, Means, Records
from sojourn.diagnosis.proposal import CONTRADICTION, EXPLAINS_ENOUGH, QUEUE, WAITS
from sojourn.diagnosis.statements.accounts import (
    batch_gain_evidence,
    is_saturated,
    propose,
    room_evidence,
    scale_setting,
    waited_for,
)
from sojourn.diagnosis.statements.blame import blamed_group
from sojourn.diagnosis.statements.client_only import GOES_WITH, goes_with_prompt, has_room, hint, queue_signs
from sojourn.diagnosis.statements.excess import excess_evidence, load_evidence, missing_share
from sojourn.diagnosis.statements.means import (
    FEWEST_SAMPLES,
    GAUGES,
    queue_evidence,
    queue_share,
    stands_at_cap,
    time_gained,
)
from sojourn.diagnosis.statements.refutations import (
    ADAPTERS_WAIT,
    CHUNKED_PROMPTS,
    FULL_POOL,
    GRAMMARS_WAIT,
    PREEMPTED,
    ROOM_ELSEWHERE,
)
from sojourn.diagnosis.statements.sensors import room_in_device
from sojourn.diagnosis.symptom_tree.reading import show_batch, waiting_for

WIDER = (2, 4, 16, 64)  # times the cap: candidates of a replay
PROPOSED = 8  # times the batch that was seen, where no replay chooses
LARGEST_CANDIDATE = 256  # requests: beyond it the step model of a run is extrapolated too far
POOL = frozenset(("num_kv_blocks", "kv_cache_gib", "memory_fraction"))  # settings that fix the size of the pool


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    steps, capped = facts.steps, facts.waits.get("batch_cap", 0.0)
    cap = facts.engine.get("max_num_seqs")
    if not cap:
        return None
    # A pool that nobody chose grows with the cap: the server derives its size
    is_fixed = bool(POOL & facts.chosen) and facts.work is not None and steps is not None
    roomy = max(cap + 1, int(kv_batch(facts))) if is_fixed else max(2 * cap, LARGEST_CANDIDATE)
    has_model = steps is not None and steps.model is not None and facts.work is not None
    wanted = comfortable_batch(facts) if has_model else 2 * cap
    first = max(cap + 1, min(wanted, roomy)) if wanted > cap else min(2 * cap, roomy)
    most = max(cap + 1, min(roomy, LARGEST_CANDIDATE))
    values = list(dict.fromkeys([first, *(min(times * cap, most) for times in WIDER)]))
    now, raised = load(facts), load(facts, batch=min(roomy, batch_within_tpot(facts))) if has_model else load(facts)
    return Proposal(
        cause=f"the batch is capped at {cap} request{'s' if cap != 1 else ''}"
        + (f", and the KV pool has room for {roomy}" if is_fixed else ""),
        evidence=[
            *excess_evidence(excess, QUEUE),
            *blamed_group(facts, excess),
            evidence(f"{capped:.0%} of the waiting was for the batch cap: refused by it, or behind a request that was",
                     capped, "share", "requests: waits; steps: refusals", supports=capped >= 0.5, weight=2),
            *_room(facts),
            *([load_evidence(f"load / capacity is {now:.2f} with this cap and {raised:.2f} without", now,
                             supports=raised < CLEARLY_FULL, weight=2 if raised < CLEARLY_FULL else CONTRADICTION)]
              if now == now else []),
        ],
        measurement="the same scenario with a larger batch",
        settings={"max_num_seqs": first},
        if_cause=f"waiting for a place falls from {capped:.0%} of all waiting to little",
        if_rival=f"{missing_share(excess)} stays, and the time per output token grows with the batch",
        fixes=tuple(Change(settings={"max_num_seqs": value}) for value in values),
        rival_fix=Change(device_speed=2.0),
    )  # fmt: skip


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """Requests wait for a place while the others' tokens come fast: the device could take more."""
    found = [*excess_evidence(excess, QUEUE), *waited_for(facts, "batch_cap"), *room_evidence(facts, wanted=True)]
    words = "requests queue for a batch slot, and TPOT leaves room for a larger batch"
    return propose(excess, words, found, "a larger max_num_seqs", None, scale_setting(facts, "max_num_seqs", 2))


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Requests wait while the KV cache has room and the batch stays at one size: something caps it."""
    view, waiting, queue = facts.server, facts.server.waiting, facts.server.queue
    if waiting is None or waiting.samples < FEWEST_SAMPLES or queue_share(view, excess) < EXPLAINS_ENOUGH:
        return None
    if not stands_at_cap(view) or is_saturated(facts):
        return None
    batch, setting = waiting.largest_batch, view.settings.get("batch cap", "the limit on running requests")
    larger, queued = f"{setting} above {batch:,.0f}", f"mean queue time of {queue.mean_ms:,.0f} ms"
    return Proposal(
        cause=f"the batch is capped: up to {waiting.largest:,.0f} requests wait while never more than {batch:,.0f} run "
        "and the KV cache has room",
        evidence=[
            *queue_evidence(view, excess),
            evidence(f"{waiting.with_kv_free:.0%} of the {waiting.samples} samples with requests waiting show room for "
                     "more in the KV cache", waiting.with_kv_free, "share", GAUGES),
            evidence(f"{waiting.at_largest_batch:.0%} of them show as many running as ever, {batch:,.0f}, or a "
                     "request that has just ended fewer", waiting.at_largest_batch, "share", GAUGES),
            *batch_gain_evidence(facts, wanted=True),
            *room_in_device(facts, wanted=True),
        ],
        measurement=f"the same scenario with a larger batch ({larger})",
        settings={},
        if_cause=f"more than {batch:,.0f} run at a time, and the {queued} falls",
        if_rival=f"more run at a time, each token takes longer, and {missing_share(excess)} stays",
        change=f"{larger_batch(setting, batch)}, as means do not show how much it gains",
        explained=None if excess.share("request.queue") else queue_share(view, excess),
        gain=time_gained(view, f"mean queue time, {queue.mean_ms:,.0f} ms"),
    )  # fmt: skip


def larger_batch(setting: str, batch: float) -> str:
    """The change of a cap at which so many ran, as a proposal."""
    tried = min(PROPOSED * batch, max(2 * batch, LARGEST_CANDIDATE))
    return f"{setting} above {batch:,.0f}: {tried:,.0f} is a proposal to measure"


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """Requests wait in a crowd, though tokens come fast."""
    signs = signs_of(facts)
    waits = max(signs.growth or 0.0, signs.with_crowd or 0.0)
    if excess.objective == "tpot_ms" or waits < GOES_WITH or not has_room(facts) or goes_with_prompt(signs):
        return None
    return hint(excess, "requests queue for each other, and TPOT leaves room for a larger batch",
                queue_signs(signs), 0.5, "a larger batch")  # fmt: skip


def _room(facts: Records) -> list[Evidence]:
    """Whether the KV pool had room while requests waited."""
    if facts.steps is None:
        return []
    free = facts.steps.waited_with_kv_free
    statement = f"at least a fifth of the KV pool was free in {free:.0%} of that waiting"
    return [evidence(statement, free, "share", "steps: waiting, blocks_free, blocks_reusable", supports=free > 0.5)]


CAUSE = Cause(
    key="batch_cap",
    lifecycles=("request", "compute"),
    object="batch cap (max_num_seqs)",
    kind="policy",
    rival="overload: the device is full at any batch",
    rival_key="overload",
    asks="Do requests wait for a batch slot?",
    measurement="the same scenario with twice the max_num_seqs",
    figures=(waiting_for("batch_cap", "a batch slot"), show_batch),
    booked=WAITS,
    complaints={"high_ttft": 3, "low_device_utilisation": 1, "devices_do_not_help": 1},
    reads={
        Records: Rule(read_records, accounts=QUEUE, reason="batch_cap"),
        Accounts: Rule(read_accounts, accounts=QUEUE, reason="batch_cap", rival="overload: the device is full"),
        Means: Rule(
            read_means,
            object="batch cap",
            rival_key="",
            refuted_by=(
                ROOM_ELSEWHERE,
                FULL_POOL,
                PREEMPTED,
                ADAPTERS_WAIT,
                GRAMMARS_WAIT,
                CHUNKED_PROMPTS,
            ),
        ),
        Client: Rule(read_client, rival="overload"),
    },
)
