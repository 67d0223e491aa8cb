"""What a cause says of one excess, and the words that several causes say it with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.regained import estimate
from sojourn.diagnosis.verdict import Evidence, Fix, Kind, Probe
from sojourn.metrics.prediction import Change

# A cause is proposed if it explains this share of an excess: a tenth could be chance. `adjudicate` asks for more.
WORTH_A_LOOK = 0.1
ADMISSION = "request.admission"
QUEUE = ("request.queue", ADMISSION)
WAITS = (*QUEUE, "memory.blocked")
CONTENTION = (*WAITS, "request.interference")  # time that other requests cost
# Where a function must decide alone whether its accounts explain enough to be of any use.
EXPLAINS_ENOUGH = 0.3
CONTRADICTION = 4.0  # the weight of evidence that rules a cause out unless everything else speaks for it


@dataclass(frozen=True, slots=True)
class Gain:
    """What a fix gains where no replay can tell, and what that estimate rests on."""

    statement: str
    basis: str
    share: float | None = None  # attainment regained, 0 to 1; None where it is not known in that unit
    regains: bool = True  # False: no request is regained


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the function of a cause says of one excess. Where it leaves a default, the registered cause fills it in."""

    cause: str
    evidence: list[Evidence]
    measurement: str  # that separates the cause from its rival
    if_cause: str
    if_rival: str
    settings: dict[str, object] | None = None  # that the measurement changes; None where no command makes it
    rate_rps: float | None = None  # that the measurement sends at instead
    needs_records: bool = False  # the measurement is this run with the server's records
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
        fix = Fix(change=self.change, gain=self.gain.statement, basis=self.gain.basis, regains=self.gain.regains)
        return {"lifecycles": list(self.lifecycles), "object": self.object, "cause": self.cause, "kind": self.kind,
                "evidence": self.evidence, "probe": probe, "fix": fix, "key": self.key,
                "rival_key": self.rival_key, "steps": self.steps}  # fmt: skip


def gain(facts: Client, claims: Mapping[str, float]) -> Gain:
    """An estimate of what is gained with these shares of the accounts gone; unknown where no account holds the time."""
    parts = [name if part >= 1 else f"{part:.0%} of {name}" for name, part in claims.items() if part > 0]
    if not parts:
        return Gain(statement="the gain is not known", basis="no account of time holds what was lost")
    if not len(facts.rows):  # a watch knows sums over all requests
        return Gain(statement="the gain is not known", basis="no record of single requests")
    statement, share, is_some = estimate(facts, claims)
    basis = f"an estimate: every request judged again without its {' + '.join(parts)}"
    return Gain(statement=statement, basis=basis, share=share, regains=is_some)


def all_of(accounts: Iterable[str], part: float = 1.0) -> dict[str, float]:
    """Claims: this share (0 to 1) of each of these accounts."""
    return dict.fromkeys(accounts, part)
