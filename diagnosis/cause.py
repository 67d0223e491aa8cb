"""What a cause is: one declaration, in one file of `diagnosis/causes/`; no other place lists it.

From here the file of a cause imports what it needs: its functions read one kind of evidence each, and return a
`Proposal`, or None where the cause does not apply. Every cause is asked about every excess. `adjudicate` decides
between the proposals, by replays of their fixes where it can. So a function need not know the other causes. It says:

- how much of which accounts its own evidence books to it (`claims`). The default is the accounts of its rule, and of
  a queue the part that waited for its `reason`;
- evidence for and against, each with a size and a weight;
- its fix as one or several replays (`fixes`), with settings computed from measured quantities; or `in_replay=False`
  for what a replay does not have, such as blocks that leak: the run replayed unchanged is then the run without it;
- `capacity_rps`, if it claims that no more than that can be served: what was served is held against it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sojourn.diagnosis.evidence import Accounts, Client, Means, Records
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.proposal import Proposal
from sojourn.diagnosis.symptom_tree.reading import Read
from sojourn.diagnosis.verdict import Evidence, Kind, evidence
from sojourn.metrics.prediction import Change

__all__ = (
    "Accounts", "Cause", "Change", "Client", "Evidence", "Excess", "Means", "Proposal", "Records", "Refutation", "Rule",
    "evidence",
)  # fmt: skip

Need = Literal["excess", "loss", "steps", "step model", "work", "load"]


@dataclass(frozen=True, slots=True)
class Refutation:
    """What else a server's page may show, and a cause would not: then the rule that proposed it is dropped."""

    reads: str  # that part of the page, in words
    contradicts: Callable[[Means], str]  # in a sentence; "" where the page does not


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of evidence shows a cause. The last fields replace those of the cause, where the evidence names
    another thing."""

    explain: Callable[[Any, Any], Proposal | None]  # of the evidence and an excess
    accounts: tuple[str, ...] = ()  # if these do not explain enough of the excess, it does not apply
    reason: str = ""  # of the waiting, only the part that has this reason counts
    needs: tuple[Need, ...] = ("excess",)  # without these it does not apply
    symptom: str = ""  # that it can explain though no objective is missed
    lifecycles: tuple[str, ...] = ()
    object: str = ""
    kind: Kind | None = None
    rival: str = ""
    rival_key: str | None = None
    refuted_by: tuple[Refutation, ...] = ()  # of a rule that reads means


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A cause: what it is, where it stands in the symptom tree, and what shows it."""

    key: str
    lifecycles: tuple[str, ...]  # most responsible first; the first is the bottleneck
    object: str  # the thing in that lifecycle
    kind: Kind
    rival: str  # the cause that looks alike
    rival_key: str = ""  # its key; "" where it is none of ours
    in_front: bool = False  # only such a cause can explain what a request waited for the front's event loop
    of_fleet: bool = False  # asked about a fleet as a whole; most causes are asked about each of its servers
    reads: Mapping[type[Client], Rule]  # kind of evidence → what shows the cause in it
    lost: Rule | None = None  # what the client's record of lost requests shows of it
    # Of a consequence: the accounts that it is full of for good, or not at all. A cause of that time is its root, and
    # stands before it.
    follows_from: tuple[str, ...] = ()
    # Its leaf of the symptom tree. Complaint → its place among the causes of that complaint, the most frequent first.
    complaints: Mapping[str, int] = field(default_factory=dict)
    name: str = ""  # of the leaf, where the object has another one there
    asks: str = ""  # the question of a newcomer
    measurement: str = ""  # that separates it from what looks alike
    figures: tuple[Read, ...] = ()
    booked: tuple[str, ...] = ()  # the accounts that hold its time; without any, accounts cannot rule it out
    lacks: str = ""  # the evidence that no run of ours has by itself
    missing: str = "the server's records of its steps"  # evidence without which no figure can be read
