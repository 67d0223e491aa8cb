"""The ranks of a parallel group: what they exchange, and whom they wait for."""

from sojourn.diagnosis.proposal import CONTRADICTION, all_of
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.compute.group_facts import GroupFacts, SlowestRank

BUBBLE = "compute.bubble"
COMMUNICATION = "compute.communication"
MUCH = 0.2  # of a step's time
SLOW_LINK = 6.0  # the fastest exchanges over what the measured link needs: a busy machine makes up to four times
ONE = {"tensor_parallel": 1, "expert_parallel": 1, "pipeline_parallel": 1}
RANKS = "steps: rank_busy_ns, rank_communication_ns, rank_bubble_ns"
EXCHANGES = "steps: communication_ns, exchange_ns; run.json: ceilings.links"
EXPLAINED = 1.2  # times what the tokens explain: more is a slow rank
TOKENS = "steps: expert_tokens, of one step in 16"


def saved_and_spent(group: GroupFacts) -> Evidence:
    """The exposed time of exchanges against the computation that the division spares, by step."""
    spent, saved = group.exchange_ns / group.steps / 1e6, group.saved_ns / group.steps / 1e6
    return evidence(
        f"a step spares {saved:.2f} ms of computation on each rank, and spends {spent:.2f} ms in exchanges",
        spent / max(saved, 1e-9), "ratio", RANKS, supports=spent > saved, weight=3,
    )  # fmt: skip


def slow_link(group: GroupFacts, *, supports: bool) -> list[Evidence]:
    """What the link would need, where it was measured. Against a needless group only where the link is slow."""
    slowdown = group.link_slowdown
    if slowdown is None:
        return []
    is_slow = slowdown >= SLOW_LINK
    statement = f"even the fastest exchanges take {slowdown:.1f} times what the measured link needs for them"
    if not supports:
        return [evidence(statement, slowdown, "ratio", EXCHANGES, supports=not is_slow,
                         weight=CONTRADICTION if is_slow else 1)]  # fmt: skip
    return [evidence(statement, slowdown, "ratio", EXCHANGES, supports=is_slow, weight=3 if is_slow else 1)]


def one_process(group: GroupFacts) -> dict[str, object]:
    return {name: 1 for name in ONE if getattr(group.shape, name) > 1}


def waits_for(group: GroupFacts, lost: float) -> dict[str, float]:
    """Claims of a rank that the others wait for during the share `lost` of the steps' time."""
    device = max(group.device_ns, 1.0)
    waits = {COMMUNICATION: group.communication_ns[0] / device, BUBBLE: group.bubble_ns[0] / device}
    return {name: min(1.0, lost / share) for name, share in waits.items() if share > 0} | all_of(
        (*DEVICE_ACCOUNTS, *WAITS), lost
    )


def tokens_explain(group: GroupFacts, slow: SlowestRank) -> bool:
    """Whether the rank has the experts with most tokens, and computes no longer than it would for those alone."""
    tokens, size = group.expert_rank_tokens, group.shape.ranks_per_stage
    if not sum(tokens) or slow.rank >= size:
        return False
    part = slow.rank * group.shape.expert_parallel // size
    others = (sum(tokens) - tokens[part]) / max(1, len(tokens) - 1)
    return tokens[part] == max(tokens) and slow.times <= EXPLAINED * tokens[part] / max(others, 1.0)
