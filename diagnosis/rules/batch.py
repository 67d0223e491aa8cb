"""Causes in the batch: a cap that is too small for the load, and one that is too large for the time per token."""

from sojourn.diagnosis.capacity import FULL, batch_within_tpot, comfortable_batch, kv_batch, load
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts, tightest
from sojourn.diagnosis.rules.cause import CONTRADICTION, QUEUE, Proposal, all_of, cause
from sojourn.diagnosis.rules.shared_evidence import (
    blamed_group,
    excess_evidence,
    load_evidence,
    missing_share,
    residual_evidence,
)
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change

DECODE = ("compute.decode",)
WIDER = (2, 4, 16, 64)  # times the cap: candidates of a replay
LARGEST_CANDIDATE = 256  # requests: beyond it the step model of a run is extrapolated too far
POOL = frozenset(("num_kv_blocks", "kv_cache_gib", "memory_fraction"))  # settings that fix the size of the pool
NARROWER = (1.0, 0.75, 0.5, 0.25)  # of the batch that fits the time per token
LARGER_STEP = 1.25  # a batch that makes steps a quarter longer than the objective is a measured effect, not noise


@cause(lifecycles=("request", "compute"), object="batch cap (max_num_seqs)", kind="policy", accounts=QUEUE,
       reason="batch_cap", rival="overload: the device is full at any batch",
       rival_key="overload")  # fmt: skip
def batch_cap(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait for a place in the batch while the device could take more of them in a step."""
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
                             supports=raised < FULL, weight=2 if raised < FULL else CONTRADICTION)]
              if now == now else []),
        ],
        measurement="the same scenario with a larger batch",
        settings={"max_num_seqs": first},
        if_cause=f"waiting for a place falls from {capped:.0%} of all waiting to little",
        if_rival=f"{missing_share(excess)} stays, and the time per output token grows with the batch",
        fixes=tuple(Change(settings={"max_num_seqs": value}) for value in values),
        rival_fix=Change(device_speed=2.0),
    )  # fmt: skip


def _room(facts: Facts) -> list[Evidence]:
    """Whether the KV pool had room while requests waited."""
    if facts.steps is None:
        return []
    free = facts.steps.waited_with_kv_free
    statement = f"at least a fifth of the KV pool was free in {free:.0%} of that waiting"
    return [evidence(statement, free, "share", "steps: waiting, blocks_free, blocks_reusable", supports=free > 0.5)]


@cause(lifecycles=("compute", "request"), object="batch cap (max_num_seqs)", kind="policy", accounts=DECODE,
       needs=("excess", "step model", "work"), rival="a slow device: steps that are long for what they hold",
       rival_key="slow_device")  # fmt: skip
def batch_too_large(facts: Facts, excess: Excess) -> Proposal | None:
    """So many requests decode together that each step is longer than the time per output token allows."""
    bound = tightest(facts, "tpot_ms")
    if bound is None or excess.objective == "ttft_ms":
        return None
    steps, model, context = facts.steps, facts.steps.model, facts.work.context_tokens
    fits = int(batch_within_tpot(facts))
    alone_ms = model.predict(1, context) / 1e6
    now_ms = model.predict(steps.mean_batch, steps.mean_batch * context) / 1e6
    if alone_ms > bound or steps.mean_batch <= fits or now_ms < LARGER_STEP * alone_ms:
        return None
    then = load(facts, batch=fits)
    values = list(dict.fromkeys(max(1, int(part * fits)) for part in NARROWER))
    return Proposal(
        cause=f"a decode step of {steps.mean_batch:.0f} requests takes {now_ms:.1f} ms; {fits} would meet the "
        f"{bound:g} ms",
        evidence=[
            *excess_evidence(excess, DECODE),
            evidence(f"a step takes {alone_ms:.1f} ms for one request and {now_ms:.1f} ms for the "
                     f"{steps.mean_batch:.0f} that it holds", now_ms / alone_ms, "ratio", "steps: fit", weight=2),
            load_evidence(f"with {fits} at a time load / capacity is {then:.2f}", then, supports=then < FULL, weight=2),
            *residual_evidence(facts),
        ],
        measurement="the same scenario with a smaller batch",
        settings={"max_num_seqs": values[0]},
        if_cause=f"decode steps fall to about {model.predict(fits, fits * context) / 1e6:.1f} ms",
        if_rival=f"decode steps stay near {now_ms:.1f} ms",
        claims=all_of(DECODE, 1 - alone_ms / now_ms),
        fixes=tuple(Change(settings={"max_num_seqs": value}) for value in values),
    )  # fmt: skip
