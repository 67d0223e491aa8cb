"""Words of an error that refuses a request, and whether the queue that refused was full all the time."""

import numpy as np

from sojourn.diagnosis.capacity import FULL, load
from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.verdict import Evidence, evidence

# The words of a refusal, by what refused: a server's queue, and a tenant's limit. Other servers say the same in their
# own words, so that a 429 without a tenant's limit in it counts as the queue's.
REFUSED, BY_LIMIT = "HTTP 429", "has reached"
FILLED = "a larger batch, or more devices, by what fills the queue; or fewer requests at a time"  # a change
ALWAYS_FULL = 0.5  # of the time
ALWAYS_FULL_OF_CROWDS = 0.75  # the same where arrivals come in bursts, and nobody knows what the server could serve
REQUESTS_A_WINDOW = 10  # that are due on average: fewer, and a window without a refusal is chance
FEWEST_WINDOWS = 5


def full_share(facts: Client, loss: Excess) -> float:
    """The share of the run's time in which requests were refused, 0 to 1, by windows of equal length."""
    due = facts.rows.due_ns.to_numpy(dtype="float64")
    windows = max(FEWEST_WINDOWS, len(due) // REQUESTS_A_WINDOW)
    if len(due) < REQUESTS_A_WINDOW or due.max() <= due.min():
        return 0.0
    refused = facts.rows.loc[loss.missing].due_ns.to_numpy(dtype="float64")
    counts, _ = np.histogram(refused, bins=windows, range=(due.min(), due.max()))
    return float((counts > 0).mean())


def is_always_full(facts: Client, loss: Excess) -> bool:
    """Whether the queue was full for good: then a longer one would be full, too. A crowd fills it for a while."""
    share, now = full_share(facts, loss), load(facts)
    if now == now and now < FULL:
        return False
    is_crowd = now != now and facts.arrivals is not None and facts.arrivals.bursty
    return share >= (ALWAYS_FULL_OF_CROWDS if is_crowd else ALWAYS_FULL)


def full_evidence(facts: Client, loss: Excess) -> list[Evidence]:
    """Against a bound that is too small: the queue is full whatever its bound."""
    if not is_always_full(facts, loss):
        return []
    share = full_share(facts, loss)
    words = (
        f"requests are refused in {share:.0%} of the time: something fills the queue, and a longer one would be as full"
    )
    return [evidence(words, share, "share", "client: due_ns, error", supports=False, weight=2)]
