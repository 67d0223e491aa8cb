"""Causes of refused requests, and of requests that a limit holds: the queue's bound, and the limits of tenants."""

import numpy as np

from sojourn.diagnosis.capacity import FULL, best_load
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.facts import Facts, tightest
from sojourn.diagnosis.rules.cause import Proposal, cause
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, load_evidence
from sojourn.diagnosis.verdict import evidence
from sojourn.metrics.prediction import Change

QUOTA = "request.quota"
# The words of a refusal, by what refused: a server's queue, and a tenant's limit. Other servers say the same in their
# own words, so that a 429 without a tenant's limit in it counts as the queue's.
REFUSED, BY_LIMIT = "HTTP 429", "has reached"
SOME_TIME_MS = 1_000.0  # that a request may wait where no objective says it
LARGER_QUEUE = (2, 4, 16)  # times the bound: candidates of a replay


@cause(lifecycles=("request",), object="bound of the queue (max_waiting)", kind="policy", needs=("loss",),
       rival="overload: requests that wait longer are late instead", rival_key="overload")  # fmt: skip
def queue_limit(facts: Facts, loss: Excess) -> Proposal | None:
    """Requests are refused because the queue may hold only few, though they could be served in time."""
    limit = facts.engine.get("max_waiting")
    if not loss.error.startswith(REFUSED) or BY_LIMIT in loss.error or not limit:
        return None
    best = best_load(facts)
    values = list(dict.fromkeys([limit + _refused_together(facts, loss), *(limit * times for times in LARGER_QUEUE)]))
    served = facts.rows[(facts.rows.status == "ok") & (facts.rows.klass == loss.klass)]
    kept = float(served.good.mean()) if len(served) else 0.0
    return Proposal(
        cause=f"{loss.missed} of {loss.sent} requests{f' of {loss.klass}' if loss.klass else ''} are refused: at most "
        f"{limit} may wait",
        evidence=[
            evidence(f"{loss.missed} requests ended with “{loss.error}”", loss.missed, "requests", "client: error",
                     weight=2),
            evidence(f"{kept:.0%} of the served requests of this class meet their objectives: the queue could hold "
                     "more" if kept >= 0.5 else f"only {kept:.0%} of the served requests meet their objectives: those "
                     "who waited longer would be late", kept, "share", "client: first_token_ns", supports=kept >= 0.5,
                     weight=2),
            *([load_evidence(f"load / capacity is {best:.2f} at the best batch", best, supports=best < FULL, weight=2)]
              if best == best else []),
        ],
        measurement="the same scenario with a longer queue",
        settings={"max_waiting": values[0]},
        if_cause="no request is refused, and those that were are served in time",
        if_rival="no request is refused, and as many miss their objective",
        explained=1.0,
        fixes=tuple(Change(settings={"max_waiting": value}) for value in values),
        rival_fix=Change(device_speed=2.0),
    )  # fmt: skip


@cause(lifecycles=("request",), object="limit of a tenant", kind="policy", needs=(),
       rival="a queue that is full", rival_key="queue_limit")  # fmt: skip
def rate_limit(facts: Facts, excess: Excess | None) -> Proposal | None:
    """The limit of a tenant refuses its requests, or holds them until there is room."""
    if excess is None:
        return None
    refused = excess.objective == SERVED
    if refused and not (excess.error.startswith(REFUSED) and BY_LIMIT in excess.error):
        return None
    if not refused and excess.share(QUOTA) < 0.1:
        return None
    tenants = ", ".join(sorted({str(name) for name in facts.rows.loc[excess.missing].tenant.dropna()} - {""})[:3])
    whose = f"the limit of tenant {tenants}" if tenants else "the limit of the tenant"
    held_ms = excess.accounts.get(QUOTA, 0.0)
    return Proposal(
        object=whose,
        cause=f"{whose} {'refuses' if refused else 'holds'} {excess.missed} of {excess.sent} requests",
        evidence=[
            evidence(f"{excess.missed} requests ended with “{excess.error}”", excess.missed, "requests",
                     "client: error", weight=3) if refused
            else evidence(f"late requests were held for {held_ms:,.0f} ms until the limit had room", held_ms, "ms",
                          "requests: ledger_request_quota_ns", weight=3),
            *excess_evidence(excess, (QUOTA,)),
        ],
        measurement="the same scenario with a larger limit for this tenant",
        settings=None,
        if_cause="its requests are served at once",
        if_rival="its requests wait for a place instead",
        change=f"raise {whose} in the file of `access`, or send less",
        claims={QUOTA: 1.0},
        explained=1.0 if refused else None,
        fixes=() if refused else (Change(removed={QUOTA: 1.0}),),
        in_replay=not refused,
    )  # fmt: skip


def _refused_together(facts: Facts, loss: Excess) -> int:
    """The most requests that were refused within the time that one may wait: as many places were missing."""
    due_ms = np.sort(facts.rows.loc[loss.missing].due_ns.to_numpy(dtype="float64")) / 1e6
    bound_ms = tightest(facts, "ttft_ms") or SOME_TIME_MS
    return int((np.searchsorted(due_ms, due_ms + bound_ms, side="right") - np.arange(len(due_ms))).max())
