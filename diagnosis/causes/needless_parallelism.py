"""Ranks share a model that one device holds and computes faster: data parallel replicas would use them better."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.ranks import RANKS, one_process, saved_and_spent, slow_link
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME, show_exchanges
from sojourn.metrics.prediction import settings_text

COMMUNICATION = "compute.communication"
WORTH_A_CHANGE = 1.15  # times as fast: less may be the spread of two runs


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    group = facts.group()
    if group is None or group.shape.pipeline_parallel > 1 or group.fits_one_device is not True:
        return None
    speed = group.one_process_speed
    if speed < WORTH_A_CHANGE or group.slowest.is_slow:  # what a slow rank takes is no work that one process would have
        return None
    settings = one_process(group)
    return Proposal(
        cause=f"{group.shape.num_ranks} ranks share a model that one device holds: their exchanges cost more than the "
        "division spares",
        evidence=[
            saved_and_spent(group),
            evidence(f"one process would take {1 / speed:.0%} of the device time for the same steps", speed, "ratio",
                     RANKS, weight=2),
            *slow_link(group, supports=False),
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


CAUSE = Cause(
    key="needless_parallelism",
    lifecycles=("compute",),
    object="parallel group",
    kind="policy",
    rival="a slow link between the ranks",
    rival_key="communication_overhead",
    asks="Do several ranks share what one device holds?",
    measurement="the same scenario with one process",
    figures=(show_exchanges,),
    booked=(*DEVICE_TIME, "compute.communication"),
    missing="the time of each rank (steps: rank_*_ns)",
    complaints={"high_ttft": 10, "high_itl": 12, "devices_do_not_help": 5},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
