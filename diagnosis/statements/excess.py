"""Evidence that most causes give: what of the excess their accounts explain, the load, and the residual."""

from sojourn.diagnosis.evidence import Records
from sojourn.diagnosis.excess import EMPTY, SERVED, Excess
from sojourn.diagnosis.verdict import Evidence, evidence

# Device time above what the composition of the steps explains. The step model is good to about 10%, a shared machine
# jitters as much again; a third more over a quarter of the run is neither.
SLOW_DEVICE = 1.3
SPARED = 0.01  # of the excess, time that other accounts save: above it, the excess is not the whole difference
LONGER = {
    "ttft_ms": ("wait", "for the first token"),
    "tpot_ms": ("take", "per output token"),
    "e2e_ms": ("take", "from end to end"),
}


def excess_evidence(excess: Excess | None, accounts: tuple[str, ...]) -> list[Evidence]:
    """The share of the excess that these accounts explain, and against it the largest account that they leave out."""
    if excess is None or not excess.total_ms:
        return []
    source = f"requests: {'ttft' if excess.objective == 'ttft_ms' else 'ledger'}_*_ns"
    share = excess.share(*accounts)
    named = " + ".join(name for name, part in excess.ranked() if name in accounts and part >= 0.01)
    explained = f"{share:.0%} of that is {named} ({_ms(share * excess.total_ms)})"
    found = [evidence(f"{_longer(excess)}; {explained}", share, "share", source)] if named else []
    rest = [(name, part) for name, part in excess.ranked() if name not in accounts]
    if rest and rest[0][1] >= 0.1:
        name, part = rest[0]
        against = f"{part:.0%} of it is {name}, which this cause does not explain"
        found.append(evidence(against, part, "share", source, supports=False))
    return found


def _longer(excess: Excess) -> str:
    """How much longer late requests take: "late requests of chat wait 900 ms longer for the first token than …"."""
    who = "requests" if excess.baseline == EMPTY else "late requests"
    late = f"{who} of {excess.klass}" if excess.klass else who
    verb, what = LONGER[excess.objective]
    longer = f"{late} {verb} {_ms(excess.total_ms)} longer {what} than {excess.baseline}"
    spared = excess.total_ms - sum(excess.accounts.values())
    return longer + (", counting the accounts that grew" if spared > SPARED * excess.total_ms else "")


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:,.1f} ms"


def missing_share(excess: Excess | None) -> str:
    """The late or lost requests, for a prediction: "the share of chat above 400 ms (94%)"."""
    if excess is None:
        return "what is measured now"
    missed = "that is not served" if excess.objective == SERVED else f"above {excess.bound_ms:,.0f} ms"
    return f"the share of {excess.klass or 'requests'} {missed} ({excess.missed / excess.sent:.0%})"


def load_evidence(statement: str, load: float, *, supports: bool = True, weight: float = 1.0) -> Evidence:
    source = "steps: fit of wall time; client: due_ns"
    return evidence(statement, load, "ratio", source, supports=supports, weight=weight)


def residual_evidence(facts: Records) -> list[Evidence]:
    """Whether the device takes longer than its steps explain: evidence for every cause that is not the device.

    Against the normal speed of this model and device where that is known; else against the rest of the run, which shows
    a slow part and never a slow whole.
    """
    speed = facts.speed()
    if speed is not None and speed.source == "reference":
        slowdown, weight = speed.device.slowdown, 3.0
        statement, source = "they take at normal speed", "steps: device_ns; run.json: speed reference"
    elif facts.steps is not None and facts.steps.slowdown is not None:
        slowdown, weight = facts.steps.slowdown, 1.0
        statement, source = "their composition explains", "steps: device_ns, predicted_ns"
    else:
        return []
    at_fault = slowdown >= SLOW_DEVICE
    statement = f"steps take {slowdown:.2f} times what {statement}: the device "
    statement += f"{'may be' if at_fault else 'is not'} at fault"
    return [evidence(statement, slowdown, "ratio", source, supports=not at_fault, weight=weight if at_fault else 1.0)]
