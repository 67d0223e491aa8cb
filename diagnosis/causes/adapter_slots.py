"""Requests wait until a slot is free for their LoRA adapter, because more adapters are in use than have one."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH, WAITS
from sojourn.diagnosis.statements import means
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.refutations import FULL_POOL

QUEUE, LOAD = "request.queue", "memory.adapter_load"
WORTH_SLOTS = 0.05  # of the waiting for a place: less is the end of a step


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    slots, waited = facts.engine.get("max_loras") or 0, facts.waits.get("adapter", 0.0)
    if "adapter" not in facts.rows or waited < WORTH_SLOTS:
        return None
    named = facts.rows.adapter.dropna()
    used = int(named.nunique())
    if used <= slots or excess.share(QUEUE) * waited + excess.share(LOAD) < WORTH_SLOTS:
        return None
    loads = float(facts.rows.adapter_loads.fillna(0).sum()) / len(named)
    settings = {"max_loras": used}
    return Proposal(
        cause=f"{used} adapters are requested, and {slots} at a time {'has' if slots == 1 else 'have'} a slot: "
        f"{waited:.0%} of the waiting is for one",
        evidence=[
            evidence(f"{waited:.0%} of the waiting was for an adapter's slot", waited, "share",
                     "requests: waits; steps: refusals", weight=4),
            evidence(f"an adapter was put into a slot for {loads:.0%} of the requests that named one", loads, "share",
                     "requests: adapter, adapter_loads", supports=loads >= 0.1),
            *excess_evidence(excess, (QUEUE, LOAD)),
        ],
        measurement="the same scenario with a slot for each adapter",
        settings=settings,
        if_cause="no request waits for an adapter",
        if_rival=f"{missing_share(excess)} stays, with the waiting booked to another reason",
        claims={QUEUE: waited, LOAD: 1.0},
        fixes=(Change(settings=settings),),
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """All slots are taken by adapters of running requests, and those that wait need another one."""
    view, used = facts.server, facts.server.courses.adapters
    part = means.queue_share(view, excess)
    if used is None or used.samples < means.FEWEST_SAMPLES or used.blocked < means.MOSTLY or part < EXPLAINS_ENOUGH:
        return None
    return Proposal(
        cause=f"{used.names} adapters are requested, and {used.slots} at a time {'has' if used.slots == 1 else 'have'} "
        "a slot: requests wait until a running adapter gives its slot up",
        evidence=[
            evidence(f"in {used.blocked:.0%} of the {used.samples} samples in which requests wait for an adapter, all "
                     f"{used.slots} slots are taken and one of them has none", used.blocked, "share", means.GAUGES,
                     weight=4),
            *means.queue_evidence(view, excess),
        ],
        measurement="one replica with a slot for each adapter (--max-loras), at the same load",
        settings={},
        if_cause="no request waits for an adapter",
        if_rival=f"as many wait, and {missing_share(excess)} stays",
        change=f"--max-loras {used.names}, or routing by adapter, so that each replica serves few of them",
        explained=part * used.blocked,
        gain=means.time_gained(view, f"{part:.0%} of the time to first token that is queue"),
    )  # fmt: skip


CAUSE = Cause(
    key="adapter_slots",
    lifecycles=("memory", "request"),
    object="adapter slots (max_loras)",
    kind="policy",
    rival="a batch that is too small for the load",
    rival_key="batch_cap",
    name="adapter slots",
    asks="Do requests wait for the slot of a LoRA adapter?",
    measurement="the same scenario with as many max_loras as adapters",
    booked=WAITS,
    missing="waits for the reason adapter (requests: waits)",
    complaints={"high_ttft": 1},
    reads={Records: Rule(read_records), Means: Rule(read_means, refuted_by=(FULL_POOL,))},
)
