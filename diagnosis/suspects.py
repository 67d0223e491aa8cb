"""Suspects: the causes that were proposed for a run, and how the lost time and the lost requests divide among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sojourn.diagnosis.consequences import near_keys, roots
from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.proposal import Proposal
from sojourn.diagnosis.proposals import proposals
from sojourn.diagnosis.server_proposals import server_proposals
from sojourn.diagnosis.verdict import support_of

Name = tuple[str, str, str]  # of an excess: class, objective, error
Claims = Mapping[Name, Mapping[str, float]]  # excess → account → share of it


@dataclass(slots=True)
class Suspect:
    """One cause and all that it was proposed for. Times are milliseconds of one late request."""

    key: str
    cases: list[tuple[Excess, Proposal]]
    explains_ms: dict[Name, float] = field(default_factory=dict)  # without what others explain better
    explained: float = 0.0  # of all that is lost, 0 to 1: the shares of its excesses, weighted by lost requests
    follows: set[str] = field(default_factory=set)  # keys of its roots: what it is a consequence of

    @property
    def main(self) -> tuple[Excess, Proposal]:
        """The case in which it explains most of the lost requests."""
        return max(self.cases, key=lambda case: case[0].missed * own_share(*case))

    @property
    def proposal(self) -> Proposal:
        return self.main[1]

    @property
    def support(self) -> float:
        """The weight of the evidence for it, of all that was weighed: 0 to 1, and ½ where nothing was."""
        return support_of(self.proposal.evidence)

    def claims(self) -> dict[Name, Mapping[str, float]]:
        return {excess.name: proposal.claims or {} for excess, proposal in self.cases}


def own_share(excess: Excess, proposal: Proposal) -> float:
    """The share of an excess that a proposal explains if it stands alone, 0 to 1."""
    if proposal.explained is not None:
        return proposal.explained
    return sum(excess.share(name) * part for name, part in (proposal.claims or {}).items())


def suspects_of(facts: Client, lost: Sequence[Excess]) -> list[Suspect]:
    """The causes proposed for any of these excesses, with the time divided among them."""
    found: dict[str, Suspect] = {}
    for excess in lost:
        of_fleet = proposals(facts, excess)
        proposed = [*of_fleet, *server_proposals(facts, excess, {each.key for each in of_fleet})]
        behind = roots(facts, excess, proposed)
        for proposal in (*proposed, *behind):
            found.setdefault(proposal.key, Suspect(proposal.key, [])).cases.append((excess, proposal))
        for near in near_keys(facts, excess, proposed):
            found[near].follows |= {each.key for each in (*proposed, *behind)} - {near}
    suspects = list(found.values())
    divide(lost, suspects, {})
    return suspects


def divide(lost: Sequence[Excess], suspects: Sequence[Suspect], taken: Claims) -> None:
    """Sets what each suspect explains. No millisecond is explained twice.

    `taken` is what causes that are certain have claimed already. Where the others together claim more of an account
    than is left of it, they share it by claim and support.
    """
    lost_requests = sum(excess.missed for excess in lost) or 1
    for suspect in suspects:
        suspect.explains_ms, suspect.explained = {}, 0.0
    for excess in lost:
        cases = [(suspect, case) for suspect in suspects for case in suspect.cases if case[0].name == excess.name]
        before = taken.get(excess.name, {})
        wanted: dict[str, float] = {}  # account → what all want of it, weighted
        whole: dict[str, float] = {}  # account → what all want of it, not weighted
        for suspect, (_, proposal) in cases:
            for name, part in (proposal.claims or {}).items():
                wanted[name] = wanted.get(name, 0.0) + part * suspect.support
                whole[name] = whole.get(name, 0.0) + part
        for suspect, (_, proposal) in cases:
            if proposal.explained is not None:
                suspect.explained += proposal.explained * excess.missed / lost_requests
                continue
            ms = 0.0
            for name, part in (proposal.claims or {}).items():
                left = max(0.0, 1.0 - before.get(name, 0.0))
                share = part if whole[name] <= left else left * part * suspect.support / wanted[name]
                ms += min(share, part) * max(excess.accounts.get(name, 0.0), 0.0)
            suspect.explains_ms[excess.name] = ms
            suspect.explained += ms / max(excess.total_ms, 1e-9) * excess.missed / lost_requests


def add_claims(taken: Claims, suspect: Suspect) -> dict[Name, dict[str, float]]:
    """What is claimed once this suspect is certain, too."""
    result = {name: dict(accounts) for name, accounts in taken.items()}
    for name, accounts in suspect.claims().items():
        mine = result.setdefault(name, {})
        for account, part in accounts.items():
            mine[account] = min(1.0, mine.get(account, 0.0) + part)
    return result
