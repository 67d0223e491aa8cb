"""The mean load is moderate, and arrivals come so close together that their backlog alone breaks the objective."""

import numpy as np

from sojourn.diagnosis.capacity import FULL, best_load, load
from sojourn.diagnosis.cause import Accounts, Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import tightest
from sojourn.diagnosis.evidence.client import VARIED
from sojourn.diagnosis.proposal import CONTENTION
from sojourn.diagnosis.statements.accounts import DEFINING, propose
from sojourn.diagnosis.statements.client_only import hint
from sojourn.diagnosis.statements.excess import excess_evidence, load_evidence, missing_share
from sojourn.diagnosis.symptom_tree.reading import Reading


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    now, best, arrivals = load(facts), best_load(facts), facts.arrivals
    if arrivals is None or not arrivals.varied or now >= FULL or best <= 0:
        return None
    capacity = facts.offered_rps / best
    in_burst, peak = _in_backlog(facts, excess, capacity)
    if in_burst < 0.5:  # most late requests came when there was no backlog
        return None
    if arrivals.bursty:
        how, peaks = f"arrivals come in bursts (coefficient of variation {arrivals.cv:.1f})", "bursts"
        spread = ", or a limit for each client that spreads its bursts"
    else:
        rates = f"up to {arrivals.peak_rps:.1f} requests/s, {facts.offered_rps:.1f} on average"
        how, peaks, spread = f"the rate of arrivals changes ({rates})", "the peak", ""
    return Proposal(
        cause=f"{how}; at a load of {now:.2f} of the capacity their backlog alone breaks the objective",
        evidence=[
            evidence(f"the gaps between arrivals vary with a coefficient of {arrivals.cv:.1f}, neighbours with "
                     f"{arrivals.local_cv:.1f}; independent arrivals have 1.0",
                     arrivals.cv, "ratio", "client: due_ns"),
            evidence(f"{in_burst:.0%} of the late requests came into a backlog that a server of {capacity:.1f} "
                     f"requests/s needs more than half of the objective to clear; the largest took {peak:.1f} s",
                     in_burst, "share", "client: due_ns; steps: fit of wall time", weight=2),
            *excess_evidence(excess, CONTENTION),
            load_evidence(f"the mean load is {now:.2f} of the capacity", now, weight=2),
        ],
        measurement=f"as many requests at a constant {facts.offered_rps:.1f} requests/s",
        if_cause=f"{missing_share(excess)} falls to none or few",
        if_rival=f"load / capacity exceeds {now:.2f}, and requests outside of {peaks} are late too",
        change=f"capacity for the peak instead of the mean{spread}",
        claims=dict.fromkeys(CONTENTION, in_burst),
        fixes=(Change(arrivals="even"),),
    )  # fmt: skip


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """Requests wait, and arrivals come in bursts."""
    arrivals = facts.arrivals
    if arrivals is None or not arrivals.bursty:
        return None
    bursts = evidence(f"the gaps between arrivals vary {arrivals.cv:.1f} times as much as their mean", arrivals.cv,
                      "ratio", "client: due_ns", weight=DEFINING)  # fmt: skip
    found = [*excess_evidence(excess, CONTENTION), bursts]
    words = "arrivals come in bursts, and wait for each other"
    return propose(excess, words, found, "smoother arrivals, or room for the peaks")


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """Requests come in bursts, and wait for each other."""
    if excess.objective == "tpot_ms" or facts.arrivals is None or not facts.arrivals.bursty:
        return None
    varied = evidence(f"the gaps between arrivals vary {facts.arrivals.cv:.1f} times as much as their mean",
                      facts.arrivals.cv, "ratio", "client: due_ns", weight=2)  # fmt: skip
    return hint(excess, "arrivals come in bursts, and wait for each other", [varied], 0.6, "smoother arrivals")


def _in_backlog(facts: Client, excess: Excess, capacity_rps: float) -> tuple[float, float]:
    """Share of the late requests that met a backlog of half their objective, and the largest backlog in seconds.

    The backlog is that of a fluid queue with one server of `capacity_rps`, fed with the recorded arrivals. A request
    is also in a backlog that builds within its bound after it: those behind it share its steps.
    """
    bound_s = (tightest(facts, "ttft_ms") or excess.bound_ms) / 1e3
    due_s = facts.rows.due_ns.to_numpy(dtype="float64") / 1e9  # ascending
    backlog_s, level_s = [], 0.0
    for gap_s in np.diff(due_s, prepend=due_s[:1]):
        level_s = max(0.0, level_s - gap_s) + 1 / capacity_rps
        backlog_s.append(level_s)
    last = np.searchsorted(due_s, due_s + bound_s, side="right")
    late = [facts.rows.index.get_loc(label) for label in excess.missing]
    met = sum(max(backlog_s[place : last[place]]) >= bound_s / 2 for place in late)
    return (met / len(late) if late else 0.0), max(backlog_s, default=0.0)


def show_arrivals(facts: Client) -> Reading | None:
    if facts.arrivals is None:
        return None
    cv = facts.arrivals.cv
    return Reading(
        f"the gaps between arrivals vary with a coefficient of {cv:.1f} (independent arrivals: 1.0)",
        cv < VARIED,
        "client: due_ns",
    )


CAUSE = Cause(
    key="burst",
    lifecycles=("request",),
    object="arrivals",
    kind="workload",
    rival="lost capacity: a server that is slower than it was",
    rival_key="overload",
    asks="Do requests arrive in bursts?",
    measurement="as many requests at a constant rate",
    figures=(show_arrivals,),
    booked=CONTENTION,
    complaints={"high_ttft": 2, "vram_fills_quickly": 2, "product_latency_poor": 1},
    reads={
        Records: Rule(read_records, accounts=CONTENTION, needs=("excess", "load")),
        Accounts: Rule(read_accounts, accounts=CONTENTION, rival_key=""),
        Client: Rule(read_client, rival="lost capacity"),
    },
)
