"""Causes outside of the server: the network, readers, and the load generator; and a core that died."""

import numpy as np
import pandas as pd

from sojourn.diagnosis.client_stalls import ClientStalls, client_stalls
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import Proposal, cause
from sojourn.diagnosis.rules.front import DRAINED, drained_share
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, missing_share
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.server_alone import CLIENT_LEFT

NETWORK, LAG, LOST = "client.network", "client.lag", "request.lost"
FEW = 0.5  # of the requests: what hits fewer of them belongs to them
NEARLY_ALL = 0.9  # of the requests: these are no few readers, whatever their way in
NEAR_NOTHING = 0.1  # of the late requests' transit: the others have hardly any
IDLE_LOOP = 0.5  # busy: an event loop below it answers at once
FULL_CLIENT = 0.9  # of a core: one process of a load generator has one
CORE_DIED = ("the engine core", "core died", "engine_restarting", "engine is restarting")
BROKEN = ("stream ended before", "closed without a reply", "connection reset", "broken pipe", "connection refused",
          "connection aborted")  # fmt: skip
HOLDS_TEXT = 0.05  # of the time, in long turns of the front's loop: beyond it the front may hold what is not read
STILL = "client: due_ns, sent_ns, chunk_ns; requests: token_ns"
WAYS = "client: sent_ns, last_byte_ns; requests: arrived_ns, written_ns"


@cause(lifecycles=("client",), object="network path between client and server", kind="client", accounts=(NETWORK,),
       rival="slow readers: few requests, and only their way out", rival_key="slow_reader")  # fmt: skip
