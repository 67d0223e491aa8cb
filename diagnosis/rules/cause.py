"""What a cause is: one function over the facts of a run, and under `@cause` all that is the same in every run.

To add a cause, write its function in a file of this folder; no other place lists it. Every cause is asked about every
excess: the function returns a `Proposal`, or None where the cause does not apply. `adjudicate` decides between the
proposals, by replays of their fixes where it can. So a function need not know the other causes. It says:

- how much of which accounts its own evidence books to it (`claims`). The default is the accounts of the cause, and of
  a queue the part that waited for its `reason`;
- evidence for and against, each with a size and a weight;
- its fix as one or several replays (`fixes`), with settings computed from measured quantities; or `in_replay=False`
  for what a replay does not have, such as blocks that leak: the run replayed unchanged is then the run without it;
- `capacity_rps`, if it claims that no more than that can be served: what was served is held against it.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from sojourn.diagnosis.capacity import load
from sojourn.diagnosis.excess import SERVED, Excess, attainment, attainment_without
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.server_means import shows_ledger
from sojourn.diagnosis.verdict import Evidence, Fix, Kind, Probe, evidence
from sojourn.metrics.prediction import Change, settings_text, shown_setting

# A cause is proposed if it explains this share of an excess: a tenth could be chance. `adjudicate` asks for more.
WORTH_A_LOOK = 0.1
ADMISSION = "request.admission"
QUEUE = ("request.queue", ADMISSION)
WAITS = (*QUEUE, "memory.blocked")
CONTENTION = (*WAITS, "request.interference")  # time that other requests cost
# Where a function must decide alone whether its accounts explain enough to be of any use.
EXPLAINS_ENOUGH = 0.3
ALMOST = 0.9  # of what was served: an estimate of capacity is good to about a tenth
CONTRADICTION = 4.0  # the weight of evidence that rules a cause out unless everything else speaks for it

Need = Literal["excess", "loss", "steps", "step model", "work", "load"]
IS_KNOWN: dict[Need, Callable[[Facts, Excess | None], bool]] = {
    "excess": lambda facts, excess: excess is not None and excess.objective != SERVED,
    "loss": lambda facts, excess: excess is not None and excess.objective == SERVED,
    "steps": lambda facts, excess: facts.steps is not None,
    "step model": lambda facts, excess: facts.steps is not None and facts.steps.model is not None,
    "work": lambda facts, excess: facts.work is not None,
    "load": lambda facts, excess: not math.isnan(load(facts)),
}


@dataclass(frozen=True, slots=True)
class Gain:
    """What a fix gains where no replay can tell, and what that estimate rests on."""

    statement: str
    basis: str
    share: float | None = None  # attainment regained, 0 to 1; None where it is not known in that unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the function of a cause says of one excess. Where it leaves a default, the registered cause fills it in."""

    cause: str
    evidence: list[Evidence]
    measurement: str  # that separates the cause from its rival
    settings: dict[str, object] | None  # that the measurement changes; None where no command makes it
    if_cause: str
    if_rival: str
    claims: Mapping[str, float] | None = None  # account → share (0 to 1) of its excess that the evidence books to it
    explained: float | None = None  # share of a loss, or of an excess that no account holds, that it explains
    fixes: tuple[Change, ...] = ()  # candidates, the likeliest first; () where no replay can show its fix
    in_replay: bool = True  # False: no replay has this cause, so the run replayed unchanged is the run without it
    rival_fix: Change | None = None
    rival_key: str = ""
    capacity_rps: float | None = None  # the cause claims that no more than this can be served
    gain: Gain | None = None  # by default that of the claims
    change: str = ""  # what mends it, in words; the settings of the measurement
    lifecycles: tuple[str, ...] = ()
    object: str = ""
    kind: Kind | None = None
    request_ids: tuple[str, ...] = ()  # that show it worst; by default the latest
    steps: tuple[int, int] | None = None  # first and last step of its worst stretch
    key: str = ""  # these three are never the function's own
    rival: str = ""
    command: str = ""

    def verdict(self) -> dict[str, Any]:
        """The fields of a Finding that the cause knows."""
        probe = Probe(measurement=self.measurement, command=self.command, rival=self.rival, if_cause=self.if_cause,
                      if_rival=self.if_rival)  # fmt: skip
        fix = Fix(change=self.change, gain=self.gain.statement, basis=self.gain.basis)
        return {"lifecycles": list(self.lifecycles), "object": self.object, "cause": self.cause, "kind": self.kind,
                "evidence": self.evidence, "probe": probe, "fix": fix, "key": self.key,
                "rival_key": self.rival_key, "steps": self.steps}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A registered cause. A call explains an excess with it, and returns None where it does not apply."""

    explain: Callable[[Facts, Any], Proposal | None]
    lifecycles: tuple[str, ...]  # most responsible first; the first is the bottleneck
    object: str  # the thing in that lifecycle
    kind: Kind
    rival: str  # the cause that looks alike
    rival_key: str = ""  # its key; "" where it is none of ours
    needs: tuple[Need, ...] = ("excess",)  # without these it does not apply
    accounts: tuple[str, ...] = ()  # if these do not explain enough of the excess, it does not apply
    reason: str = ""  # of the waiting, only the part that has this reason counts
    symptom: str = ""  # that it can explain though no objective is missed
    in_front: bool = False  # only such a cause can explain what a request waited for the front's event loop
    of_fleet: bool = False  # asked about a fleet as a whole; most causes are asked about each of its servers
    # metrics: of a server that recorded nothing for us; accounts: where no step is known; client: where nothing else is
    reads: Literal["records", "metrics", "accounts", "client"] = "records"

    @property
    def key(self) -> str:
        return self.explain.__name__

    @property
    def name(self) -> tuple[str, str, bool]:
        """No two causes have the same: what it reads, its key, and whether it is of lost requests."""
        return self.reads, self.key, "loss" in self.needs

    @property
    def of_whole(self) -> bool:
        """Whether a fleet shows it that no server alone does: its router, its clients, and lost requests."""
        return self.of_fleet or self.lifecycles[0] == "client" or "loss" in self.needs

    def __call__(self, facts: Facts, excess: Excess | None) -> Proposal | None:
        if not self._applies(facts, excess) or (found := self.explain(facts, excess)) is None:
            return None
        claims = self._claims(facts) if found.claims is None else found.claims
        if not self.in_front and ADMISSION in claims and excess is not None:
            claims = {**claims, ADMISSION: claims[ADMISSION] * (1 - _front_share(facts, excess))}
        found = _held_against_the_served(facts, found)
        return replace(
            found,
            key=self.key,
            claims=claims,
            rival=self.rival,
            rival_key=found.rival_key or self.rival_key,
            lifecycles=found.lifecycles or self.lifecycles,
            object=found.object or self.object,
            kind=found.kind or self.kind,
            change=found.change or settings_text(found.settings or {}),
            command="" if found.settings is None else rerun(facts, **found.settings),
            gain=found.gain or gain(facts, claims),
        )

    def _applies(self, facts: Facts, excess: Excess | None) -> bool:
        if not all(IS_KNOWN[need](facts, excess) for need in self.needs):
            return False
        if self.reads == "metrics" and facts.server is None:
            return False
        if excess is None or not self.accounts or IS_KNOWN["loss"](facts, excess):
            return True
        claims = self._claims(facts)
        return sum(excess.share(name) * part for name, part in claims.items()) >= WORTH_A_LOOK

    def _claims(self, facts: Facts) -> dict[str, float]:
        """By default all of the accounts of the cause, and with a reason the part of the waiting that has it."""
        return dict.fromkeys(self.accounts, facts.waits.get(self.reason, 0.0) if self.reason else 1.0)


CAUSES: list[Cause] = []


def cause(**registered: Any) -> Callable[[Callable[..., Proposal | None]], Cause]:
    """Registers a function as a cause under its own name; `registered` are fields of Cause."""

    def register(explain: Callable[..., Proposal | None]) -> Cause:
        new = Cause(explain=explain, **registered)
        if any(other.name == new.name for other in CAUSES):
            raise ValueError(f"two causes have the name {new.key}")
        CAUSES.append(new)
        return new

    return register


def causes_for(facts: Facts) -> list[Cause]:
    """The causes that the evidence of this run can show, those that know most first."""
    by_server = facts.joined > 0 and any(read().steps is not None for read in facts.servers.values())
    if facts.joined:
        reads = ("records",) if facts.steps is not None or by_server else ("records", "accounts")
    elif facts.server is not None:
        reads = ("accounts", "metrics") if shows_ledger(facts) else ("metrics",)
    else:
        reads = ("client",)
    known = [each for kind in reads for each in CAUSES if each.reads == kind and (not by_server or each.of_whole)]
    if facts.joined:  # a lost request has no record of the server's: its error is all there is
        known += [each for each in CAUSES if each.reads == "client" and "loss" in each.needs]
    return known


def proposals(facts: Facts, excess: Excess) -> list[Proposal]:
    """What every cause that applies says of one excess. Of two with one key that which knows more speaks."""
    found: dict[str, Proposal] = {}
    for each in causes_for(facts):
        if each.key not in found and (proposal := each(facts, excess)) is not None:
            found[each.key] = proposal
    return list(found.values())


def proposals_of_symptom(facts: Facts, symptom: str) -> list[Proposal]:
    """What could be the cause of a symptom that shows without an objective being missed."""
    tried = [each for each in causes_for(facts) if each.symptom == symptom]
    return [found for each in tried if (found := each(facts, None)) is not None]


def _front_share(facts: Facts, excess: Excess) -> float:
    """Of what late requests waited before the core took them in, 0 to 1: for turns of the front's event loop."""
    if "front_turns_ns" not in facts.rows:
        return 0.0
    late = facts.rows.loc[excess.missing]
    waited = float(late.ledger_request_admission_ns.astype("float64").sum())
    return min(1.0, float(late.front_turns_ns.sum()) / waited) if waited > 0 else 0.0


