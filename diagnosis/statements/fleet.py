"""What the servers of a fleet and its router show beside each other."""

from collections.abc import Mapping, Sequence

from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.fleet_facts import FleetFacts, ReplicaFacts
from sojourn.diagnosis.shares import ledger_columns
from sojourn.diagnosis.statements.excess import SLOW_DEVICE
from sojourn.diagnosis.verdict import Evidence, evidence

# Policies by router: those that weigh load, and those that keep a prefix or a session on its server.
LOAD_AWARE = {"vllm-router": ("kv_aware", "power_of_two"), "ray": ("least_requests",)}
STEPS = "steps of each server: device_ns, new_tokens, past_tokens"


def other_servers(policies: Mapping[str, Sequence[str]], fleet: FleetFacts) -> list[str]:
    """Those of the fleet's router, without the one that it has. None of a router that is not known."""
    return [name for name in policies.get(fleet.router, ()) if name != fleet.policy]


def flags(policies: Sequence[str]) -> str:
    return f"--policy {policies[0]}" if policies else "--router vllm-router --policy kv_aware"


def in_words(policies: Sequence[str]) -> str:
    return " or ".join(policies) or "another router: vllm-router with kv_aware"


def is_straggler(replica: ReplicaFacts) -> bool:
    return (replica.slowdown or 0.0) >= SLOW_DEVICE


def late_share(facts: Client, excess: Excess, replica: ReplicaFacts) -> float:
    return float((facts.rows.server[excess.missing] == replica.name).mean())


def late_evidence(replica: ReplicaFacts, late: float, fair: float) -> Evidence:
    statement = f"{late:.0%} of the late requests are of {replica.name}; its fair share is {fair:.0%}"
    return evidence(statement, late, "share", "requests: server", supports=late > fair, weight=2)


def of_server(facts: Client, excess: Excess, name: str, claims: Mapping[str, float]) -> dict[str, float]:
    """Claims of a server's late requests as claims of all late requests: by what its requests have of each account."""
    late = facts.rows.loc[excess.missing]
    spent = ledger_columns(late, "ttft" if excess.objective == "ttft_ms" else "ledger").fillna(0.0)
    own, whole = spent[late.server == name].sum(), spent.sum()
    return {account: part * float(own[account] / whole[account]) for account, part in claims.items()
            if whole[account] > 0}  # fmt: skip
