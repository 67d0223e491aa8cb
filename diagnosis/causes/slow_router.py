"""Requests spend their time on the way through the router: more servers behind it do not help."""

from sojourn.diagnosis.cause import Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.shares import ledger_columns
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.fleet import STEPS
from sojourn.diagnosis.statements.transit import FEW, hit_share, stalled_share, ways_ms
from sojourn.diagnosis.symptom_tree.reading import account

NETWORK = "client.network"
ROUTING = "request.routing"
FULL = 0.9  # of the time: a device that works so much is what limits the fleet


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    fleet = facts.fleet()
    if fleet is None:
        return None
    busy = max(fleet.busy_shares)
    idle = [evidence(f"the busiest server's device works {busy:.0%} of the time: another server would not help", busy,
                     "share", STEPS, weight=2, supports=busy < FULL)] if busy > 0 else []  # fmt: skip
    served = facts.rows[facts.rows.status == "ok"]
    ms = ledger_columns(served)[ROUTING]
    back = _way_back(facts, excess) if fleet.router_is_here else 0.0
    claims = {ROUTING: 1.0} | ({NETWORK: back} if back else {})
    return Proposal(
        cause=f"the way through the router takes {ms.median():,.1f} ms of a request, {ms.quantile(0.9):,.1f} ms at p90",
        evidence=[*excess_evidence(excess, tuple(claims)), *idle],
        measurement="the same load sent to one of the servers, past the router",
        if_cause=f"request.routing falls to the time of a loopback connection, and {missing_share(excess)} with it",
        if_rival=f"{missing_share(excess)} stays",
        claims=claims,
        change="more cores for the router, a cheaper policy, or a second router beside it",
        fixes=(Change(removed=claims),),
    )


def _way_back(facts: Client, excess: Excess) -> float:
    """Of the time in client.network, 0 to 1, that of answers on their way back through a router on this host: no
    network is between its processes. 0 where few requests wait so: then it is their readers."""
    way_out = ways_ms(facts)[1]
    return 1.0 - stalled_share(facts, excess) if hit_share(facts, way_out, excess) >= FEW else 0.0


CAUSE = Cause(
    key="slow_router",
    lifecycles=("request",),
    object="router",
    kind="fault",
    rival="a network that is slow",
    of_fleet=True,
    asks="Does the way through the router take long?",
    measurement="the same load sent to one of the servers, past the router",
    figures=(account("request.routing"),),
    booked=("request.routing",),
    complaints={"high_ttft": 22, "devices_do_not_help": 11},
    reads={Records: Rule(read_records, accounts=(ROUTING,))},
)
