"""Causes that the client's own records hint at, where nothing of the server is known but its answers.

A client sees when text came, not why. Several causes leave the same traces: these rules name the one that usually
leaves them, with little weight, and abstain where no trace stands out.
"""

from sojourn.diagnosis.client_signs import Signs, signs_of
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts, tightest
from sojourn.diagnosis.rules.arrivals import OFFERED_LOAD
from sojourn.diagnosis.rules.cause import Proposal, cause
from sojourn.diagnosis.rules.client import broken_connections, is_broken, is_timeout
from sojourn.diagnosis.rules.refusals import BY_LIMIT, REFUSED
from sojourn.diagnosis.rules.shared_evidence import missing_share
from sojourn.diagnosis.verdict import Evidence, evidence

GOES_WITH = 0.5  # a correlation of ranks: a quarter of the variance
GROWS = 0.8  # of the mean time to first token over the run: a queue that stands is below half of that
OWN = 0.3  # of the lateness: what the load generator's own delay must be to be the cause
EVERYBODY = 0.5  # of the bound, paid by every request: no queue does that
ROOM = 0.5  # of the bound of the time per output token: a batch twice as large would keep it
STALLS = 0.3  # of the time between tokens
IN_ONE_READ = 0.5  # of the tokens after a stall
LONGER = 1.5  # times the output of the requests in time
CHUNKS, TTFT = "client: chunk_ns", "client: due_ns, first_token_ns"


@cause(lifecycles=("client",), object="load generator", kind="client", accounts=("client.lag",), reads="client",
       rival="a slow network")  # fmt: skip
