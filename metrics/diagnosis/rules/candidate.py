"""A cause that a rule proposes, and the words that all rules share."""

import shlex
from dataclasses import dataclass

from metrics.diagnosis.evidence import Facts
from metrics.diagnosis.excess import Excess, attainment, attainment_without
from metrics.diagnosis.verdict import Evidence, Fix, Kind, Probe

# A cause must explain this share of the excess to be named: below a third, two others could explain more.
EXPLAINS_ENOUGH = 0.3
WAITS = ("request.queue", "request.admission", "memory.blocked")
CONTENTION = (*WAITS, "request.interference")  # where time goes that others' work takes
SPARED = 0.01  # of the excess, what other accounts make good: above it, the excess is not the whole difference
LONGER = {
    "ttft_ms": ("wait", "for the first token"),
    "tpot_ms": ("take", "per output token"),
    "e2e_ms": ("take", "from end to end"),
}


@dataclass(frozen=True, slots=True)
class Gain:
    """Attainment now, and at most what a fix can make of it."""

    now: float
    then: float

    def __str__(self) -> str:
        return f"attainment {self.now:.0%} → at most {self.then:.0%}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a rule says if it applies. `key` is the same for one cause under different symptoms."""

    key: str
    lifecycles: list[str]
    object: str
    cause: str
    kind: Kind
    evidence: list[Evidence]
    probe: Probe
    fix: Fix
    gain: Gain | None = None  # None where the fix is not about requests that are late


def evidence(statement: str, value: float, unit: str, source: str, *, supports: bool = True) -> Evidence:
    return Evidence(statement=statement, value=float(value), unit=unit, supports=bool(supports), source=source)


def excess_evidence(excess: Excess | None, accounts: tuple[str, ...]) -> list[Evidence]:
    """How much of the excess these accounts explain, and what the largest other account leaves to say against."""
    if excess is None or not excess.total_ms:
        return []
    prefix = "ttft" if excess.objective == "ttft_ms" else "ledger"
    share = excess.share(*accounts)
    named = " + ".join(name for name, part in excess.ranked() if name in accounts and part >= 0.01)
    result = [
        evidence(
            f"{_longer(excess)}; {share:.0%} of that is {named} ({_ms(share * excess.total_ms)})",
            share, "share", f"requests: {prefix}_*_ns",
        )
    ] if named else []  # fmt: skip
    rest = [(name, part) for name, part in excess.ranked() if name not in accounts]
    if rest and rest[0][1] >= 0.1:
        name, part = rest[0]
        result.append(
            evidence(f"{part:.0%} of it is {name}, which this cause does not explain", part, "share",
                     f"requests: {prefix}_*_ns", supports=False)
        )  # fmt: skip
    return result


def _longer(excess: Excess) -> str:
    """How much longer those that miss an objective take: "those of chat that miss it wait 900 ms longer for …"."""
    who = f"those of {excess.klass} that miss it" if excess.klass else "the requests that miss it"
    verb, what = LONGER[excess.objective]
    longer = f"{who} {verb} {_ms(excess.total_ms)} longer {what} than {excess.baseline}"
    spared = excess.total_ms - sum(excess.accounts.values())
    return longer + (", counting the accounts that grew" if spared > SPARED * excess.total_ms else "")


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:,.1f} ms"


def gain(facts: Facts, accounts: tuple[str, ...], removed: float = 1.0) -> Gain:
    """What can be gained at most with `removed` (0 to 1) of these accounts gone."""
    return Gain(attainment(facts), attainment_without(facts, accounts, removed))


def basis(accounts: tuple[str, ...], removed: float = 1.0) -> str:
    """What a gain rests on."""
    how = "without" if removed >= 1 else f"with {removed:.0%} less of"
    return f"every request judged again {how} its {' + '.join(accounts)}; an upper bound"


def rerun(facts: Facts, **settings: object) -> str:
    """The line that repeats this run with other engine settings; "" where they are not ours to set.

    It is the command that `run.json` keeps, so that every other setting and the seed stay what they were.
    """
    words = [str(word) for word in facts.meta.get("command") or ["sojourn", "run", facts.scenario]]
    if settings and words[1:2] == ["load"]:
        return ""
    for key, value in settings.items():
        old = [place for place, word in enumerate(words) if words[place - 1] == "--set" and word.startswith(f"{key}=")]
        for place in reversed(old):
            del words[place - 1 : place + 1]
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def missing_share(excess: Excess | None) -> str:
    """The share that misses, for a prediction: "94 % of chat miss it now"."""
    if excess is None:
        return "what is measured now"
    return f"{excess.missed / excess.sent:.0%} of {excess.klass or 'the requests'} above {excess.bound_ms:,.0f} ms"
