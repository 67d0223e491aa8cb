"""Requests are refused because the queue may hold only few, though they could be served in time."""

import numpy as np

from sojourn.diagnosis.capacity import FULL, best_load
from sojourn.diagnosis.cause import Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import tightest
from sojourn.diagnosis.proposal import WAITS
from sojourn.diagnosis.statements.client_only import explain_refusal
from sojourn.diagnosis.statements.excess import load_evidence
from sojourn.diagnosis.statements.refusals import BY_LIMIT, FILLED, REFUSED, full_evidence, is_always_full
from sojourn.diagnosis.symptom_tree.reading import Reading

SOME_TIME_MS = 1_000.0  # that a request may wait where no objective says it
LARGER_QUEUE = (2, 4, 16)  # times the bound: candidates of a replay
REFUSES = ("429", "queue is full", "rate limit", "quota")  # words of an error that refuses a request


def read_records(facts: Records, loss: Excess) -> Proposal | None:
    limit = facts.engine.get("max_waiting")
    if not loss.error.startswith(REFUSED) or BY_LIMIT in loss.error or not limit:
        return None
    best, is_full = best_load(facts), is_always_full(facts, loss)
    values = list(dict.fromkeys([limit + _refused_together(facts, loss), *(limit * times for times in LARGER_QUEUE)]))
    served = facts.rows[(facts.rows.status == "ok") & (facts.rows.klass == loss.klass)]
    kept = float(served.good.mean()) if len(served) else 0.0
    return Proposal(
        cause=f"{loss.missed} of {loss.sent} requests{f' of {loss.klass}' if loss.klass else ''} are refused: at most "
        f"{limit} may wait{', and the queue is full all the time' if is_full else ''}",
        evidence=[
            evidence(f"{loss.missed} requests ended with “{loss.error}”", loss.missed, "requests", "client: error",
                     weight=2),
            evidence(f"{kept:.0%} of the served requests of this class meet their objectives: the queue could hold "
                     "more" if kept >= 0.5 else f"only {kept:.0%} of the served requests meet their objectives: those "
                     "who waited longer would be late", kept, "share", "client: first_token_ns", supports=kept >= 0.5,
                     weight=2),
            *([load_evidence(f"load / capacity is {best:.2f} at the best batch", best, supports=best < FULL, weight=2)]
              if best == best else []),
            *full_evidence(facts, loss),
        ],
        measurement="the same scenario with a longer queue",
        settings={"max_waiting": values[0]},
        if_cause="no request is refused, and those that were are served in time",
        if_rival="no request is refused, and as many miss their objective",
        explained=1.0,
        change=FILLED if is_full and facts.steps is None else "",  # with steps a replay says what a longer queue gives
        fixes=tuple(Change(settings={"max_waiting": value}) for value in values),
        rival_fix=Change(device_speed=2.0),
    )  # fmt: skip


def read_loss(facts: Client, loss: Excess) -> Proposal | None:
    """Requests are refused because the queue is full."""
    return explain_refusal(facts, loss, by_limit=False)


def _refused_together(facts: Client, loss: Excess) -> int:
    """The most requests that were refused within the time that one may wait: as many places were missing."""
    due_ms = np.sort(facts.rows.loc[loss.missing].due_ns.to_numpy(dtype="float64")) / 1e6
    bound_ms = tightest(facts, "ttft_ms") or SOME_TIME_MS
    return int((np.searchsorted(due_ms, due_ms + bound_ms, side="right") - np.arange(len(due_ms))).max())


def show_refusals(facts: Client) -> Reading | None:
    if not facts.sent:
        return None
    count = sum(n for error, n in facts.errors.items() if any(word in error.lower() for word in REFUSES))
    share = count / facts.sent
    return Reading(f"{count} of {facts.sent} requests were refused", count == 0, "client: status, error", share)


CAUSE = Cause(
    key="queue_limit",
    lifecycles=("request",),
    object="bound of the queue (max_waiting)",
    kind="policy",
    rival="overload: requests that wait longer are late instead",
    rival_key="overload",
    follows_from=WAITS,
    name="queue limit (max_waiting)",
    asks="Does the server refuse requests at a full queue?",
    measurement="the same scenario with twice the max_waiting",
    figures=(show_refusals,),
    complaints={"high_ttft": 13, "low_device_utilisation": 4},
    reads={Records: Rule(read_records, needs=("loss",))},
    lost=Rule(read_loss, needs=("loss",), rival="overload", rival_key=""),
)
