"""The router lets requests gather on one server while another one has few."""

from sojourn.diagnosis.cause import Cause, Change, Evidence, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.fleet_facts import FleetFacts
from sojourn.diagnosis.proposal import CONTENTION, CONTRADICTION, EXPLAINS_ENOUGH
from sojourn.diagnosis.statements import means
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.fleet import (
    LOAD_AWARE,
    STEPS,
    flags,
    in_words,
    is_straggler,
    late_evidence,
    late_share,
    of_server,
    other_servers,
)
from sojourn.diagnosis.statements.refutations import EVEN_ENGINES
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading

UNEVEN = 1.3  # time of the requests on the busiest server over the mean
BESIDE_IDLE = 0.5  # of that server's time: a router that knows the load would have sent the requests elsewhere
EVEN_WORK = 1.1  # tokens on the busiest server over the mean: such a router is not what is wrong
PRESENT = "requests: server, arrived_ns, finished_ns"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    fleet = facts.fleet()
    if fleet is None or fleet.imbalance < UNEVEN or fleet.present_beside_idle < BESIDE_IDLE:
        return None
    full = fleet.busiest
    late, fair = late_share(facts, excess, full), 1 / len(fleet.replicas)
    if late <= fair or (fleet.slowest == full and is_straggler(full) and fleet.work_imbalance < EVEN_WORK):
        return None  # requests gather on a slow server, though it gets no more than the others
    spared = 1 - 1 / fleet.imbalance  # of what requests of a server cost each other
    claims = of_server(facts, excess, full.name, dict.fromkeys(DEVICE_ACCOUNTS, spared)
                        | dict.fromkeys(CONTENTION, 1.0))  # fmt: skip
    policies = other_servers(LOAD_AWARE, fleet)
    return Proposal(
        cause=f"{full.name} has {fleet.imbalance:.1f} times the mean of the fleet's requests, while another server has "
        "room",
        evidence=[
            evidence(f"requests were on {full.name} for {fleet.imbalance:.2f} times the mean of a server",
                     fleet.imbalance, "ratio", PRESENT, weight=2),
            evidence(f"in {fleet.present_beside_idle:.0%} of that time another server had half as many or fewer",
                     fleet.present_beside_idle, "share", PRESENT, weight=3),
            late_evidence(full, late, fair),
            _work_evidence(fleet),
            *_speed_evidence(fleet),
            *excess_evidence(excess, CONTENTION),
        ],
        measurement=f"the same scenario with {flags(policies)}",
        if_cause=f"the servers have about as many requests, and {missing_share(excess)} falls",
        if_rival=f"{missing_share(excess)} stays on {full.name}",
        claims=claims,
        change=f"a policy that weighs load ({in_words(policies)}), and equal servers",
        fixes=(Change(routing="least-requests"), Change(routing="least-requests", servers="equal")),
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Requests wait at one data-parallel engine, while another one of the same page has few."""
    view, uneven = facts.server, means.uneven_engines(facts.server)
    share = means.queue_share(view, excess)
    if uneven is None or share < EXPLAINS_ENOUGH:
        return None
    full, empty = uneven.fullest, uneven.emptiest
    return Proposal(
        cause=f"requests gather on engine {full.engine}: {full.waiting:,.0f} wait there and {full.running:,.0f} run, "
        f"while engine {empty.engine} has {empty.waiting:,.0f} and {empty.running:,.0f}",
        evidence=[
            *means.queue_evidence(view, excess),
            evidence(f"engine {full.engine} has {uneven.times:.1f} times the mean number of requests of an engine",
                     uneven.times, "ratio", means.GAUGES, weight=3),
            evidence(f"it generated {uneven.work:.2f} times the mean tokens of an engine", uneven.work, "ratio",
                     means.COUNTERS),
            evidence(f"{uneven.of_waiting:.0%} of the waiting requests wait there", uneven.of_waiting, "share",
                     means.GAUGES),
        ],
        measurement="the same load with requests sent to the engine with the fewest of them",
        settings={},
        if_cause=f"the engines have about as many requests, and {missing_share(excess)} falls",
        if_rival=f"the line stays at engine {full.engine}",
        change="balance by requests under way, not by session or in turn: the server's own balancer, or one address "
        "for each engine behind a router that counts",
        explained=share,
        gain=means.time_gained(view, f"mean queue time, {share:.0%} of {means.quantity(excess)}"),
    )  # fmt: skip


def _work_evidence(fleet: FleetFacts) -> Evidence:
    """Work that is even speaks against the router, unless the servers were made unequal."""
    work, unequal = fleet.work_imbalance, bool(fleet.busiest.settings)
    statement = f"{fleet.busiest.name} computed {work:.2f} times the mean tokens of a server"
    if unequal and work < EVEN_WORK:
        settings = ", ".join(f"{name}={value}" for name, value in fleet.busiest.settings.items())
        return evidence(f"{statement}, with {settings}: the router does not see that it can do less", work, "ratio",
                        "requests: server; run.json of each server")  # fmt: skip
    return evidence(statement, work, "ratio", "requests: server, prompt and output tokens", supports=work >= EVEN_WORK)


def _speed_evidence(fleet: FleetFacts) -> list[Evidence]:
    """Requests gather on a server that is slow, whatever the router does."""
    slow = fleet.slowest
    if slow is None or slow.name != fleet.busiest.name:
        return []
    is_slow = is_straggler(slow)
    return [evidence(f"its steps take {slow.slowdown:.2f} times those of the other servers", slow.slowdown or 0.0,
                     "ratio", STEPS, supports=not is_slow, weight=CONTRADICTION if is_slow else 1)]  # fmt: skip


def show_servers_unequal(facts: Records) -> Reading | None:
    """One server chooses none."""
    fleet = facts.fleet()
    if fleet is None:
        return None
    return Reading(
        f"{fleet.busiest.name} had {fleet.imbalance:.2f} times the mean of the servers' requests",
        fleet.imbalance < 1 + NEGLIGIBLE,
        "requests: server, arrived_ns, finished_ns",
        min(1.0, fleet.imbalance - 1),
    )


CAUSE = Cause(
    key="replica_imbalance",
    lifecycles=("request",),
    object="choice of the router",
    kind="policy",
    rival="one server that is slower than the others",
    rival_key="straggler",
    of_fleet=True,
    asks="Has one server more requests than the others?",
    measurement="the same scenario with a policy of the router that weighs load",
    figures=(show_servers_unequal,),
    booked=CONTENTION,
    missing="several servers behind a router (requests: server)",
    complaints={"high_ttft": 21, "high_itl": 11, "devices_do_not_help": 10},
    reads={
        Records: Rule(read_records, accounts=(*CONTENTION, *DEVICE_ACCOUNTS)),
        Means: Rule(
            read_means,
            object="balance of engines",
            rival="one engine that is slower than the others",
            refuted_by=(EVEN_ENGINES,),
        ),
    },
)
