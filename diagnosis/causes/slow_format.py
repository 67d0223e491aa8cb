"""A format of weights, KV or all numbers was chosen that is slower here than one that is as exact or more so."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.formats import MEASURED, PRECISION, faster_formats, own_format
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME
from sojourn.metrics.compute.speed_facts import FORMATS
from sojourn.metrics.prediction import settings_text

STEPS = (*DEVICE_ACCOUNTS, *WAITS)
MOSTLY = 0.5  # of the waiting


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    exact = [
        (name, other)
        for name in FORMATS if name in facts.chosen and not (name == "kv_cache_dtype" and _lacks_blocks(facts))
        for other in faster_formats(facts, name)
        if PRECISION.get(other.settings[name], 0) >= PRECISION.get(own_format(facts, name), 99)
    ]  # fmt: skip
    if not exact:
        return None
    name, best = max(exact, key=lambda each: each[1].speedup)
    own, settings = own_format(facts, name), {name: best.settings[name]}
    return Proposal(
        cause=f"{name}={own} computes slower here than {settings_text(settings)}, which is as exact or more so",
        evidence=[
            evidence(f"with {settings_text(settings)} the same steps take {1 / best.speedup:.0%} of the time",
                     best.speedup, "ratio", MEASURED, weight=3),
            *excess_evidence(excess, STEPS),
        ],
        measurement=f"the same scenario with {settings_text(settings)}",
        settings=settings,
        if_cause=f"device time falls to {1 / best.speedup:.0%}",
        if_rival=f"device time stays, and so does {missing_share(excess)}",
        claims=all_of(STEPS, 1 - 1 / best.speedup),
        fixes=(Change(settings=settings, device_speed=best.speedup),),
    )  # fmt: skip


def _lacks_blocks(facts: Accounts) -> bool:
    """Whether requests mostly wait for KV blocks: keys and values of more bits leave even fewer of them."""
    return facts.waits.get("kv_blocks", 0.0) >= MOSTLY


CAUSE = Cause(
    key="slow_format",
    lifecycles=("compute",),
    object="format of weights or KV",
    kind="policy",
    rival="a slow device: any format would be slow on it",
    rival_key="slow_device",
    asks="Is this format slower here than an exacter one?",
    measurement="the same scenario with another format",
    booked=DEVICE_TIME,
    lacks="the speed of another format on this machine",
    complaints={"high_ttft": 8, "high_itl": 10},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
