"""Ranks stand in exchanges for much of each step: the link is slow, or it carries too much for what it spares."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.ranks import EXCHANGES, MUCH, SLOW_LINK, saved_and_spent, slow_link
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME, show_exchanges

COMMUNICATION = "compute.communication"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
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
            *slow_link(group, supports=True),
            saved_and_spent(group),
            *excess_evidence(excess, (COMMUNICATION, *DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement="sojourn calibrate device beside the server: the exchanges of two ranks alone",
        if_cause="the exchanges take as long there as they do in the steps",
        if_rival="the link is as fast as it was measured",
        claims={COMMUNICATION: gained / share} | all_of((*DEVICE_ACCOUNTS, *WAITS), gained),
        change="a faster link between the ranks (NVLink in place of PCIe or the network), or ranks of one host"
        if is_slow else "fewer ranks with more memory each, or larger batches, which share the latency of an exchange",
        fixes=(Change(device_speed=speed),),
    )  # fmt: skip


CAUSE = Cause(
    key="communication_overhead",
    lifecycles=("compute",),
    object="link between ranks",
    kind="fault",
    rival="a group that the model does not need",
    rival_key="needless_parallelism",
    asks="Do ranks stand in exchanges?",
    measurement="sojourn calibrate device: the exchanges of two ranks alone",
    figures=(show_exchanges,),
    booked=(*DEVICE_TIME, "compute.communication"),
    missing="the time of each rank (steps: rank_*_ns)",
    complaints={"high_ttft": 11, "high_itl": 13, "devices_do_not_help": 6},
    reads={Records: Rule(read_records, accounts=(COMMUNICATION, *DEVICE_ACCOUNTS, *WAITS), needs=("excess", "steps"))},
)
