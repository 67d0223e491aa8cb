"""A few clients read slowly: their chunks wait in the network, or in the server's buffers."""

from sojourn.diagnosis.cause import (
    Accounts,
    Cause,
    Change,
    Excess,
    Means,
    Proposal,
    Records,
    Refutation,
    Rule,
    evidence,
)
from sojourn.diagnosis.statements import transit
from sojourn.diagnosis.statements.accounts import DEFINING, LOOP_LAG, STALLED_LOOP_S, mean_of, propose
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.front import DRAINED, drained_share
from sojourn.diagnosis.statements.means import HISTOGRAMS, time_gained
from sojourn.diagnosis.statements.stops import stopped_share
from sojourn.diagnosis.symptom_tree.reading import account
from sojourn.interop.sources.pressure import GAPS

NETWORK = "client.network"
MOSTLY, FEWEST, OTHERS = 0.5, 3, 0.1  # requests; of the gaps, by which the server may count more or fewer
STANDS_STILL = 0.1  # of the run, the load generator: then all its streams wait for it
OWN_PACE = 1.5  # times the server's mean gap
READS = "client: first_token_ns, last_byte_ns, output_tokens"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    way_in, way_out = transit.ways_ms(facts)
    writing, stream = facts.rows.get("writing_ns"), facts.rows.ledger_request_stream_ns.astype("float64")
    late = excess.missing
    own = 0.0 if writing is None else float(writing.astype("float64")[late].sum() / max(stream[late].sum(), 1.0))
    drained = drained_share(facts, excess)
    if drained is not None and drained <= DRAINED:  # its buffers were empty: writes waited for something else
        own = 0.0
    if excess.share(NETWORK) < 0.1 and own < transit.FEW:  # the stream waits for something else than its reader
        return None
    waiting = way_out if writing is None else way_out + writing.astype("float64").fillna(0) / 1e6
    hit = transit.hit_share(facts, waiting, excess)
    fast_in = float(way_in.median()) <= transit.NEAR_NOTHING * max(float(waiting.quantile(0.9)), 1e-9)
    slowest, path = waiting.quantile(0.9), 1.0 - transit.stalled_share(facts, excess)
    if hit >= transit.NEARLY_ALL:
        return None
    return Proposal(
        cause=f"{hit:.0%} of the clients read slowly: the end of their answers takes up to {slowest:,.0f} ms to be "
        "read once it is written",
        evidence=[
            evidence(f"{hit:.0%} of the requests have a way out like that of the late ones: "
                     + ("these clients, not the server" if hit < transit.FEW else "most of them"), hit, "share",
                     transit.WAYS, supports=hit < transit.FEW, weight=2.5),
            evidence(f"requests arrive {way_in.median():,.1f} ms after they were sent: the way in is "
                     + ("fast" if fast_in else "slow as well"), float(way_in.median()), "ms", transit.WAYS,
                     supports=fast_in, weight=2),
            *transit.idle_server(facts),
            *excess_evidence(excess, (NETWORK, "request.stream")),
        ],
        measurement="the same load with a client on the server's host",
        if_cause="no request waits to be read",
        if_rival=f"{missing_share(excess)} stays",
        change="clients that read at once, fewer bytes a chunk, or a proxy that buffers",
        claims={NETWORK: path, "request.stream": min(1.0, own)},
        fixes=(Change(removed={NETWORK: path, "request.stream": min(1.0, own)}),),
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Few requests are read slowly from end to end, and the server's own gaps have no room for their time."""
    held = held_from_few(facts, excess)
    if held is None:
        return None
    view, hit, late_ms, others_ms, part = facts.server, excess.missed / excess.sent, *held
    own_ms = 1e3 * view.latencies[GAPS].mean
    return Proposal(
        cause=f"{hit:.0%} of the clients read slowly, or have a slow way: text comes every {late_ms:,.0f} ms, to the "
        f"others every {others_ms:,.0f} ms",
        evidence=[
            evidence(f"{view.title} made a token every {own_ms:,.0f} ms on average over all requests: {part:.0%} of "
                     "what the late ones take longer is not its time", part, "share", f"{READS}; {HISTOGRAMS}",
                     weight=DEFINING),
            evidence(f"{hit:.0%} of the requests are hit, and the others read at {view.title}'s own pace", hit, "share",
                     READS, weight=2),
        ],
        measurement="the same load with a client on the server's host",
        settings={},
        if_cause=f"no client reads late there, and {missing_share(excess)} falls",
        if_rival=f"{missing_share(excess)} stays: something holds single streams",
        change="clients that read at once, fewer bytes a chunk, or a proxy that buffers",
        explained=part,
        gain=time_gained(view, f"{part:.0%} of the time between tokens of {hit:.0%} of the requests"),
    )  # fmt: skip


def held_from_few(facts: Means, excess: Excess) -> tuple[float, float, float] | None:
    """Time per token in ms of the late requests and of the others, and the part of the difference that the server's own
    gaps have no room for; None where the late ones are no few, or the others are slow as well."""
    gaps, rows = facts.server.latencies.get(GAPS), facts.rows[facts.rows.status == "ok"]
    stalls = transit.stalls_of(facts)
    if stopped_share(facts, excess, "front") >= MOSTLY or (stalls is not None and stalls.share >= STANDS_STILL):
        return None
    known = rows[rows.tpot_ms.notna() & (rows.output_tokens.astype("float64") > 1)]
    late = known.index.intersection(excess.missing)
    others = known.index.difference(excess.missing)
    if excess.objective == "ttft_ms" or gaps is None or len(late) < FEWEST or len(others) < FEWEST:
        return None
    per_token, counts = known.tpot_ms.astype("float64"), known.output_tokens.astype("float64") - 1
    late_ms, others_ms = float(per_token[late].median()), float(per_token[others].median())
    if len(late) > transit.FEW * len(known) or others_ms > OWN_PACE * 1e3 * gaps.mean:
        return None
    if abs(gaps.count - counts.sum()) > OTHERS * counts.sum():
        return None
    beyond_ms = float(((per_token[late] - others_ms).clip(lower=0) * counts[late]).sum())
    outside_ms = float((per_token * counts).sum()) - 1e3 * gaps.mean * gaps.count
    part = min(1.0, max(0.0, outside_ms) / max(beyond_ms, 1e-9))
    return (late_ms, others_ms, part) if part >= MOSTLY else None


def _gaps_of_the_server(facts: Means) -> str:
    """Whether the server's own gaps are as long as those of its clients."""
    gaps, rows = facts.server.latencies.get(GAPS), facts.rows[facts.rows.status == "ok"]
    if gaps is None or not len(rows):
        return ""
    read_ms = float(rows.tpot_ms.astype("float64").mean())
    if not read_ms < OWN_PACE * 1e3 * gaps.mean:
        return ""
    return f"the server's own gaps between tokens are as long: {1e3 * gaps.mean:,.0f} ms"


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """Text waits to be written while the front's event loop is on time: its readers take it late."""
    lag_s = mean_of(facts, LOOP_LAG)
    if lag_s is None or lag_s >= STALLED_LOOP_S:
        return None
    on_time = evidence(f"the timer of the front's event loop comes {1000 * lag_s:,.1f} ms late: the loop is free "
                       "to write", 1000 * lag_s, "ms", f"scrapes: {LOOP_LAG}", weight=DEFINING)  # fmt: skip
    return propose(excess, "text is ready and the loop is free, but readers take it late",
                   [on_time, *excess_evidence(excess, ("request.stream",))],
                   "clients that read faster, or a proxy that buffers")  # fmt: skip


CAUSE = Cause(
    key="slow_reader",
    lifecycles=("client", "request"),
    object="readers",
    kind="client",
    rival="a slow network: it delays every request",
    rival_key="slow_network",
    name="reader",
    asks="Does the client read slowly?",
    measurement="the same load with a client that discards what it reads",
    figures=(account("client.network", "request.stream"),),
    booked=("client.network", "request.stream"),
    complaints={"high_ttft": 2, "high_itl": 2, "product_latency_poor": 2, "devices_do_not_help": 2},
    reads={
        Records: Rule(read_records, accounts=(NETWORK, "request.stream")),
        Means: Rule(read_means, refuted_by=(Refutation("gaps between tokens", _gaps_of_the_server),)),
        Accounts: Rule(
            read_accounts,
            accounts=("request.stream",),
            object="readers of the answers",
            rival="a busy front",
            rival_key="slow_writer",
        ),
    },
)
