"""Parallel groups: exchanges that cost more than the division spares, stages that wait, and groups nobody needs."""

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import CONTRADICTION, Proposal, all_of, cause
from sojourn.diagnosis.rules.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, missing_share
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.compute.group_facts import GroupFacts
from sojourn.metrics.prediction import Change, settings_text

COMMUNICATION, BUBBLE = "compute.communication", "compute.bubble"
WORTH_A_CHANGE = 1.15  # times as fast: less may be the spread of two runs
MUCH = 0.2  # of a step's time
SLOW_LINK = 6.0  # the fastest exchanges over what the measured link needs: a busy machine makes up to four times
ONE = {"tensor_parallel": 1, "expert_parallel": 1, "pipeline_parallel": 1}
RANKS = "steps: rank_busy_ns, rank_communication_ns, rank_bubble_ns"
EXCHANGES = "steps: communication_ns, exchange_ns; run.json: ceilings.links"


@cause(lifecycles=("compute",), object="parallel group", kind="policy", needs=("excess", "steps"),
       rival="a slow link between the ranks", rival_key="communication_overhead")  # fmt: skip
def needless_parallelism(facts: Facts, excess: Excess) -> Proposal | None:
    """Ranks share a model that one device holds and computes faster: data parallel replicas would use them better."""
    group = facts.group()
    if group is None or group.shape.pipeline_parallel > 1 or group.fits_one_device is not True:
        return None
    speed = group.one_process_speed
    if speed < WORTH_A_CHANGE or group.slowest.is_slow:  # what a slow rank takes is no work that one process would have
        return None
    settings = _one_process(group)
    return Proposal(
        cause=f"{group.shape.num_ranks} ranks share a model that one device holds: their exchanges cost more than the "
        "division spares",
        evidence=[
            _saved_and_spent(group),
            evidence(f"one process would take {1 / speed:.0%} of the device time for the same steps", speed, "ratio",
                     RANKS, weight=2),
            *_slow_link(group, supports=False),
            *excess_evidence(excess, (COMMUNICATION, *DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement="the same scenario with one process; further devices get replicas of the model",
        settings=settings,
        if_cause=f"device time falls to {1 / speed:.0%}, and a replica on each device serves more requests",
        if_rival=f"one process computes alone, and is slower than the group; {missing_share(excess)} stays",
        claims={COMMUNICATION: 1.0} | all_of((*DEVICE_ACCOUNTS, *WAITS), 1 - 1 / speed),
        change=f"{settings_text(settings)}; replicas of the model (data parallel) for more requests at a time",
        fixes=(Change(settings=settings, device_speed=speed),),
    )  # fmt: skip


@cause(lifecycles=("compute",), object="link between ranks", kind="fault", needs=("excess", "steps"),
       accounts=(COMMUNICATION, *DEVICE_ACCOUNTS, *WAITS),
       rival="a group that the model does not need", rival_key="needless_parallelism")  # fmt: skip
def communication_overhead(facts: Facts, excess: Excess) -> Proposal | None:
    """Ranks stand in exchanges for much of each step: the link is slow, or it carries too much for what it spares."""
    group = facts.group()
    if group is None or group.shape.ranks_per_stage < 2 or (share := group.communication_share) < MUCH:
        return None
    slowdown = group.link_slowdown
    is_slow = slowdown is not None and slowdown >= SLOW_LINK
    if group.fits_one_device and not is_slow:
        return None  # the group itself is what is wrong
    gained = share * (1 - 1 / slowdown) if is_slow else share / 2
    speed = 1 / (1 - gained)
    return Proposal(
        cause=f"exchanges between ranks take {share:.0%} of each step's time"
        + (f", {slowdown:.0f} times what the link needs" if is_slow else ""),
        evidence=[
            evidence(f"exchanges take {share:.0%} of the steps' device time", share, "share", EXCHANGES, weight=2),
            *_slow_link(group, supports=True),
            _saved_and_spent(group),
            *excess_evidence(excess, (COMMUNICATION, *DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement="sojourn calibrate-device beside the server: the exchanges of two ranks alone",
        settings=None,
        if_cause="the exchanges take as long there as they do in the steps",
        if_rival="the link is as fast as it was measured",
        claims={COMMUNICATION: gained / share} | all_of((*DEVICE_ACCOUNTS, *WAITS), gained),
        change="a faster link between the ranks (NVLink in place of PCIe or the network), or ranks of one host"
        if is_slow else "fewer ranks with more memory each, or larger batches, which share the latency of an exchange",
        fixes=(Change(device_speed=speed),),
    )  # fmt: skip


@cause(lifecycles=("compute",), object="pipeline stages", kind="policy", needs=("excess", "steps"),
       rival="a device that is slow", rival_key="slow_device")  # fmt: skip
def pipeline_bubbles(facts: Facts, excess: Excess) -> Proposal | None:
    """Stages of a pipeline wait for each other: too few steps are under way, or the stages are unequal."""
    group = facts.group()
    if group is None or group.shape.pipeline_parallel < 2 or facts.steps is None:
        return None
    shares = group.bubble_shares
    mean = sum(shares) / len(shares)
    if mean < MUCH:
        return None
    speed = 1 / (1 - min(mean, 0.9))
    beside = "in one process" if group.fits_one_device else "with more requests at a time"
    stages, settings = group.shape.pipeline_parallel, _one_process(group)
    few = facts.steps.mean_batch < stages
    by_stage = ", ".join(f"{share:.0%}" for share in shares)
    why = f"with {facts.steps.mean_batch:.1f} requests in a step" if few else f"stage by stage {by_stage}"
    return Proposal(
        cause=f"{stages} pipeline stages wait for each other in {mean:.0%} of their time, {why}",
        evidence=[
            evidence(f"the stages wait for another one in {by_stage} of their time", mean, "share", RANKS, weight=3),
            evidence(f"the stage with most work has {group.imbalance:.2f} times the mean", group.imbalance, "ratio",
                     RANKS, weight=0),
            *excess_evidence(excess, (BUBBLE, *DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement=f"the same scenario {beside}",
        settings=settings if group.fits_one_device else None,
        if_cause=f"a step takes {1 / speed:.0%} of the time",
        if_rival=f"{missing_share(excess)} stays, and no stage waits",
        claims={BUBBLE: 1.0} | all_of((*DEVICE_ACCOUNTS, *WAITS), mean),
        change=f"{settings_text(settings)}, or tensor_parallel in its place" if group.fits_one_device
        else "more requests at a time, and stages of equal work",
        fixes=(Change(settings=settings, device_speed=speed),),
    )  # fmt: skip


def _saved_and_spent(group: GroupFacts) -> Evidence:
    """The exposed time of exchanges against the computation that the division spares, by step."""
    spent, saved = group.exchange_ns / group.steps / 1e6, group.saved_ns / group.steps / 1e6
    return evidence(
        f"a step spares {saved:.2f} ms of computation on each rank, and spends {spent:.2f} ms in exchanges",
        spent / max(saved, 1e-9), "ratio", RANKS, supports=spent > saved, weight=3,
    )  # fmt: skip


def _slow_link(group: GroupFacts, *, supports: bool) -> list[Evidence]:
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


def _one_process(group: GroupFacts) -> dict[str, object]:
    return {name: 1 for name in ONE if getattr(group.shape, name) > 1}
