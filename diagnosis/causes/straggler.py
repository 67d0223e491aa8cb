"""One server takes longer than the others for steps of the same size, and its requests are late."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import WAITS
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.fleet import (
    LOAD_AWARE,
    STEPS,
    in_words,
    is_straggler,
    late_evidence,
    late_share,
    of_server,
    other_servers,
)
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME, NEGLIGIBLE, Reading


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    fleet = facts.fleet()
    if fleet is None or (slow := fleet.slowest) is None or not is_straggler(slow):
        return None
    times = slow.slowdown or 1.0
    claims = of_server(facts, excess, slow.name, dict.fromkeys(DEVICE_ACCOUNTS, 1 - 1 / times)
                        | dict.fromkeys(WAITS, 1.0))  # fmt: skip
    late, fair = late_share(facts, excess, slow), slow.requests / max(facts.joined, 1)
    differs = ", ".join(f"{name}={value}" for name, value in slow.settings.items())
    return Proposal(
        cause=f"{slow.name} takes {times:.1f} times as long as the other servers for the same steps",
        evidence=[
            evidence(f"steps of {slow.name} take {times:.2f} times what a fit to the other servers' steps says",
                     times, "ratio", STEPS, weight=3),
            late_evidence(slow, late, fair),
            *([evidence(f"its settings differ: {differs}", len(slow.settings), "settings", "run.json of each server")]
              if differs else []),
            *excess_evidence(excess, (*DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement=f"sojourn diagnose {facts.path}/{slow.name}, which has its steps and its machine",
        if_cause=f"it names what slows {slow.name}, and without that server {missing_share(excess)} falls",
        if_rival=f"it has as much per step as the others, and {missing_share(excess)} stays",
        claims=claims,
        change=f"mend {slow.name} or take it out of the fleet; until then a policy that weighs load "
        f"({in_words(other_servers(LOAD_AWARE, fleet))}) sends it less",
        fixes=(Change(servers="equal"),),
    )  # fmt: skip


def show_slowest_server(facts: Records) -> Reading | None:
    """Of a fleet, by steps of the same size."""
    fleet = facts.fleet()
    if fleet is None or (slow := fleet.slowest) is None:
        return None
    times = slow.slowdown or 1.0
    return Reading(
        f"{slow.name} takes {times:.2f} times as long as the other servers for the same steps",
        times < 1 + NEGLIGIBLE,
        "steps of each server: device_ns, new_tokens, past_tokens",
        min(1.0, max(0.0, 1 - 1 / times)),
    )


CAUSE = Cause(
    key="straggler",
    lifecycles=("compute",),
    object="one server of the fleet",
    kind="fault",
    rival="a router that sends it too much",
    rival_key="replica_imbalance",
    of_fleet=True,
    asks="Is one server slower than the others?",
    measurement="sojourn diagnose of the slow server's own run",
    figures=(show_slowest_server,),
    booked=DEVICE_TIME,
    missing="the steps of several servers",
    complaints={"high_ttft": 15, "high_itl": 17, "devices_do_not_help": 10},
    reads={Records: Rule(read_records, accounts=(*DEVICE_ACCOUNTS, *WAITS))},
)
