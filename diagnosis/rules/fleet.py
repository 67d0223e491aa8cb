"""Fleets whose further servers do not help: one server is slow, one has too many requests, or the router is slow."""

from collections.abc import Mapping, Sequence

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts, ledger_columns
from sojourn.diagnosis.fleet_facts import FleetFacts, ReplicaFacts
from sojourn.diagnosis.rules.cause import CONTENTION, CONTRADICTION, WAITS, Proposal, cause
from sojourn.diagnosis.rules.client import FEW, NETWORK, hit_share, stalled_share, ways_ms
from sojourn.diagnosis.rules.device import DEVICE_ACCOUNTS
from sojourn.diagnosis.rules.prefix import PROMPT_ACCOUNTS, WORTH_SHARING
from sojourn.diagnosis.rules.shared_evidence import SLOW_DEVICE, excess_evidence, missing_share
from sojourn.diagnosis.server_proposals import of_server
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change

ROUTING = "request.routing"
UNEVEN = 1.3  # time of the requests on the busiest server over the mean
BESIDE_IDLE = 0.5  # of that server's time: a router that knows the load would have sent the requests elsewhere
EVEN_WORK = 1.1  # tokens on the busiest server over the mean: such a router is not what is wrong
FULL = 0.9  # of the time: a device that works so much is what limits the fleet
# Policies by router: those that weigh load, and those that keep a prefix or a session on its server.
LOAD_AWARE = {"vllm-router": ("kv_aware", "power_of_two"), "ray": ("least_requests",)}
CACHE_AWARE = {"vllm-router": ("kv_aware", "cache_aware", "consistent_hash"), "ray": ("consistent_hash",)}
HASHES = "requests: server, prompt_block_hashes, output_block_hashes, prefix_outcomes"
STEPS = "steps of each server: device_ns, new_tokens, past_tokens"
PRESENT = "requests: server, arrived_ns, finished_ns"


@cause(of_fleet=True, lifecycles=("compute",), object="one server of the fleet", kind="fault",
       accounts=(*DEVICE_ACCOUNTS, *WAITS), rival="a router that sends it too much",
       rival_key="replica_imbalance")  # fmt: skip
