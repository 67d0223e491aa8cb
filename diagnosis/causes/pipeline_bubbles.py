"""Stages of a pipeline wait for each other: too few steps are in flight, or the stages are unequal."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.ranks import MUCH, RANKS, one_process
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME, NEGLIGIBLE, Reading
from sojourn.metrics.prediction import settings_text

BUBBLE = "compute.bubble"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    group = facts.group()
    if group is None or group.shape.pipeline_parallel < 2 or facts.steps is None:
        return None
    shares = group.bubble_shares
    mean = sum(shares) / len(shares)
    if mean < MUCH:
        return None
    speed = 1 / (1 - min(mean, 0.9))
    beside = "in one process" if group.fits_one_device else "with more requests at a time"
    stages, settings = group.shape.pipeline_parallel, one_process(group)
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


def show_stage_waits(facts: Records) -> Reading | None:
    """One stage waits for none."""
    group = facts.group()
    if group is None and facts.steps is None:
        return None
    worst = 0.0 if group is None else max(group.bubble_shares)
    return Reading(
        f"a pipeline stage waits for another one in {worst:.0%} of its time" if group else "there is one stage",
        worst < NEGLIGIBLE,
        "steps: rank_bubble_ns",
        worst,
    )


CAUSE = Cause(
    key="pipeline_bubbles",
    lifecycles=("compute",),
    object="pipeline stages",
    kind="policy",
    rival="a device that is slow",
    rival_key="slow_device",
    asks="Do stages wait for each other?",
    measurement="the same scenario in one process",
    figures=(show_stage_waits,),
    booked=(*DEVICE_TIME, "compute.bubble"),
    missing="the time of each rank (steps: rank_*_ns)",
    complaints={"high_ttft": 12, "high_itl": 14, "devices_do_not_help": 7},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
