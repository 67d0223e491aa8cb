"""A few clients read slowly: their chunks wait in the network, or in the server's buffers."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements import transit
from sojourn.diagnosis.statements.accounts import DEFINING, LOOP_LAG, STALLED_LOOP_S, mean_of, propose
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.front import DRAINED, drained_share
from sojourn.diagnosis.symptom_tree.reading import account

NETWORK = "client.network"


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
        Accounts: Rule(
            read_accounts,
            accounts=("request.stream",),
            object="readers of the answers",
            rival="a busy front",
            rival_key="slow_writer",
        ),
    },
)