def starved_load_generator(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests are sent later than they were due."""
    lag_ms = excess.accounts.get("client.lag", 0.0)
    share = lag_ms / max(excess.mean_ms - excess.bound_ms, 1e-9)
    if share < OWN:
        return None
    late = evidence(f"late requests were sent {lag_ms:,.0f} ms later than the others: {min(share, 1.0):.0%} of what "
                    "they are late", share, "share", "client: due_ns, sent_ns", weight=3)  # fmt: skip
    return _hint(excess, "requests are sent later than they were due", [late], min(share, 1.0),
                 "a core of its own for the load generator")  # fmt: skip


@cause(lifecycles=("request", "compute"), object=OFFERED_LOAD, kind="capacity", reads="client",
       rival="a limit on the batch", rival_key="batch_cap")  # fmt: skip
def overload(facts: Facts, excess: Excess) -> Proposal | None:
    """First tokens come later and later, and the tokens themselves come slowly."""
    signs = signs_of(facts)
    if excess.objective == "tpot_ms" or (signs.growth or 0.0) < GROWS or _has_room(facts):
        return None
    return _hint(excess, "more arrives than is served, and the queue grows over the run", _queue(signs), 0.6,
                 "fewer requests, or more devices")  # fmt: skip


@cause(lifecycles=("request", "compute"), object="batch cap (max_num_seqs)", kind="policy", reads="client",
       rival="overload", rival_key="overload")  # fmt: skip
def batch_cap(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait in a crowd, though tokens come fast."""
    signs = signs_of(facts)
    waits = max(signs.growth or 0.0, signs.with_crowd or 0.0)
    if excess.objective == "tpot_ms" or waits < GOES_WITH or not _has_room(facts) or _goes_with_prompt(signs):
        return None
    return _hint(excess, "requests wait for each other, though tokens come fast enough for a larger batch",
                 _queue(signs), 0.5, "a larger batch")  # fmt: skip


@cause(lifecycles=("request",), object="arrivals", kind="workload", reads="client",
       rival="lost capacity", rival_key="overload")  # fmt: skip
def burst(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests come in bursts, and wait for each other."""
    if excess.objective == "tpot_ms" or facts.arrivals is None or not facts.arrivals.bursty:
        return None
    varied = evidence(f"the gaps between arrivals vary {facts.arrivals.cv:.1f} times as much as their mean",
                      facts.arrivals.cv, "ratio", "client: due_ns", weight=2)  # fmt: skip
    return _hint(excess, "arrivals come in bursts, and wait for each other", [varied], 0.6, "smoother arrivals")


@cause(lifecycles=("compute", "token"), object="prompt", kind="capacity", reads="client",
       rival="a slow tokeniser", rival_key="slow_tokeniser")  # fmt: skip
def own_prefill(facts: Facts, excess: Excess) -> Proposal | None:
    """First tokens come the later the longer the prompt is."""
    signs = signs_of(facts)
    if excess.objective == "tpot_ms" or not _goes_with_prompt(signs):
        return None
    grows = evidence(f"the time to first token goes with the length of the prompt: rank correlation "
                     f"{signs.with_prompt:.2f}", signs.with_prompt, "correlation", TTFT, weight=2)  # fmt: skip
    return _hint(excess, "first tokens come the later the longer the prompt is", [grows], 0.5, "shorter prompts")


@cause(lifecycles=("client",), object="network path between client and server", kind="client", reads="client",
       rival="a slow front", rival_key="blocked_front")  # fmt: skip
def slow_network(facts: Facts, excess: Excess) -> Proposal | None:
    """Every request pays much before its first token, whatever its prompt and however many others there are."""
    signs = signs_of(facts)
    goes_with = max(signs.with_crowd or 0.0, signs.with_prompt or 0.0, signs.growth or 0.0)
    if excess.objective != "ttft_ms" or signs.floor_ms is None or goes_with >= GOES_WITH:
        return None
    if signs.floor_ms < EVERYBODY * excess.bound_ms:
        return None
    floor = evidence(f"19 of 20 requests wait at least {signs.floor_ms:,.0f} ms for their first token, whatever else "
                     "happens", signs.floor_ms, "ms", TTFT)  # fmt: skip
    return _hint(excess, "every request pays the same before its first token", [floor], 0.4, "a shorter path")


@cause(lifecycles=("request", "token"), object="event loop of the front", kind="fault", reads="client",
       rival="a slow network", rival_key="slow_network")  # fmt: skip
def blocked_front(facts: Facts, excess: Excess) -> Proposal | None:
    """Text stops, and then comes in one read: it was made meanwhile, and something between held it."""
    signs = signs_of(facts)
    if excess.objective == "ttft_ms" or signs.stalled < STALLS or signs.clumped < IN_ONE_READ:
        return None
    found = [_stalls(signs), evidence(f"after a stall {signs.clumped:.0%} of the tokens come in one read: they were "
                                      "made meanwhile", signs.clumped, "share", CHUNKS, weight=2)]  # fmt: skip
    return _hint(excess, "text stops and then comes at once: something behind the engine holds it", found, 0.5,
                 "find what holds the event loop of the front")  # fmt: skip


@cause(lifecycles=("request", "compute"), object="token budget of a step", kind="policy", reads="client",
       rival="a slow device", rival_key="slow_device")  # fmt: skip
def token_budget_large(facts: Facts, excess: Excess) -> Proposal | None:
    """Text stops, and goes on at its usual pace: a long step came between."""
    signs = signs_of(facts)
    fast = signs.gap_ms is not None and signs.gap_ms <= ROOM * (tightest(facts, "tpot_ms") or 0.0)
    if excess.objective == "ttft_ms" or signs.stalled < STALLS or signs.clumped >= IN_ONE_READ or not fast:
        return None
    return _hint(excess, "text stops and goes on at its usual pace: long steps come between", [_stalls(signs)], 0.4,
                 "a smaller token budget")  # fmt: skip


@cause(lifecycles=("compute",), object="decode step", kind="capacity", reads="client",
       rival="a slow device", rival_key="slow_device")  # fmt: skip
def slow_decode(facts: Facts, excess: Excess) -> Proposal | None:
    """Tokens come evenly, and each one late."""
    signs = signs_of(facts)
    if excess.objective != "tpot_ms" or signs.gap_ms is None or signs.stalled >= STALLS:
        return None
    even = evidence(f"{1 - signs.stalled:.0%} of the time between tokens lies in ordinary gaps: each token is late",
                    1 - signs.stalled, "share", CHUNKS)  # fmt: skip
    return _hint(excess, "tokens come evenly, and each one late", [even], 0.5, "a smaller batch, or a faster device")


@cause(lifecycles=("request", "token"), object="output length", kind="workload", reads="client",
       rival="slow tokens", rival_key="slow_decode")  # fmt: skip
def long_outputs(facts: Facts, excess: Excess) -> Proposal | None:
    """Late answers are longer, and their tokens come as fast."""
    if excess.objective != "e2e_ms":
        return None
    rows = facts.rows[(facts.rows.klass == excess.klass) & (facts.rows.status == "ok")]
    late, good = rows.loc[rows.index.isin(excess.missing)], rows[~rows.index.isin(excess.missing)]
    tokens = late.output_tokens.astype("float64").median() / good.output_tokens.astype("float64").median()
    speed = late.tpot_ms.astype("float64").median() / good.tpot_ms.astype("float64").median()
    if not (tokens >= LONGER and speed < LONGER):
        return None
    longer = evidence(f"late answers have {tokens:.1f} times as many tokens, and each takes {speed:.1f} times as long",
                      tokens, "ratio", "client: output_tokens, chunk_ns", weight=2)  # fmt: skip
    return _hint(
        excess, "late answers are longer, and their tokens come as fast", [longer], 0.7, "a bound of the output"
    )


def _refused(facts: Facts, loss: Excess, *, by_limit: bool) -> Proposal | None:
    if not loss.error.startswith(REFUSED) or (BY_LIMIT in loss.error) != by_limit:
        return None
    found = [evidence(f"{loss.missed} requests ended with “{loss.error}”", loss.missed, "requests", "client: error",
                      weight=3)]  # fmt: skip
    return _hint(loss, f"the server refuses {loss.missed} of {loss.sent} requests", found, 1.0,
                 "a larger limit, or fewer requests at a time")  # fmt: skip


def queue_limit(facts: Facts, loss: Excess) -> Proposal | None:
    """Requests are refused because the queue is full."""
    return _refused(facts, loss, by_limit=False)


def rate_limit(facts: Facts, loss: Excess) -> Proposal | None:
    """Requests are refused because a tenant has reached its limit."""
    return _refused(facts, loss, by_limit=True)


def core_death(facts: Facts, loss: Excess) -> Proposal | None:
    """Requests end with another error than a refusal."""
    if loss.error.startswith("HTTP 4") or is_timeout(loss.error) or is_broken(loss.error):
        return None
    found = [evidence(f"{loss.missed} requests ended with “{loss.error}”", loss.missed, "requests", "client: error",
                      weight=2)]  # fmt: skip
    return _hint(
        loss,
        f"the server failed {loss.missed} of {loss.sent} requests",
        found,
        1.0,
        "a server that no longer fails (its log says why)",
    )


for _reads in ("client", "accounts"):
    _same = {"lifecycles": ("request",), "needs": ("loss",), "reads": _reads}
    cause(object="bound of the queue (max_waiting)", kind="policy", rival="overload", **_same)(queue_limit)
    cause(object="limit of a tenant", kind="policy", rival="a queue that is full", **_same)(rate_limit)
    cause(object="core process", kind="fault", rival="a network that fails", **_same)(core_death)
    cause(object="connections", kind="fault", rival="a core that died", **_same)(broken_connections.explain)


def _hint(excess: Excess, words: str, found: list[Evidence], explained: float, change: str) -> Proposal:
    return Proposal(
        cause=words,
        evidence=found,
        measurement="the same scenario with the server's records",
        settings=None,
        if_cause=f"with {change} {missing_share(excess)} falls",
        if_rival=f"with {change} {missing_share(excess)} stays",
        change=change,
        claims={},
        explained=explained,
    )


def _goes_with_prompt(signs: Signs) -> bool:
    crowd = max(signs.with_crowd or 0.0, signs.growth or 0.0)
    return signs.with_prompt is not None and signs.with_prompt >= max(GOES_WITH, crowd)


def _has_room(facts: Facts) -> bool:
    """Whether tokens come at half of the time that the objective allows, or sooner."""
    bound, per_token = tightest(facts, "tpot_ms"), facts.rows.tpot_ms.astype("float64").median()
    return bound is not None and bool(per_token <= ROOM * bound)


def _queue(signs: Signs) -> list[Evidence]:
    found = []
    if signs.growth is not None:
        found.append(evidence(f"the time to first token grows over the run by {signs.growth:.1f} times its mean",
                              signs.growth, "ratio", TTFT, supports=signs.growth >= GROWS))  # fmt: skip
    if signs.with_crowd is not None:
        crowd = f"it goes with the number of requests under way: rank correlation {signs.with_crowd:.2f}"
        found.append(evidence(crowd, signs.with_crowd, "correlation", TTFT, supports=signs.with_crowd >= GOES_WITH))
    return found


def _stalls(signs: Signs) -> Evidence:
    return evidence(f"{signs.stalled:.0%} of the time between tokens lies in gaps of several times the usual "
                    f"{signs.gap_ms:.1f} ms", signs.stalled, "share", CHUNKS)  # fmt: skip
