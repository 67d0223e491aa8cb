"""Formats of weights, KV and all numbers: one that would be faster, and one that is slower than an exacter one."""

from typing import NamedTuple

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import Proposal, all_of, cause
from sojourn.diagnosis.rules.device import DEVICE_ACCOUNTS, WAITS
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, missing_share
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.compute.speed_facts import FORMATS, OtherSettings
from sojourn.metrics.prediction import Change, settings_text

# The more bits, the nearer to what the checkpoint stores. The error of fp8 is above that of int8
# (docs/kv_cache.md, docs/quantisation.md).
PRECISION = {"int4": 4, "fp8": 7, "int8": 8, "float16": 16, "bfloat16": 16, "float32": 32, "auto": 32}
STEPS = (*DEVICE_ACCOUNTS, *WAITS)
FASTER = 1.15  # below it two calibrations of one setting may differ as much
MOSTLY = 0.5  # of the waiting
MEASURED = "run.json: speed_reference"


class Smaller(NamedTuple):
    """What fewer bits would give, as parts of a verdict; all empty where nobody measured it."""

    evidence: list[Evidence]
    words: str
    fixes: tuple[Change, ...]


def smaller_weights(facts: Facts) -> Smaller:
    """The fastest format with fewer bits than the run's, by what its steps take at normal speed."""
    own, found = _own(facts, "weights"), _faster(facts, "weights")
    fewer = [each for each in found if PRECISION.get(each.settings["weights"], 99) < PRECISION.get(own, 0)]
    if not fewer:
        return Smaller([], "lower precision, ", ())
    best, name = fewer[0], fewer[0].settings["weights"]
    told = evidence(f"with weights={name} in place of {own} the same steps take {1 / best.speedup:.0%} of the time",
                    best.speedup, "ratio", MEASURED, weight=0)  # fmt: skip
    words = f"weights={name}, which changes outputs a little (weights_reference measures it), "
    return Smaller([told], words, (Change(settings={"weights": name}, device_speed=best.speedup),))


@cause(lifecycles=("compute",), object="format of weights or KV", kind="policy", needs=("excess", "steps"),
       rival="a slow device: any format would be slow on it", rival_key="slow_device")  # fmt: skip
def slow_format(facts: Facts, excess: Excess) -> Proposal | None:
    """A format of weights, KV or all numbers was chosen that is slower here than one that is as exact or more so."""
    exact = [
        (name, other)
        for name in FORMATS if name in facts.chosen and not (name == "kv_cache_dtype" and _lacks_blocks(facts))
        for other in _faster(facts, name)
        if PRECISION.get(other.settings[name], 0) >= PRECISION.get(_own(facts, name), 99)
    ]  # fmt: skip
    if not exact:
        return None
    name, best = max(exact, key=lambda each: each[1].speedup)
    own, settings = _own(facts, name), {name: best.settings[name]}
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


def _lacks_blocks(facts: Facts) -> bool:
    """Whether requests mostly wait for KV blocks: keys and values of more bits leave even fewer of them."""
    return facts.waits.get("kv_blocks", 0.0) >= MOSTLY


def _own(facts: Facts, name: str) -> str:
    held = facts.engine.get(name) if name == "kv_cache_dtype" else (facts.meta.get("core") or {}).get(name)
    return str(held or "")


def _faster(facts: Facts, name: str) -> list[OtherSettings]:
    """Other formats of `name` that are faster, the fastest first."""
    speed = facts.speed()
    return [] if speed is None else [each for each in speed.formats if name in each.settings and each.speedup >= FASTER]
