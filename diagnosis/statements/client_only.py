"""What the client's own records hint at, where nothing of the server is known but its answers.

A client sees when text came, not why. Several causes leave the same traces: these rules name the one that usually
leaves them, with little weight, and abstain where no trace stands out.
"""

from sojourn.diagnosis.client_signs import Signs
from sojourn.diagnosis.evidence import Client, tightest
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.proposal import Proposal
from sojourn.diagnosis.statements.excess import missing_share
from sojourn.diagnosis.statements.refusals import BY_LIMIT, FILLED, REFUSED, full_evidence, is_always_full
from sojourn.diagnosis.verdict import Evidence, evidence

GOES_WITH = 0.5  # a correlation of ranks: a quarter of the variance
GROWS = 0.8  # of the mean time to first token over the run: a queue that stands is below half of that
ROOM = 0.5  # of the bound of the time per output token: a batch twice as large would keep it
STALLS = 0.3  # of the time between tokens
IN_ONE_READ = 0.5  # of the tokens after a stall
CHUNKS, TTFT = "client: chunk_ns", "client: due_ns, first_token_ns"


def explain_refusal(facts: Client, loss: Excess, *, by_limit: bool) -> Proposal | None:
    if not loss.error.startswith(REFUSED) or (BY_LIMIT in loss.error) != by_limit:
        return None
    found = [evidence(f"{loss.missed} requests ended with “{loss.error}”", loss.missed, "requests", "client: error",
                      weight=3)]  # fmt: skip
    words, change = f"the server refuses {loss.missed} of {loss.sent} requests", "a larger limit, or fewer at a time"
    if not by_limit and is_always_full(facts, loss):
        found += full_evidence(facts, loss)
        words += ": its queue is full all the time"
        change = FILLED
    return hint(loss, words, found, 1.0, change)


def hint(excess: Excess, words: str, found: list[Evidence], explained: float, change: str) -> Proposal:
    return Proposal(
        cause=words,
        evidence=found,
        measurement="",
        needs_records=True,
        if_cause=f"with {change} {missing_share(excess)} falls",
        if_rival=f"with {change} {missing_share(excess)} stays",
        change=change,
        claims={},
        explained=explained,
    )


def goes_with_prompt(signs: Signs) -> bool:
    crowd = max(signs.with_crowd or 0.0, signs.growth or 0.0)
    return signs.with_prompt is not None and signs.with_prompt >= max(GOES_WITH, crowd)


def has_room(facts: Client) -> bool:
    """Whether tokens come at half of the time that the objective allows, or sooner."""
    bound, per_token = tightest(facts, "tpot_ms"), facts.rows.tpot_ms.astype("float64").median()
    return bound is not None and bool(per_token <= ROOM * bound)


def queue_signs(signs: Signs) -> list[Evidence]:
    found = []
    if signs.growth is not None:
        found.append(evidence(f"the time to first token grows over the run by {signs.growth:.1f} times its mean",
                              signs.growth, "ratio", TTFT, supports=signs.growth >= GROWS))  # fmt: skip
    if signs.with_crowd is not None:
        crowd = f"it goes with the number of requests under way: rank correlation {signs.with_crowd:.2f}"
        found.append(evidence(crowd, signs.with_crowd, "correlation", TTFT, supports=signs.with_crowd >= GOES_WITH))
    return found


def stall_evidence(signs: Signs) -> Evidence:
    return evidence(f"{signs.stalled:.0%} of the time between tokens lies in gaps of several times the usual "
                    f"{signs.gap_ms:.1f} ms", signs.stalled, "share", CHUNKS)  # fmt: skip
