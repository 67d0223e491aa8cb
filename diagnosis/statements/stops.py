"""What is said of stretches in which nobody heard anything, and the page tells who stood."""

from sojourn.diagnosis.cause import Client, Excess, Proposal, evidence
from sojourn.diagnosis.excess import SERVED, attainment
from sojourn.diagnosis.proposal import Gain
from sojourn.diagnosis.statements.accounts import DEFINING
from sojourn.diagnosis.statements.excess import missing_share
from sojourn.diagnosis.stop_facts import Stood, without
from sojourn.metrics.request.goodput import judged

MOSTLY = 0.5  # of what late requests take above an objective: what is less does not explain them
FEWEST, LONG_S = 2, 5.0  # stops; one alone must be so long: each machine stands for a moment
HEARD = "client: sent_ns, chunk_ns; scrapes: scrape_duration_seconds, counters"
SHOWS: dict[Stood, str] = {
    "engine": "the front answered /metrics meanwhile, and no token was made",
    "front": "/metrics was not answered either until then",
}


def stopped_share(facts: Client, excess: Excess, stood: Stood) -> float:
    """The part of an excess that lies in stops of the engine or the front, and in their backlog, 0 to 1."""
    if excess.objective == SERVED:
        return 0.0
    stops = facts.stops().of(stood)
    return stops.share_of(facts.rows.loc[excess.missing], excess.objective, excess.bound_ms) if stops.found else 0.0


def propose_stop(facts: Client, excess: Excess, stood: Stood, change: str, measurement: str) -> Proposal | None:
    """None where too few stops are seen, or they explain less than half of the lateness."""
    stops, share = facts.stops().of(stood), stopped_share(facts, excess, stood)
    count = len(stops.found)
    if share < MOSTLY or (count < FEWEST and stops.longest_s < LONG_S):
        return None
    times = "once" if count == 1 else f"{count} times"
    then = float(judged(without(stops, facts.rows), facts.objectives).good.mean())
    now = attainment(facts)
    return Proposal(
        cause=f"the {stood} stood still {times}, for {stops.longest_s:.1f} s at most and {stops.total_s:.1f} s in all",
        evidence=[
            evidence(f"{times} nobody heard anything for up to {stops.longest_s:.1f} s while requests were under way; "
                     f"{SHOWS[stood]}", stops.total_s, "s", HEARD, weight=DEFINING),
            evidence(f"{share:.0%} of what late requests take above the objective lies in these stops and their "
                     "backlog", share, "share", HEARD, weight=2),
        ],
        measurement=measurement,
        if_cause="it stands in one place again and again: a lock, a collection, a driver, or it was stopped",
        if_rival=f"it waits for a core that others have, and {missing_share(excess)} falls without them",
        change=change,
        claims={},
        explained=share,
        in_replay=False,
        lifecycles=("compute",) if stood == "engine" else (),
        gain=Gain(f"attainment {now:.0%} → about {then:.0%}", basis="requests judged again without the stops",
                  share=max(0.0, then - now), regains=then > now),
    )  # fmt: skip
