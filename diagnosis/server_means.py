"""What our own server's /metrics shows in the terms of its records: means over all requests, late or not.

Only a server with a metric of every account can be read so. What no metric holds is the time between client and server.
"""

from collections.abc import Mapping
from dataclasses import fields, replace

from sojourn.diagnosis.evidence import Accounts, Client, Means, Work, view_of
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.memory_facts import PrefixUse
from sojourn.interop.sources.translate import key
from sojourn.interop.sources.view import ServerView
from sojourn.metrics.ledger import SERVER_ACCOUNTS

WAITS, REFUSALS = "sojourn_request_wait_seconds_total", "sojourn_request_refusals_total"
NO_REASON = ("step", "behind_head")  # a step under way, which no setting spares; and the head's own reason counts
OUTCOMES, INFINITE = "sojourn_memory_prefix_outcome_tokens_total", "sojourn_memory_infinite_hit_tokens_total"
COMPUTED, AGAIN = "sojourn_token_computed_tokens_total", "sojourn_memory_recomputed_tokens_total"
MEANS = "the objective, by means over all requests"


def shows_ledger(facts: Client) -> bool:
    """Whether the accounts of this run are known as means, and only so."""
    view = view_of(facts)
    known = {name for span in view.spans if len(span.accounts) == 1 for name in span.accounts} if view else set()
    return known >= {info.name for info in SERVER_ACCOUNTS}


def with_means(facts: Client) -> Client:
    """The facts with what the records would tell, as far as the metrics do; unchanged where they do not."""
    view = view_of(facts)
    if view is None or not shows_ledger(facts):
        return facts
    shown = {"waits": _waits(view), "prefix": _prefix(view), "work": _work(facts, view), "cached_share": view.hit_rate}
    if isinstance(facts, Means):
        return Accounts(**{each.name: getattr(facts, each.name) for each in fields(facts)}, **shown)
    return replace(facts, **shown)


def mean_excess(facts: Client, excess: Excess) -> Excess:
    """The excess divided as the mean request's time is; unchanged where the metrics do not show it."""
    means = quantity_means(facts, excess.objective) if shows_ledger(facts) else {}
    whole = sum(means.values())
    if whole <= 0 or not excess.mean_ms:
        return excess
    above = excess.mean_ms - excess.bound_ms
    return replace(excess, baseline=MEANS, accounts={name: above * ms / whole for name, ms in means.items()})


def quantity_means(facts: Means | Accounts, objective: str) -> dict[str, float]:
    """Account → milliseconds of the mean request in an objective's quantity; of `tpot_ms` in its whole decode.

    What a client measured beyond the server's accounts is client.network; without a client there is none.
    """
    served = facts.rows[facts.rows.status == "ok"]
    until = served.first_token_ns if objective == "ttft_ms" else served.last_byte_ns
    since = served.first_token_ns if objective == "tpot_ms" else served.due_ns
    whole_ms = float((until.astype("float64") - since.astype("float64")).mean()) / 1e6
    found = {}
    for span in facts.server.spans:
        first = span.ttft_ms or 0.0
        found[span.accounts[0]] = {"ttft_ms": first, "tpot_ms": span.mean_ms - first}.get(objective, span.mean_ms)
    if objective != "tpot_ms":
        found["client.lag"] = float((served.sent_ns.astype("float64") - served.due_ns.astype("float64")).mean()) / 1e6
    found["client.network"] = whole_ms - sum(found.values())
    return {name: ms for name, ms in found.items() if ms > 0}


def _waits(view: ServerView) -> dict[str, float]:
    """Reason → share of the waiting, by its seconds; of a server without them, by how often each reason was given."""
    for family in (WAITS, REFUSALS):
        found = {name: amount for name, amount in _find_labelled(view.totals, family, "reason").items()
                 if name not in NO_REASON and amount > 0}  # fmt: skip
        if total := sum(found.values()):
            return {name: amount / total for name, amount in found.items()}
    return {}


def _prefix(view: ServerView) -> PrefixUse | None:
    tokens = _find_labelled(view.totals, OUTCOMES, "outcome")
    looked_up = sum(tokens.values())
    if not looked_up:
        return None
    return PrefixUse(
        prompt_tokens=int(looked_up),
        outcomes={name: amount / looked_up for name, amount in tokens.items() if amount > 0},
        infinite_share=view.totals.get(INFINITE, 0.0) / looked_up,
    )


def _work(facts: Client, view: ServerView) -> Work | None:
    served = facts.rows[(facts.rows.status == "ok") & (facts.rows.output_tokens.astype("float64") > 0)]
    computed = view.totals.get(COMPUTED)
    if not len(served) or not view.finished or computed is None:
        return None
    prompt, output = served.prompt_tokens.astype("float64"), served.output_tokens.astype("float64")
    return Work(
        prompt_tokens=float(prompt.mean()),
        computed_tokens=max(1.0, (computed - view.totals.get(AGAIN, 0.0)) / view.finished),
        output_tokens=float(output.mean()),
        context_tokens=float(((prompt + output / 2) * output).sum() / output.sum()),
    )


def _find_labelled(totals: Mapping[str, float], family: str, label: str) -> dict[str, float]:
    """Value of the label → total, of the series of a family with one label."""
    begin, end = key(family, ((label, "\0"),)).split("\0")
    return {
        name.removeprefix(begin).removesuffix(end): value for name, value in totals.items() if name.startswith(begin)
    }
