"""The load generator sends or reads late: it has too little of the CPU, or stands still."""

from sojourn.diagnosis.cause import (
    Accounts,
    Cause,
    Change,
    Client,
    Excess,
    Means,
    Proposal,
    Records,
    Refutation,
    Rule,
    evidence,
)
from sojourn.diagnosis.evidence import tightest
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.client_only import hint
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.transit import FULL_CLIENT, STILL, client_evidence, stalled_share, stalls_of
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading

LAG = "client.lag"
NETWORK = "client.network"
IN_TIME_MS = 1.0
OWN = 0.3  # of the lateness: what the load generator's own delay must be to be the cause


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    late = (facts.rows.sent_ns.astype("float64") - facts.rows.due_ns.astype("float64")) / 1e6
    p90, machine = float(late.quantile(0.9)), facts.machine
    share, stalls, part = excess.share(LAG), stalls_of(facts), stalled_share(facts, excess)
    if machine is not None and (machine.load_cores_worst or 0.0) >= FULL_CLIENT:
        part = 1.0
    if share + part * excess.share(NETWORK) < 0.1:
        return None
    claims = {LAG: 1.0, NETWORK: part}
    return Proposal(
        cause=f"the load generator sends late, by {p90:,.0f} ms (p90): its own delay counts as the server's"
        if p90 >= 1 else "the load generator reads late: its own delay counts as the server's",
        evidence=[
            evidence(f"{share:.0%} of the time above the objective is {LAG}: intended send → send", share, "share",
                     "client: due_ns, sent_ns", supports=share >= 0.1, weight=3),
            *([evidence(f"the load generator stands still {len(stalls)} times for up to {stalls.longest_ms:,.0f} ms, "
                        f"{stalls.share:.0%} of the run: it neither sends what is due nor reads", stalls.share,
                        "share", STILL, weight=3)] if stalls is not None and len(stalls) > 1 else []),
            *client_evidence(facts, supports=True),
            *excess_evidence(excess, (LAG, NETWORK) if part >= 0.1 else (LAG,)),
        ],
        measurement="the same load with a core of its own for the load generator, or with two processes of it",
        if_cause=f"{LAG} falls to below a millisecond",
        if_rival=f"{LAG} stays",
        change="give the load generator a core of its own, or more processes",
        claims=claims,
        fixes=(Change(removed=claims),),
    )  # fmt: skip


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """Requests are sent later than they were due."""
    lag_ms = excess.accounts.get("client.lag", 0.0)
    share = lag_ms / max(excess.mean_ms - excess.bound_ms, 1e-9)
    if share < OWN:
        return None
    late = evidence(f"late requests were sent {lag_ms:,.0f} ms later than the others: {min(share, 1.0):.0%} of what "
                    "they are late", share, "share", "client: due_ns, sent_ns", weight=3)  # fmt: skip
    return hint(excess, "requests are sent later than they were due", [late], min(share, 1.0),
                "a core of its own for the load generator")  # fmt: skip


def _sent_in_time(facts: Means) -> str:
    lag_ms = facts.lag_p90_ms
    return f"requests were sent within {lag_ms:,.1f} ms (p90)" if lag_ms is not None and lag_ms < IN_TIME_MS else ""


def show_client_lag(facts: Client) -> Reading | None:
    if facts.lag_p90_ms is None:
        return None
    bound = tightest(facts, "ttft_ms") or tightest(facts, "e2e_ms")
    share = None if bound is None else facts.lag_p90_ms / bound
    return Reading(
        f"the load generator sent late by {facts.lag_p90_ms:,.1f} ms (p90)",
        facts.lag_p90_ms < 1 if share is None else share < NEGLIGIBLE,
        "client: sent_ns, due_ns",
        share,
    )


CAUSE = Cause(
    key="starved_load_generator",
    lifecycles=("client",),
    object="load generator",
    kind="client",
    rival="a slow network: it sends in time",
    rival_key="slow_network",
    asks="Does the load generator send late?",
    measurement="sojourn calibrate client, then the same scenario on a quiet machine",
    figures=(show_client_lag,),
    booked=("client.lag", "client.network"),
    complaints={
        "high_ttft": 3,
        "high_itl": 3,
        "low_device_utilisation": 2,
        "product_latency_poor": 3,
        "devices_do_not_help": 3,
    },
    reads={
        Records: Rule(read_records, accounts=(LAG, NETWORK)),
        Accounts: hold_time(
            accounts=("client.lag",),
            words="requests are sent later than they were due",
            change="a core of its own for the load generator",
            rival="a slow network",
            rival_key="",
        ),
        Means: Rule(
            read_client,
            accounts=("client.lag",),
            rival_key="",
            refuted_by=(Refutation("lateness of the load generator", _sent_in_time),),
        ),
        Client: Rule(read_client, accounts=("client.lag",), rival="a slow network", rival_key=""),
    },
)