def slow_network(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests or chunks are in transit between client and server, whoever sends them."""
    fleet = facts.fleet()
    if fleet is not None and fleet.router_is_here:  # the way is the router's: there is no other
        return None
    way_in, way_out = ways_ms(facts)
    hit = hit_share(facts, way_in + way_out, excess)
    both = float(way_in.median()) >= NEAR_NOTHING * float((way_in + way_out).median())
    steady, path = _variation(way_in), 1.0 - stalled_share(facts, excess)
    return Proposal(
        cause=f"a request is in transit for {way_in.median():,.0f} ms before it arrives, and its end for "
        f"{way_out.median():,.0f} ms (medians)",
        evidence=[
            evidence(f"{hit:.0%} of the requests have a transit like that of the late ones", hit, "share", WAYS,
                     supports=hit >= FEW, weight=3),
            evidence("the way in is slow, too: the first byte of a request is as late as the last of its answer" if both
                     else "the way in is fast: the first byte of a request is not delayed", float(way_in.median()),
                     "ms", WAYS, supports=both, weight=2 if both or hit < NEARLY_ALL else 0.5),
            evidence(f"the way in varies by {steady:.0%} of its mean: "
                     + ("a delay" if steady < 0.5 else "jitter, or a queue"), steady, "ratio", WAYS, weight=0),
            *_idle_server(facts),
            *_client_evidence(facts, supports=False),
            *([evidence(f"{1 - path:.0%} of the time of answers in transit passed while the load generator stood still",
                        1 - path, "share", STILL, supports=False, weight=3)] if path <= 0.5 else []),
            *excess_evidence(excess, (NETWORK,)),
        ],
        measurement="the same load from the server's own host",
        settings=None,
        if_cause="client.network falls to below a millisecond",
        if_rival="client.network stays on few requests",
        change="shorten or widen the network path between client and server",
        claims={NETWORK: path},
        fixes=(Change(removed={NETWORK: path}),),
    )  # fmt: skip


@cause(lifecycles=("client", "request"), object="readers", kind="client", accounts=(NETWORK, "request.stream"),
       rival="a slow network: it delays every request", rival_key="slow_network")  # fmt: skip
def slow_reader(facts: Facts, excess: Excess) -> Proposal | None:
    """A few clients read slowly: their chunks wait in the network, or in the server's buffers."""
    way_in, way_out = ways_ms(facts)
    writing, stream = facts.rows.get("writing_ns"), facts.rows.ledger_request_stream_ns.astype("float64")
    late = excess.missing
    own = 0.0 if writing is None else float(writing.astype("float64")[late].sum() / max(stream[late].sum(), 1.0))
    drained = drained_share(facts, excess)
    if drained is not None and drained <= DRAINED:  # its buffers were empty: writes waited for something else
        own = 0.0
    if excess.share(NETWORK) < 0.1 and own < FEW:  # the stream waits for something else than its reader
        return None
    waiting = way_out if writing is None else way_out + writing.astype("float64").fillna(0) / 1e6
    hit = hit_share(facts, waiting, excess)
    fast_in = float(way_in.median()) <= NEAR_NOTHING * max(float(waiting.quantile(0.9)), 1e-9)
    slowest, path = waiting.quantile(0.9), 1.0 - stalled_share(facts, excess)
    if hit >= NEARLY_ALL:
        return None
    return Proposal(
        cause=f"{hit:.0%} of the clients read slowly: the end of their answers takes up to {slowest:,.0f} ms to be "
        "read once it is written",
        evidence=[
            evidence(f"{hit:.0%} of the requests have a way out like that of the late ones: "
                     + ("these clients, not the server" if hit < FEW else "most of them"), hit, "share", WAYS,
                     supports=hit < FEW, weight=2.5),
            evidence(f"requests arrive {way_in.median():,.1f} ms after they were sent: the way in is "
                     + ("fast" if fast_in else "slow as well"), float(way_in.median()), "ms", WAYS, supports=fast_in,
                     weight=2),
            *_idle_server(facts),
            *excess_evidence(excess, (NETWORK, "request.stream")),
        ],
        measurement="the same load with a client on the server's host",
        settings=None,
        if_cause="no request waits to be read",
        if_rival=f"{missing_share(excess)} stays",
        change="clients that read at once, fewer bytes a chunk, or a proxy that buffers",
        claims={NETWORK: path, "request.stream": min(1.0, own)},
        fixes=(Change(removed={NETWORK: path, "request.stream": min(1.0, own)}),),
    )  # fmt: skip


@cause(lifecycles=("client",), object="load generator", kind="client", accounts=(LAG, NETWORK),
       rival="a slow network: it sends in time", rival_key="slow_network")  # fmt: skip
def starved_load_generator(facts: Facts, excess: Excess) -> Proposal | None:
    """The load generator sends or reads late: it has too little of the CPU, or stands still."""
    late = (facts.rows.sent_ns.astype("float64") - facts.rows.due_ns.astype("float64")) / 1e6
    p90, machine = float(late.quantile(0.9)), facts.machine
    share, stalls, part = excess.share(LAG), _stalls(facts), stalled_share(facts, excess)
    if machine is not None and (machine.load_cores_worst or 0.0) >= FULL_CLIENT:
        part = 1.0
    if share + part * excess.share(NETWORK) < 0.1:
        return None
    claims = {LAG: 1.0, NETWORK: part}
    return Proposal(
        cause=f"the load generator sends late, by {p90:,.0f} ms (p90): its own delay counts as the server's"
        if p90 >= 1 else "the load generator reads late: its own delay counts as the server's",
        evidence=[
            evidence(f"{share:.0%} of the time above the objective is {LAG}: intended send → send", share, "share",
                     "client: due_ns, sent_ns", supports=share >= 0.1, weight=3),
            *([evidence(f"the load generator stands still {len(stalls)} times for up to {stalls.longest_ms:,.0f} ms, "
                        f"{stalls.share:.0%} of the run: it neither sends what is due nor reads", stalls.share,
                        "share", STILL, weight=3)] if stalls is not None and len(stalls) > 1 else []),
            *_client_evidence(facts, supports=True),
            *excess_evidence(excess, (LAG, NETWORK) if part >= 0.1 else (LAG,)),
        ],
        measurement="the same load with a core of its own for the load generator, or with --processes 2",
        settings=None,
        if_cause=f"{LAG} falls to below a millisecond",
        if_rival=f"{LAG} stays",
        change="give the load generator a core of its own, or more processes",
        claims=claims,
        fixes=(Change(removed=claims),),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object="core process", kind="fault", needs=(),
       rival="a limit that refuses requests", rival_key="queue_limit")  # fmt: skip
def core_death(facts: Facts, excess: Excess | None) -> Proposal | None:
    """The core process died: its requests are lost, and others wait or are refused until another one is up."""
    if excess is None:
        return None
    is_loss = excess.objective == SERVED
    ended = excess.error.lower()
    lost_share = 0.0 if is_loss else excess.share(LOST)
    if is_loss and not any(words in ended for words in CORE_DIED):
        return None
    if not is_loss and lost_share < 0.1:
        return None
    gap_s = _longest_gap_s(facts)
    return Proposal(
        cause="the core process died, and the requests in it were lost"
        + (f"; the server made no step for {gap_s:.1f} s" if gap_s is not None else ""),
        evidence=[
            *([evidence(f"{excess.missed} requests ended with “{excess.error}”", excess.missed, "requests",
                        "client: error", weight=3)] if is_loss else
              [evidence(f"{lost_share:.0%} of the time above the objective is {LOST}", lost_share, "share",
                        "requests: ledger_request_lost_ns", weight=3), *excess_evidence(excess, (LOST,))]),
        ],
        measurement="the server's log: it says when the core died, and with which exit code",
        settings=None,
        if_cause="the log names a signal or an exit code at the time of the lost requests",
        if_rival="the core lived all the time",
        change="find why the core died: memory, a driver, a bug; `spare_core` shortens the outage",
        claims={LOST: 1.0},
        explained=1.0 if is_loss else None,
        in_replay=False,
    )  # fmt: skip


@cause(lifecycles=("request", "client"), object="connections", kind="fault", needs=("loss",),
       rival="a core that died: the server says so to its clients", rival_key="core_death")  # fmt: skip
def broken_connections(facts: Facts, loss: Excess) -> Proposal | None:
    """Connections end before the answer does, and the server says nothing of an error."""
    if not is_broken(loss.error):
        return None
    lost = facts.rows.loc[loss.missing]
    span = lost.due_ns.min(), lost.due_ns.max()
    meanwhile = facts.rows[(facts.rows.status == "ok") & facts.rows.due_ns.between(*span)]
    begun = float(lost.first_token_ns.notna().mean())
    return Proposal(
        cause=f"connections end before the answer is complete: {loss.missed} of {loss.sent} requests"
        + (f" of {loss.klass}" if loss.klass else ""),
        evidence=[
            evidence(f"{loss.missed} requests ended with “{loss.error}”", loss.missed, "requests", "client: error",
                     weight=2),
            evidence(f"{len(meanwhile)} others were served meanwhile: the server lived", len(meanwhile), "requests",
                     "client: due_ns, status", supports=len(meanwhile) > 0, weight=2),
            evidence(f"{begun:.0%} of them had text before", begun, "share", "client: first_token_ns", weight=0),
        ],
        measurement="a capture of the packets at the server's port: which side sends the reset",
        settings=None,
        if_cause="the reset comes from the server, or from what stands before it, in the middle of an answer",
        if_rival="the server's log names the end of its core",
        change="find what closes the connections: middleware, a proxy, a limit of open files, a client that gives up",
        explained=1.0,
        in_replay=False,
    )  # fmt: skip


def is_broken(error: str) -> bool:
    """Whether an error is of a connection, not an answer of the server."""
    return any(words in error.lower() for words in BROKEN)


def is_timeout(error: str) -> bool:
    """Whether the client gave up: whatever makes requests late is the cause, not their end."""
    return "timeout" in error or "target." in error or error == CLIENT_LEFT


def _stalls(facts: Facts) -> ClientStalls | None:
    if facts.measured_by == "server":
        return None
    loop = None if facts.machine is None else facts.machine.front
    return client_stalls(facts.rows, by_tokens=loop is not None and loop.long_share < HOLDS_TEXT)


def stalled_share(facts: Facts, excess: Excess) -> float:
    """Of what late requests spent on the way to the client, 0 to 1: while the load generator stood still."""
    stalls = _stalls(facts)
    if stalls is None or not len(stalls) or excess.objective == SERVED:
        return 0.0
    return min(1.0, stalls.waited_share(facts.rows.loc[excess.missing], first=excess.objective == "ttft_ms"))


def ways_ms(facts: Facts) -> tuple[pd.Series, pd.Series]:
    """Of each request that the server recorded, in ms: sent → arrived without the front's busy loop, and written →
    read."""
    rows = facts.rows
    arrived, written, sent, read = (rows[name].astype("float64")
                                    for name in ("arrived_ns", "written_ns", "sent_ns", "last_byte_ns"))  # fmt: skip
    turns = rows.front_turns_ns.fillna(0) if "front_turns_ns" in rows else 0.0
    way_in = ((arrived - sent - turns) / 1e6).clip(lower=0)
    return way_in.dropna(), ((read - written) / 1e6).clip(lower=0)[way_in.notna()].fillna(0)


def hit_share(facts: Facts, transit: pd.Series, excess: Excess) -> float:
    """The share of the requests of the class whose transit is at least a quarter of the late requests' median."""
    klass = facts.rows.index[facts.rows.klass == excess.klass].intersection(transit.index)
    late = transit.reindex(excess.missing).median()
    if not len(klass) or not np.isfinite(late) or late <= 0:
        return 1.0
    return float((transit[klass] >= 0.25 * late).mean())


def _variation(way: pd.Series) -> float:
    return float(way.std() / way.mean()) if len(way) > 1 and way.mean() > 0 else 0.0


def _idle_server(facts: Facts) -> list[Evidence]:
    """An event loop with nothing to do accepts and writes at once."""
    loop = None if facts.machine is None else facts.machine.front
    if loop is None:
        return []
    statement = f"the front's event loop is busy in {loop.busy:.0%} of the time"
    return [evidence(statement, loop.busy, "share", "system: loop_busy_ns", supports=loop.busy < IDLE_LOOP, weight=1)]


def _client_evidence(facts: Facts, *, supports: bool) -> list[Evidence]:
    machine = facts.machine
    if machine is None or machine.load_cores_worst is None:
        return []
    busiest, queued = machine.load_cores_worst, machine.load_queued or 0.0
    starved = busiest >= FULL_CLIENT or queued >= 0.1
    return [evidence(f"the load generator takes {busiest:.0%} of a core in its busiest second, and waits for a core in "
                     f"{queued:.0%} of the time", busiest, "share", "run.json: load_use",
                     supports=starved == supports, weight=1)]  # fmt: skip


def _longest_gap_s(facts: Facts) -> float | None:
    finished = facts.rows.token_ns.dropna() if "token_ns" in facts.rows else []
    stamps = np.sort(np.concatenate([np.zeros(0), *(np.asarray(each, dtype="float64") for each in finished)]))
    return float(np.diff(stamps).max() / 1e9) if len(stamps) > 2 else None