def _held_against_the_served(facts: Facts, found: Proposal) -> Proposal:
    """A verdict of capacity is doubted where more than that was served."""
    served = facts.served_rps
    if found.capacity_rps is None or served is None or found.capacity_rps >= ALMOST * served:
        return found
    doubt = evidence(
        f"{served:.1f} requests/s were served while others waited, more than the {found.capacity_rps:.1f} that this "
        "cause allows", served / found.capacity_rps, "ratio", "client: last_byte_ns", supports=False,
        weight=CONTRADICTION,
    )  # fmt: skip
    return replace(found, evidence=[*found.evidence, doubt])


def gain(facts: Facts, claims: Mapping[str, float]) -> Gain:
    """An estimate of what is gained with these shares of the accounts gone; unknown where no account holds the time."""
    parts = [name if part >= 1 else f"{part:.0%} of {name}" for name, part in claims.items() if part > 0]
    if not parts:
        return Gain(statement="the gain is not known", basis="no account of time holds what was lost")
    now, then = attainment(facts), attainment_without(facts, claims)
    return Gain(
        statement=f"attainment {now:.0%} → about {then:.0%}",
        basis=f"an estimate: every request judged again without its {' + '.join(parts)}",
        share=then - now,
    )


def all_of(accounts: Iterable[str], part: float = 1.0) -> dict[str, float]:
    """Claims: this share (0 to 1) of each of these accounts."""
    return dict.fromkeys(accounts, part)


def rerun(facts: Facts, **settings: object) -> str:
    """The line that repeats this run with other engine settings; "" where they are not ours to set.

    It is the command in `run.json`, so that every other setting and the seed stay what they were.
    """
    if facts.measured_by == "server":  # whatever clients sent, which no command of ours repeats
        return ""
    arguments = [str(argument) for argument in facts.meta.get("command") or ["sojourn", "run", facts.scenario]]
    if settings and arguments[1:2] == ["load"]:
        return ""
    for name, value in settings.items():
        for place in range(len(arguments) - 1, 0, -1):
            if arguments[place - 1] == "--set" and arguments[place].startswith(f"{name}="):
                del arguments[place - 1 : place + 1]
        arguments += ["--set", shown_setting(name, value)]
    return shlex.join(arguments)
