"""What a cause is: one function over the facts of a run, and under `@cause` all that is the same in every run.

To add a cause, write its function in a file of this folder; no other place lists it. Causes are tried in the order of
their precedence, and the first whose fix would gain something is named:

- from 100, faults. A slow device, host or front delays everything behind it and would look like a queue.
- from 200, settings. Each applies only if the step model says that another setting brings the load below the capacity.
- from 300, the load: bursts before overload, since overload is true of any device that is full for a while.
- from 400, what the workload costs on a sound server.
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from metrics.diagnosis.capacity import load
from metrics.diagnosis.excess import Excess, attainment, attainment_without
from metrics.diagnosis.facts import Facts
from metrics.diagnosis.verdict import Evidence, Fix, Kind, Probe

# A cause must explain this share of the excess to be named: below a third, two others could explain more.
EXPLAINS_ENOUGH = 0.3
QUEUE = ("request.queue", "request.admission")
WAITS = (*QUEUE, "memory.blocked")
CONTENTION = (*WAITS, "request.interference")  # time that other requests cost

Need = Literal["excess", "steps", "step model", "work", "load"]
IS_KNOWN: dict[Need, Callable[[Facts, Excess | None], bool]] = {
    "excess": lambda facts, excess: excess is not None,
    "steps": lambda facts, excess: facts.steps is not None,
    "step model": lambda facts, excess: facts.steps is not None and facts.steps.model is not None,
    "work": lambda facts, excess: facts.work is not None,
    "load": lambda facts, excess: not math.isnan(load(facts)),
}


@dataclass(frozen=True, slots=True)
class Gain:
    """What a fix gains, what that prediction rests on, and whether it is more than nothing."""

    statement: str
    basis: str
    helps: bool = True

    def __str__(self) -> str:
        return self.statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the function of a cause says of one run. Where it leaves a default, the registered cause fills it in."""

    cause: str
    evidence: list[Evidence]
    measurement: str  # that separates the cause from its rival
    settings: dict[str, object] | None  # that the measurement changes; None where no command makes it
    if_cause: str
    if_rival: str
    gain: Gain | None = None  # by default that of the accounts of the cause
    change: str = ""  # what mends it; the settings of the measurement
    lifecycles: tuple[str, ...] = ()
    object: str = ""
    kind: Kind | None = None
    key: str = ""  # these three are never the function's own
    rival: str = ""
    command: str = ""

    def verdict(self) -> dict[str, Any]:
        """The fields of a Finding that the cause knows."""
        probe = Probe(measurement=self.measurement, command=self.command, rival=self.rival, if_cause=self.if_cause,
                      if_rival=self.if_rival)  # fmt: skip
        fix = Fix(change=self.change, gain=self.gain.statement, basis=self.gain.basis)
        return {"lifecycles": list(self.lifecycles), "object": self.object, "cause": self.cause, "kind": self.kind,
                "evidence": self.evidence, "probe": probe, "fix": fix}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A registered cause. A call explains an excess with it, and returns None where it does not apply."""

    explain: Callable[[Facts, Any], Explanation | None]
    precedence: int
    lifecycles: tuple[str, ...]  # most responsible first; the first is the bottleneck
    object: str  # the thing in that lifecycle
    kind: Kind
    rival: str  # the cause that looks alike
    needs: tuple[Need, ...] = ("excess",)  # without these it does not apply
    accounts: tuple[str, ...] = ()  # if these do not explain enough of the excess, it does not apply
    reason: str = ""  # of the waiting, only the part that has this reason counts
    symptom: str = ""  # that it can explain though no objective is missed
    reads: Literal["records", "metrics"] = "records"  # metrics: of a server that recorded nothing for us

    @property
    def key(self) -> str:
        return self.explain.__name__

    def __call__(self, facts: Facts, excess: Excess | None) -> Explanation | None:
        if not self._applies(facts, excess) or (found := self.explain(facts, excess)) is None:
            return None
        return replace(
            found,
            key=self.key,
            rival=self.rival,
            lifecycles=found.lifecycles or self.lifecycles,
            object=found.object or self.object,
            kind=found.kind or self.kind,
            change=found.change or ", ".join(f"{name}={value}" for name, value in (found.settings or {}).items()),
            command="" if found.settings is None else rerun(facts, **found.settings),
            gain=found.gain or gain(facts, self.accounts),
        )

    def _applies(self, facts: Facts, excess: Excess | None) -> bool:
        if not all(IS_KNOWN[need](facts, excess) for need in self.needs):
            return False
        if self.reads == "metrics" and facts.server is None:
            return False
        part = facts.waits.get(self.reason, 0.0) if self.reason else 1.0
        return excess is None or not self.accounts or part * excess.share(*self.accounts) >= EXPLAINS_ENOUGH


CAUSES: list[Cause] = []  # in the order of their precedence


def cause(**registered: Any) -> Callable[[Callable[..., Explanation | None]], Cause]:
    """Registers a function as a cause under its own name; `registered` are fields of Cause."""

    def register(explain: Callable[..., Explanation | None]) -> Cause:
        new = Cause(explain=explain, **registered)
        for other in CAUSES:
            if other.reads == new.reads and (other.key == new.key or other.precedence == new.precedence):
                raise ValueError(f"causes {other.key} and {new.key} share a name or the precedence {new.precedence}")
        CAUSES.append(new)
        CAUSES.sort(key=lambda each: each.precedence)
        return new

    return register


def causes_for(facts: Facts) -> list[Cause]:
    """The causes that the server's records can show, or those that its metrics can."""
    reads = "records" if facts.joined else "metrics"
    return [each for each in CAUSES if each.reads == reads]


def first_cause(facts: Facts, excess: Excess, causes: list[Cause] | None = None) -> Explanation | None:
    """The cause of one excess: the first whose fix would gain something, else the first; None where none applies.

    Where requests miss two objectives, mending one of them alone gains nothing, and its cause is no less true.
    """
    tried = causes_for(facts) if causes is None else causes
    found = [explained for each in tried if (explained := each(facts, excess)) is not None]
    return next((explained for explained in found if explained.gain.helps), found[0] if found else None)


def cause_of_symptom(facts: Facts, symptom: str) -> Explanation | None:
    """The cause of a symptom that shows without an objective being missed."""
    tried = [each for each in causes_for(facts) if each.symptom == symptom]
    return next((found for each in tried if (found := each(facts, None)) is not None), None)


def gain(facts: Facts, accounts: tuple[str, ...], removed: float = 1.0) -> Gain:
    """What can be gained at most with `removed` (0 to 1) of these accounts gone."""
    now, then = attainment(facts), attainment_without(facts, accounts, removed)
    how = "without" if removed >= 1 else f"with {removed:.0%} less of"
    return Gain(
        statement=f"attainment {now:.0%} → at most {then:.0%}",
        basis=f"every request judged again {how} its {' + '.join(accounts)}; an upper bound",
        helps=then > now,
    )


def rerun(facts: Facts, **settings: object) -> str:
    """The line that repeats this run with other engine settings; "" where they are not ours to set.

    It is the command in `run.json`, so that every other setting and the seed stay what they were.
    """
    arguments = [str(argument) for argument in facts.meta.get("command") or ["sojourn", "run", facts.scenario]]
    if settings and arguments[1:2] == ["load"]:
        return ""
    for name, value in settings.items():
        for place in range(len(arguments) - 1, 0, -1):
            if arguments[place - 1] == "--set" and arguments[place].startswith(f"{name}="):
                del arguments[place - 1 : place + 1]
        arguments += ["--set", f"{name}={value}"]
    return shlex.join(arguments)