def straggler(facts: Facts, excess: Excess) -> Proposal | None:
    """One server takes longer than the others for steps of the same size, and its requests are late."""
    fleet = facts.fleet()
    if fleet is None or (slow := fleet.slowest) is None or not _is_slow(slow):
        return None
    times = slow.slowdown or 1.0
    claims = of_server(facts, excess, slow.name, dict.fromkeys(DEVICE_ACCOUNTS, 1 - 1 / times)
                        | dict.fromkeys(WAITS, 1.0))  # fmt: skip
    late, fair = _late_share(facts, excess, slow), slow.requests / max(facts.joined, 1)
    differs = ", ".join(f"{name}={value}" for name, value in slow.settings.items())
    return Proposal(
        cause=f"{slow.name} takes {times:.1f} times as long as the other servers for the same steps",
        evidence=[
            evidence(f"steps of {slow.name} take {times:.2f} times what a fit to the other servers' steps says",
                     times, "ratio", STEPS, weight=3),
            _late_evidence(slow, late, fair),
            *([evidence(f"its settings differ: {differs}", len(slow.settings), "settings", "run.json of each server")]
              if differs else []),
            *excess_evidence(excess, (*DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement=f"sojourn diagnose {facts.path}/{slow.name}, which has its steps and its machine",
        settings=None,
        if_cause=f"it names what slows {slow.name}, and without that server {missing_share(excess)} falls",
        if_rival=f"it has as much per step as the others, and {missing_share(excess)} stays",
        claims=claims,
        change=f"mend {slow.name} or take it out of the fleet; until then a policy that weighs load "
        f"({_in_words(_others(LOAD_AWARE, fleet))}) sends it less",
        fixes=(Change(servers="equal"),),
    )  # fmt: skip


@cause(of_fleet=True, lifecycles=("request",), object="choice of the router", kind="policy",
       accounts=(*CONTENTION, *DEVICE_ACCOUNTS), rival="one server that is slower than the others",
       rival_key="straggler")  # fmt: skip
def replica_imbalance(facts: Facts, excess: Excess) -> Proposal | None:
    """The router lets requests gather on one server while another one has few."""
    fleet = facts.fleet()
    if fleet is None or fleet.imbalance < UNEVEN or fleet.present_beside_idle < BESIDE_IDLE:
        return None
    full = fleet.busiest
    late, fair = _late_share(facts, excess, full), 1 / len(fleet.replicas)
    if late <= fair or (fleet.slowest == full and _is_slow(full) and fleet.work_imbalance < EVEN_WORK):
        return None  # requests gather on a slow server, though it gets no more than the others
    spared = 1 - 1 / fleet.imbalance  # of what requests of a server cost each other
    claims = of_server(facts, excess, full.name, dict.fromkeys(DEVICE_ACCOUNTS, spared)
                        | dict.fromkeys(CONTENTION, 1.0))  # fmt: skip
    policies = _others(LOAD_AWARE, fleet)
    return Proposal(
        cause=f"{full.name} has {fleet.imbalance:.1f} times the mean of the fleet's requests, while another server has "
        "room",
        evidence=[
            evidence(f"requests were on {full.name} for {fleet.imbalance:.2f} times the mean of a server",
                     fleet.imbalance, "ratio", PRESENT, weight=2),
            evidence(f"in {fleet.present_beside_idle:.0%} of that time another server had half as many or fewer",
                     fleet.present_beside_idle, "share", PRESENT, weight=3),
            _late_evidence(full, late, fair),
            _work_evidence(fleet),
            *_speed_evidence(fleet),
            *excess_evidence(excess, CONTENTION),
        ],
        measurement=f"the same scenario with {_flags(policies)}",
        settings=None,
        if_cause=f"the servers have about as many requests, and {missing_share(excess)} falls",
        if_rival=f"{missing_share(excess)} stays on {full.name}",
        claims=claims,
        change=f"a policy that weighs load ({_in_words(policies)}), and equal servers",
        fixes=(Change(routing="least-requests"), Change(routing="least-requests", servers="equal")),
    )  # fmt: skip


@cause(of_fleet=True, lifecycles=("request",), object="router", kind="fault", accounts=(ROUTING,),
       rival="a network that is slow")  # fmt: skip
def slow_router(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests spend their time on the way through the router: more servers behind it do not help."""
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
        settings=None,
        if_cause=f"request.routing falls to the time of a loopback connection, and {missing_share(excess)} with it",
        if_rival=f"{missing_share(excess)} stays",
        claims=claims,
        change="more cores for the router, a cheaper policy, or a second router beside it",
        fixes=(Change(removed=claims),),
    )


def _way_back(facts: Facts, excess: Excess) -> float:
    """Of the time in client.network, 0 to 1, that of answers on their way back through a router on this host: no
    network is between its processes. 0 where few requests wait so: then it is their readers."""
    way_out = ways_ms(facts)[1]
    return 1.0 - stalled_share(facts, excess) if hit_share(facts, way_out, excess) >= FEW else 0.0


@cause(of_fleet=True, lifecycles=("memory", "request"), object="choice of the router", kind="policy",
       accounts=PROMPT_ACCOUNTS, rival="a pool that is too small for what prompts share",
       rival_key="cache_thrash")  # fmt: skip
def cache_blind_routing(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts go to a server that does not hold their beginning, while another server does."""
    fleet = facts.fleet()
    pooled = None if fleet is None else fleet.pooled
    if fleet is None or pooled is None or pooled.fleet.lost_share < WORTH_SHARING:
        return None
    use = pooled.fleet
    part = min(1.0, use.lost_tokens / max(use.prompt_tokens - use.hit_tokens, 1))
    rates = ", ".join(f"{each.server} {each.hit_rate:.0%}" for each in pooled.servers)
    policies = _others(CACHE_AWARE, fleet)
    is_aware = fleet.policy in CACHE_AWARE.get(fleet.router, ())
    return Proposal(
        cause=f"{use.lost_share:.0%} of the prompt tokens were in the cache of another server: the fleet hits "
        f"{use.hit_rate:.0%}, one cache of all servers would hit {use.pooled_rate:.0%}",
        evidence=[
            evidence(f"routing lost {use.lost_tokens:,} prompt tokens, about {use.lost_ns / 1e9:.1f} s of prefill",
                     use.lost_share, "share", HASHES, weight=3),
            evidence(f"hit rates are {rates}; one cache of all would hit {use.pooled_rate:.0%}",
                     use.pooled_rate - use.hit_rate, "share", HASHES),
            evidence(f"eviction cost {use.evicted_tokens:,} tokens on the servers that were chosen",
                     use.evicted_tokens / max(use.lost_tokens, 1), "ratio", HASHES,
                     supports=use.evicted_tokens < use.lost_tokens),
            *([evidence(f"the policy {fleet.policy} looks at caches already", 1, "policy", "run.json: router",
                        supports=False, weight=2)] if is_aware else []),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
        ],
        measurement=f"the same scenario with {_flags(policies)}",
        settings=None,
        if_cause=f"cached tokens rise from {use.hit_rate:.0%} towards {use.pooled_rate:.0%} of the prompts",
        if_rival=f"cached tokens stay at {use.hit_rate:.0%}, and {missing_share(excess)} with them",
        claims=dict.fromkeys(PROMPT_ACCOUNTS, part),
        change=f"a policy that looks at caches or keeps sessions together ({_in_words(policies)})",
        fixes=(Change(routing="prefix-aware"), Change(routing="consistent-hash")),
    )  # fmt: skip


def _others(policies: Mapping[str, Sequence[str]], fleet: FleetFacts) -> list[str]:
    """Those of the fleet's router, without the one that it has. None of a router that is not known."""
    return [name for name in policies.get(fleet.router, ()) if name != fleet.policy]


def _flags(policies: Sequence[str]) -> str:
    return f"--policy {policies[0]}" if policies else "--router vllm-router --policy kv_aware"


def _in_words(policies: Sequence[str]) -> str:
    return " or ".join(policies) or "another router: vllm-router with kv_aware"


def _is_slow(replica: ReplicaFacts) -> bool:
    return (replica.slowdown or 0.0) >= SLOW_DEVICE


def _late_share(facts: Facts, excess: Excess, replica: ReplicaFacts) -> float:
    return float((facts.rows.server[excess.missing] == replica.name).mean())


def _late_evidence(replica: ReplicaFacts, late: float, fair: float) -> Evidence:
    statement = f"{late:.0%} of the late requests are of {replica.name}; its fair share is {fair:.0%}"
    return evidence(statement, late, "share", "requests: server", supports=late > fair, weight=2)


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
    is_slow = _is_slow(slow)
    return [evidence(f"its steps take {slow.slowdown:.2f} times those of the other servers", slow.slowdown or 0.0,
                     "ratio", STEPS, supports=not is_slow, weight=CONTRADICTION if is_slow else 1)]  # fmt: skip
