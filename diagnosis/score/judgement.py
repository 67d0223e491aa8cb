"""Was a verdict right? One verdict against one truth. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from sojourn.diagnosis.score.said import Said, SaidCause
from sojourn.diagnosis.score.truth import FaultRecord, Remedy, Truth
from sojourn.diagnosis.symptoms import TOLERATED_MISSES

HURTS = 0.10  # of attainment, below the runs of the base: with less, a client has nothing to complain of
LOOKED_AT = 3  # findings that a reader looks at
NOTHING = "nothing"  # in place of a lifecycle or cause, where none was named
UNBOUNDED = {None, "auto", "none"}  # values of a setting that stand above every number


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A scored verdict. A figure is None where it does not apply to the case, or cannot be scored."""

    run: str  # its folder, below the folder that was scored
    record: FaultRecord
    level: str
    said: Said
    attainment: float
    base_attainment: float | None  # mean over the base's runs; None where there are none
    counts: bool  # a fault that hurt, or a control that was what it should be
    lifecycle: bool | None = None
    first: bool | None = None
    among_three: bool | None = None
    kind: bool | None = None
    both: bool | None = None  # of two faults
    remedy: bool | None = None
    false_alarm: bool | None = None  # of a control

    @property
    def true_lifecycle(self) -> str:
        return self.record.truths[0].lifecycles[0] if self.record.truths else NOTHING

    @property
    def true_key(self) -> str:
        """The name of the truth: both keys, where two faults were planted."""
        return " + ".join(truth.keys[0] for truth in self.record.truths) or NOTHING

    @property
    def said_lifecycle(self) -> str:
        """As a confusion matrix counts it: another answer that is right counts as the best one."""
        return self.true_lifecycle if self.lifecycle else self.said.lifecycle or NOTHING

    @property
    def said_key(self) -> str:
        if self.first:
            return self.true_key
        return self.said.causes[0].key if self.said.causes else NOTHING


def hurts(attainment: float, base_attainment: float | None) -> bool:
    """Whether the client's own records show the fault. Without a run of the base, all requests should be good."""
    return (1.0 if base_attainment is None else base_attainment) - attainment >= HURTS


def is_as_stated(control: FaultRecord, attainment: float) -> bool:
    """Whether the client's own records agree with a control: one that was disturbed by its machine is no control."""
    return (attainment >= 1 - TOLERATED_MISSES) == (control.control == "healthy")


def judge(
    run: str, record: FaultRecord, level: str, said: Said, attainment: float, base_attainment: float | None,
    planted: Mapping[str, Any],
) -> Judgement:  # fmt: skip
    """`planted`: the engine's settings in the run, from which a remedy has to lead away."""
    truths, looked_at = record.truths, [cause.key for cause in said.causes[:LOOKED_AT]]
    named = [any(key in truth.keys for key in looked_at) for truth in truths]
    first = said.causes[0] if said.causes else None
    result = Judgement(
        run=run,
        record=record,
        level=level,
        said=said,
        attainment=attainment,
        base_attainment=base_attainment,
        counts=hurts(attainment, base_attainment) if truths else is_as_stated(record, attainment),
    )
    if not truths:
        return msgspec.structs.replace(result, false_alarm=_is_false_alarm(record, said))
    return msgspec.structs.replace(
        result,
        lifecycle=any(said.lifecycle in truth.lifecycles for truth in truths),
        first=any(first is not None and first.key in truth.keys for truth in truths),
        among_three=any(named),
        kind=any(first is not None and first.kind in truth.kinds for truth in truths),
        both=all(named) if len(truths) > 1 else None,
        remedy=_is_remedied(truths, first, planted),
    )


def _is_false_alarm(record: FaultRecord, said: Said) -> bool:
    """Another state than the control's; on a healthy one a finding that costs goodput, too."""
    if said.state != record.control:
        return True
    return record.control == "healthy" and any((cause.goodput_lost or 0.0) > 0 for cause in said.causes)


def _is_remedied(truths: list[Truth], first: SaidCause | None, planted: Mapping[str, Any]) -> bool | None:
    remedies = [remedy for truth in truths for remedy in truth.remedies]
    if not remedies:
        return None
    return first is not None and any(leads_to(remedy, first.settings, planted) for remedy in remedies)


def leads_to(remedy: Remedy, proposed: Mapping[str, Any], planted: Mapping[str, Any]) -> bool:
    """Whether a proposal sets this setting, to the right side of the planted value."""
    if remedy.setting not in proposed:
        return False
    value, before = proposed[remedy.setting], planted.get(remedy.setting)
    if value == before:
        return False
    above = _is_above(value, before)
    return remedy.direction == "other" or above is None or above == (remedy.direction == "larger")


def _is_above(value: Any, before: Any) -> bool | None:
    """None where the two have no order."""
    if value in UNBOUNDED or before in UNBOUNDED:
        return value in UNBOUNDED if (value in UNBOUNDED) != (before in UNBOUNDED) else None
    numbers = all(isinstance(each, int | float) for each in (value, before))
    return value > before if numbers else None
