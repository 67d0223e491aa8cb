"""Tokens choose the experts of one rank more often than those of others, which wait for it in each mixture."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.ranks import RANKS, TOKENS, tokens_explain, waits_for
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME, NEGLIGIBLE, Reading
from sojourn.metrics.compute.group_facts import LOST
from sojourn.metrics.prediction import settings_text

COMMUNICATION = "compute.communication"
UNEVEN = 1.3  # tokens for the experts of the busiest rank over the mean of the ranks


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    group = facts.group()
    if group is None or (uneven := group.expert_imbalance) is None or uneven < UNEVEN:
        return None
    slow, size = group.slowest, group.shape.ranks_per_stage
    if not tokens_explain(group, slow):
        return None
    computed = group.computed_ns[:size]
    longest, mean = max(computed), sum(computed) / size
    lost = (longest - mean) / max(group.device_ns, 1.0)
    if lost < LOST:
        return None
    speed, ranks = 1 / (1 - min(lost, 0.9)), group.shape.expert_parallel
    settings: dict[str, object] = {"expert_parallel": 1, "tensor_parallel": size}
    return Proposal(
        cause=f"{uneven:.1f} times the mean of the tokens go to the experts of rank {slow.rank}, and the other "
        f"{'rank waits' if size == 2 else 'ranks wait'} for it",
        evidence=[
            evidence(f"the experts of rank {slow.rank} have {uneven:.2f} times the mean of the {ranks} ranks' tokens",
                     uneven, "ratio", TOKENS, weight=3),
            evidence(f"the rank with most work computes {longest / max(mean, 1.0):.2f} times the mean: {lost:.0%} of "
                     "the steps' time", lost, "share", RANKS, weight=2),
            *excess_evidence(excess, (COMMUNICATION, *DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement=f"the same scenario with {settings_text(settings)}: each rank holds a part of every expert",
        settings=settings,
        if_cause=f"the ranks compute equally long, and a step takes {1 / speed:.0%} of the time",
        if_rival="one rank computes longer than the others as before",
        claims=waits_for(group, lost),
        change=f"{settings_text(settings)}, or fewer ranks for the experts. Copies of the experts that are chosen most "
        "are not available",
        fixes=(Change(settings=settings, device_speed=speed),),
    )  # fmt: skip


def show_expert_ranks(facts: Records) -> Reading | None:
    """Where each rank holds all experts, or a part of each, none has more tokens than another."""
    group = facts.group()
    if group is None and facts.steps is None:
        return None
    uneven = None if group is None else group.expert_imbalance
    if uneven is None:
        return Reading("no rank holds experts of its own", True, "run.json: engine.expert_parallel", 1.0)
    return Reading(
        f"the experts of the busiest rank have {uneven:.2f} times the mean of the tokens",
        uneven - 1 < NEGLIGIBLE,
        "steps: expert_tokens",
        uneven,
    )


CAUSE = Cause(
    key="expert_imbalance",
    lifecycles=("compute",),
    object="placement of experts",
    kind="policy",
    rival="a rank that is slow",
    rival_key="slow_rank",
    asks="Do tokens choose the experts of one rank?",
    measurement="the same scenario with tensor_parallel in the place of expert_parallel",
    figures=(show_expert_ranks,),
    booked=(*DEVICE_TIME, "compute.communication"),
    missing="the tokens of each expert (steps: expert_tokens)",
    complaints={"high_ttft": 14, "high_itl": 16, "devices_do_not_help": 9},
    reads={Records: Rule(read_records, accounts=(COMMUNICATION, *DEVICE_ACCOUNTS, *WAITS), needs=("excess", "steps"))},
)
