"""What the servers of a fleet propose, each by its own records, as proposals for the fleet.

The fleet has no steps of its own. So a cause that needs steps is asked about each server with late requests. It claims
for the fleet what it claims of these requests, so that a cause of one server explains no other server's time.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from sojourn.diagnosis.evidence import Client, Records
from sojourn.diagnosis.excess import Excess, excesses, losses
from sojourn.diagnosis.proposal import Proposal
from sojourn.diagnosis.proposals import proposals
from sojourn.diagnosis.statements.fleet import of_server

STRAGGLER = "straggler"
MOST_SERVERS = 4  # those with the most late requests: reading one takes a second


def server_proposals(facts: Client, excess: Excess, known: Collection[str] = ()) -> list[Proposal]:
    """One proposal for each cause that some server proposes; [] for a run of one server. `known` are the keys that the
    fleet has proposed already."""
    if not isinstance(facts, Records) or not facts.servers:
        return []
    fleet = facts.fleet()
    slow = fleet.slowest if fleet is not None and STRAGGLER in known else None  # what slows it is in its own diagnosis
    late = facts.rows.server[excess.missing].value_counts()
    found: dict[str, dict[str, Proposal]] = {}
    for name in [name for name in late.index if name in facts.servers][:MOST_SERVERS]:
        if slow is not None and name == slow.name:
            continue
        own = facts.servers[name]()
        for same in (each for each in (*excesses(own), *losses(own)) if each.name == excess.name):
            for proposal in proposals(own, same):
                if proposal.key not in known:
                    found.setdefault(proposal.key, {})[name] = proposal
    return [_of_fleet(facts, excess, by_server) for by_server in found.values()]


def _of_fleet(facts: Records, excess: Excess, by_server: Mapping[str, Proposal]) -> Proposal:
    """Of several servers that with most late requests speaks."""
    claims: dict[str, float] = {}
    for name, proposal in by_server.items():
        for account, part in of_server(facts, excess, name, proposal.claims or {}).items():
            claims[account] = claims.get(account, 0.0) + part
    late = facts.rows.server[excess.missing].value_counts(normalize=True)
    explained = [(proposal.explained or 0.0) * float(late[name]) for name, proposal in by_server.items()]
    first = next(iter(by_server.values()))
    who = "every server" if len(by_server) == len(facts.servers) else ", ".join(sorted(by_server))
    return replace(
        first,
        cause=f"on {who}: {first.cause}",
        claims=claims,
        explained=None if first.explained is None else sum(explained),
        steps=None,  # of one server: its own run shows them
    )
