"""What a diagnosis says of a server that recorded nothing for us, from what its own metrics show."""

from sojourn.diagnosis.evidence import Accounts, Client, Means, view_of
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.shares import shares
from sojourn.interop.sources.sojourn import SOJOURN
from sojourn.interop.sources.view import Agreement, ServerView, SpanView
from sojourn.metrics.ledger import UNACCOUNTED
from sojourn.metrics.request.objectives import OBJECTIVE_NAMES

RECORDS_OF_OURS = (
    "for the records of each request start the server with `--run-dir DIR`, then add `--server-run DIR` to "
    "`sojourn load` (same host), or use `sojourn join` (another host)"
)
ACCOUNT_SEPARATOR = " + "  # between accounts that a server measures together
FAILED_WARNS = 0.02  # of the scrapes: beyond it counters are fine, and gauges have holes
GAP_WARNS_S = 3.0  # without an answer: what waited in between is not seen
SMALLEST_PART = 0.05  # of a mean, that a headline names
DIFFERENT_COUNT = 0.005  # both sides count whole requests and tokens: beyond half a per cent others were served, too


def shares_seen(facts: Client, prefix: str = "ledger") -> dict[str, float]:
    """Account → share of the time of all served requests, with what is unaccounted; sums to 1. Empty if none served.

    Without the server's records, of what its metrics show: accounts that it measures together stand under one key,
    joined by " + ", and those that it does not show are left out.
    """
    known, view = shares(facts.rows, prefix), view_of(facts)
    if view is None or not known:
        return known
    result = {"client.lag": known["client.lag"]}
    for span in view.spans:
        share = span.share if prefix == "ledger" else span.ttft_share
        if share is not None:
            result[ACCOUNT_SEPARATOR.join(span.accounts)] = share
    return result | {UNACCOUNTED: 1.0 - sum(result.values())}


def counts_differ(pair: Agreement) -> bool:
    """Whether client and server cannot have counted the same requests."""
    return abs(pair.server - pair.client) > DIFFERENT_COUNT * max(pair.client, 1.0)


def span_share(span: SpanView | None, excess: Excess) -> float:
    """The part of the quantity that an objective bounds, on average over all requests; 0 where no metric shows it."""
    if span is None:
        return 0.0
    return (span.ttft_share if excess.objective == "ttft_ms" else span.share) or 0.0


def span_names(view: ServerView) -> dict[str, str]:
    """By the accounts of each span, as a share is keyed: `vLLM's decode time`."""
    return {ACCOUNT_SEPARATOR.join(span.accounts): f"{view.title}'s {span.name} time" for span in view.spans}


def what_is_seen(facts: Means | Accounts, excess: Excess) -> str:
    """Where the time went as far as the server's metrics show, and the measurement that would show more, as
    sentences."""
    view, quantity = facts.server, OBJECTIVE_NAMES[excess.objective]
    prefix = {"ttft_ms": "ttft", "e2e_ms": "ledger"}.get(excess.objective)  # no metric divides the time per token
    parts = shares_seen(facts, prefix) if prefix else {}
    spans = {ACCOUNT_SEPARATOR.join(span.accounts): span.name for span in view.spans}
    ranked = sorted((share, name) for name, share in parts.items() if name in spans or name == UNACCOUNTED)[::-1]
    if not ranked:
        return f"{view.title}'s metrics do not say where the {quantity} goes. Next: {_next(view, 'decode')}"
    mean_ms = float(facts.rows[facts.rows.status == "ok"][excess.objective].astype("float64").mean())
    places = {key: f"in {name}" for key, name in span_names(view).items()}
    places[UNACCOUNTED] = f"outside of {view.title}'s metrics"
    largest = [
        f"{share * mean_ms:,.0f} ms ({share:.0%}) {places[name]}"
        for share, name in ranked[:2]
        if share >= SMALLEST_PART
    ]
    first = spans.get(ranked[0][1], UNACCOUNTED)
    return (
        f"The mean {quantity} of all requests is {mean_ms:,.0f} ms: {' and '.join(largest)}. "
        f"Its metrics do not say why. Next: {_next(view, first)}"
    )


def _next(view: ServerView, part: str) -> str:
    """The cheapest measurement that shows more of a part of the time."""
    cap = view.settings.get("batch cap")
    larger = f"a larger `{cap}`" if cap else "a larger batch"
    return {
        "queue": f"measure once with {larger} and once at half the rate. The first helps against a limit on the "
        "batch, the second against overload",
        "prefill": "send one of these prompts alone. The prefill time that goes away was spent on other requests",
        "decode": "measure at half the rate. If the time per token falls with it, the batch is what slows it",
        UNACCOUNTED: "send the load from the server's own host. The time that goes away was the network's",
    }.get(part.removeprefix("request."), "measure at half the rate")


def warnings_of(view: ServerView, served: int) -> list[str]:
    """What limits the server's side of a diagnosis."""
    hidden = sum(account.visibility == "unseen" for account in view.accounts)
    stand_in = f"no server records: only averages over all requests are known, from {view.title}'s /metrics"
    found = [f"{stand_in}; {RECORDS_OF_OURS}" if view.source == SOJOURN.key else stand_in]
    if hidden:
        found.append(f"{hidden} of the {len(view.accounts)} accounts of time are not visible in {view.title}'s metrics")
    if view.failed_scrapes > FAILED_WARNS * (view.scrapes + view.failed_scrapes):
        found.append(f"{view.failed_scrapes} of {view.scrapes + view.failed_scrapes} scrapes of /metrics failed")
    if (gap_s := view.longest_gap_s) > GAP_WARNS_S:
        found.append(f"/metrics was not answered for {gap_s:.1f} s: what waited and ran in between is not known")
    if view.alternates:
        found.append(
            "several processes answered /metrics in turn (a load balancer): nothing of them was summed; name the "
            "address of one server"
        )
    found += view.no_shares
    if times := view.restarts:
        found.append(f"the server began anew {times} times: what it counted between the last scrape and that is lost")
    if served and not view.finished and not view.alternates:
        found.append(f"{view.title}'s metrics show no finished request in this run: are they of this server?")
    found += [
        f"{view.title} counted {pair.server:,.0f} {pair.what} and the client {pair.client:,.0f}: its means are over "
        "requests of others, too, or over some that the client gave up"
        for pair in view.agreement
        if counts_differ(pair)
    ]
    return found
