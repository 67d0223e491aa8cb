"""Ranks of a group that the others wait for: one is slow, or its experts are chosen more often than those of others."""

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import Proposal, all_of, cause
from sojourn.diagnosis.rules.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.rules.parallel import BUBBLE, COMMUNICATION, RANKS
from sojourn.diagnosis.rules.shared_evidence import excess_evidence
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.compute.group_facts import LOST, GroupFacts, SlowestRank
from sojourn.metrics.prediction import Change, settings_text

UNEVEN = 1.3  # tokens for the experts of the busiest rank over the mean of the ranks
EXPLAINED = 1.2  # times what the tokens explain: more is a slow rank
TOKENS = "steps: expert_tokens, of one step in 16"


@cause(lifecycles=("compute",), object="one rank of the group", kind="fault", needs=("excess", "steps"),
       accounts=(COMMUNICATION, BUBBLE, *DEVICE_ACCOUNTS, *WAITS), rival="experts that are chosen unevenly",
       rival_key="expert_imbalance")  # fmt: skip
def slow_rank(facts: Facts, excess: Excess) -> Proposal | None:
    """One rank of a parallel group computes longer than the others for as much work, and all wait for it."""
    group = facts.group()
    if group is None or not (slow := group.slowest).is_slow or _tokens_explain(group, slow):
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
        settings=None,
        if_cause="the slowness stays with the device",
        if_rival=f"it stays with rank {slow.rank}, and with its experts",
        claims=_waits_for(group, slow.lost_share),
        change=f"mend the device of rank {slow.rank} or take another one: its clock, its cores, what else runs there",
        fixes=(Change(device_speed=speed),),
    )  # fmt: skip


@cause(lifecycles=("compute",), object="placement of experts", kind="policy", needs=("excess", "steps"),
       accounts=(COMMUNICATION, *DEVICE_ACCOUNTS, *WAITS), rival="a rank that is slow",
       rival_key="slow_rank")  # fmt: skip
def expert_imbalance(facts: Facts, excess: Excess) -> Proposal | None:
    """Tokens choose the experts of one rank more often than those of others, which wait for it in each mixture."""
    group = facts.group()
    if group is None or (uneven := group.expert_imbalance) is None or uneven < UNEVEN:
        return None
    slow, size = group.slowest, group.shape.ranks_per_stage
    if not _tokens_explain(group, slow):
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
        claims=_waits_for(group, lost),
        change=f"{settings_text(settings)}, or fewer ranks for the experts. Copies of the experts that are chosen most "
        "are not available",
        fixes=(Change(settings=settings, device_speed=speed),),
    )  # fmt: skip


def _waits_for(group: GroupFacts, lost: float) -> dict[str, float]:
    """Claims of a rank that the others wait for during the share `lost` of the steps' time."""
    device = max(group.device_ns, 1.0)
    waits = {COMMUNICATION: group.communication_ns[0] / device, BUBBLE: group.bubble_ns[0] / device}
    return {name: min(1.0, lost / share) for name, share in waits.items() if share > 0} | all_of(
        (*DEVICE_ACCOUNTS, *WAITS), lost
    )


def _token_evidence(group: GroupFacts) -> list[Evidence]:
    """That its experts do not explain how long it computes."""
    if (uneven := group.expert_imbalance) is None:
        return []
    statement = f"the experts of the busiest rank have {uneven:.2f} times the mean of the tokens, which is not enough"
    return [evidence(statement, uneven, "ratio", TOKENS, weight=2)]


def _tokens_explain(group: GroupFacts, slow: SlowestRank) -> bool:
    """Whether the rank has the experts with most tokens, and computes no longer than it would for those alone."""
    tokens, size = group.expert_rank_tokens, group.shape.ranks_per_stage
    if not sum(tokens) or slow.rank >= size:
        return False
    part = slow.rank * group.shape.expert_parallel // size
    others = (sum(tokens) - tokens[part]) / max(1, len(tokens) - 1)
    return tokens[part] == max(tokens) and slow.times <= EXPLAINED * tokens[part] / max(others, 1.0)
