"""One rank of a parallel group computes longer than the others for as much work, and all wait for it."""

from sojourn.diagnosis.cause import Cause, Change, Evidence, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.ranks import RANKS, TOKENS, tokens_explain, waits_for
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME, NEGLIGIBLE, Reading
from sojourn.metrics.compute.group_facts import GroupFacts

BUBBLE = "compute.bubble"
COMMUNICATION = "compute.communication"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    group = facts.group()
    if group is None or not (slow := group.slowest).is_slow or tokens_explain(group, slow):
        return None
    beside = "the other ranks of its stage" if slow.of_stage else "the other stages"
    speed = 1 / (1 - min(slow.lost_share, 0.9))
    return Proposal(
        cause=f"rank {slow.rank} computes {slow.times:.1f} times as long as {beside}, and the group waits for it",
        evidence=[
            evidence(f"rank {slow.rank} computes {slow.times:.2f} times as long as {beside}", slow.times, "ratio",
                     RANKS, weight=3),
            evidence(f"that is {slow.lost_share:.0%} of the steps' time", slow.lost_share, "share", RANKS, weight=2),
            *_token_evidence(group),
            *excess_evidence(excess, (COMMUNICATION, BUBBLE, *DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement=f"the same scenario with the devices, or the cores, of rank {slow.rank} and of another rank "
        "exchanged",
        if_cause="the slowness stays with the device",
        if_rival=f"it stays with rank {slow.rank}, and with its experts",
        claims=waits_for(group, slow.lost_share),
        change=f"mend the device of rank {slow.rank} or take another one: its clock, its cores, what else runs there",
        fixes=(Change(device_speed=speed),),
    )  # fmt: skip


def _token_evidence(group: GroupFacts) -> list[Evidence]:
    """That its experts do not explain how long it computes."""
    if (uneven := group.expert_imbalance) is None:
        return []
    statement = f"the experts of the busiest rank have {uneven:.2f} times the mean of the tokens, which is not enough"
    return [evidence(statement, uneven, "ratio", TOKENS, weight=2)]


def show_slowest_rank(facts: Records) -> Reading | None:
    """One process waits for none."""
    group = facts.group()
    if group is None and facts.steps is None:
        return None
    lost = 0.0 if group is None else max(0.0, group.slowest.lost_share)
    return Reading(
        f"ranks wait for rank {group.slowest.rank} in {lost:.0%} of the steps' time" if group else "there is one rank",
        lost < NEGLIGIBLE,
        "steps: rank_busy_ns",
        lost,
    )


CAUSE = Cause(
    key="slow_rank",
    lifecycles=("compute",),
    object="one rank of the group",
    kind="fault",
    rival="experts that are chosen unevenly",
    rival_key="expert_imbalance",
    asks="Does one rank compute longer than the others?",
    measurement="the same scenario with the devices of two ranks exchanged",
    figures=(show_slowest_rank,),
    booked=(*DEVICE_TIME, "compute.communication", "compute.bubble"),
    missing="the time of each rank (steps: rank_*_ns)",
    complaints={"high_ttft": 13, "high_itl": 15, "devices_do_not_help": 8},
    reads={
        Records: Rule(
            read_records, accounts=(COMMUNICATION, BUBBLE, *DEVICE_ACCOUNTS, *WAITS), needs=("excess", "steps")
        )
    },
)
