"""Requests or chunks are in transit between client and server, whoever sends them."""

import pandas as pd

from sojourn.diagnosis.cause import (
    Accounts,
    Cause,
    Change,
    Client,
    Excess,
    Means,
    Proposal,
    Records,
    Refutation,
    Rule,
    evidence,
)
from sojourn.diagnosis.causes.buffered_stream import at_once_share, is_buffered
from sojourn.diagnosis.client_signs import signs_of
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH
from sojourn.diagnosis.statements import transit
from sojourn.diagnosis.statements.accounts import DEFINING, hold_time
from sojourn.diagnosis.statements.client_only import GOES_WITH, TTFT, hint
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.means import HISTOGRAMS, time_gained
from sojourn.diagnosis.statements.means import TTFT as TTFT_FAMILY
from sojourn.diagnosis.statements.stops import MOSTLY, stopped_share
from sojourn.diagnosis.symptom_tree.reading import account

NETWORK = "client.network"
HALF, FEWEST, OTHERS = 0.5, 20, 0.1  # requests; of them, by which the server may count more or fewer
EVERYBODY = 0.5  # of the bound, paid by every request: no queue does that


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    fleet = facts.fleet()
    if fleet is not None and fleet.router_is_here:  # the way is the router's: there is no other
        return None
    if is_buffered(facts):  # what is in transit is kept back, and the way is short
        return None
    if stopped_share(facts, excess, "front") >= MOSTLY:  # it waits for a front that stands
        return None
    way_in, way_out = transit.ways_ms(facts)
    hit = transit.hit_share(facts, way_in + way_out, excess)
    both = float(way_in.median()) >= transit.NEAR_NOTHING * float((way_in + way_out).median())
    steady, path = _variation(way_in), 1.0 - transit.stalled_share(facts, excess)
    return Proposal(
        cause=f"a request is in transit for {way_in.median():,.0f} ms before it arrives, and its end for "
        f"{way_out.median():,.0f} ms (medians)",
        evidence=[
            evidence(f"{hit:.0%} of the requests have a transit like that of the late ones", hit, "share", transit.WAYS,
                     supports=hit >= transit.FEW, weight=3),
            evidence("the way in is slow, too: the first byte of a request is as late as the last of its answer" if both
                     else "the way in is fast: the first byte of a request is not delayed", float(way_in.median()),
                     "ms", transit.WAYS, supports=both, weight=2 if both or hit < transit.NEARLY_ALL else 0.5),
            evidence(f"the way in varies by {steady:.0%} of its mean: "
                     + ("a delay" if steady < 0.5 else "jitter, or a queue"), steady, "ratio", transit.WAYS, weight=0),
            *transit.idle_server(facts),
            *transit.client_evidence(facts, supports=False),
            *([evidence(f"{1 - path:.0%} of the time of answers in transit passed while the load generator stood still",
                        1 - path, "share", transit.STILL, supports=False, weight=3)] if path <= 0.5 else []),
            *excess_evidence(excess, (NETWORK,)),
        ],
        measurement="the same load from the server's own host",
        if_cause="client.network falls to below a millisecond",
        if_rival="client.network stays on few requests",
        change="shorten or widen the network path between client and server",
        claims={NETWORK: path},
        fixes=(Change(removed={NETWORK: path}),),
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Every request pays the same before and after the time that the server measures."""
    view, floor_ms, served = facts.server, outside_floor_ms(facts), facts.rows[facts.rows.status == "ok"]
    if excess.objective == "tpot_ms" or floor_ms is None or floor_ms < EXPLAINS_ENOUGH * excess.mean_ms:
        return None
    ttft_ms = float(_from_send_ms(served).mean())
    outside_ms = ttft_ms - 1e3 * view.latencies[TTFT_FAMILY].mean
    page_ms = 1e3 * facts.stops().scrape_s
    same = page_ms >= HALF * floor_ms
    return Proposal(
        cause=f"19 of 20 requests spend at least {floor_ms:,.0f} ms between the client and {view.title} before their "
        "first token",
        evidence=[
            evidence(f"the time to first token is {ttft_ms:,.0f} ms for the client and {ttft_ms - outside_ms:,.0f} ms "
                     f"for {view.title}", outside_ms / ttft_ms, "share", f"{TTFT}; {HISTOGRAMS}", weight=DEFINING),
            evidence(f"of the {outside_ms:,.0f} ms beyond it nearly every request pays {floor_ms:,.0f} ms: no queue "
                     "and no pause does that", floor_ms / outside_ms, "share", TTFT, weight=2),
            evidence(f"a page of /metrics takes {page_ms:,.0f} ms (median): "
                     + ("the way itself is slow" if same else "it may come another way"), page_ms, "ms",
                     "scrapes: scrape_duration_seconds", supports=same, weight=2 if same else 0.5),
        ],
        measurement="the same load from the server's own host",
        settings={},
        if_cause=f"{missing_share(excess)} falls",
        if_rival=f"{missing_share(excess)} stays: a gateway, or the front itself, holds every request",
        change="shorten the path between client and server, or whatever stands in it",
        explained=min(1.0, floor_ms / max(excess.mean_ms - excess.bound_ms, 1e-9)),
        gain=time_gained(view, f"{floor_ms:,.0f} ms before the first token"),
    )  # fmt: skip


def outside_floor_ms(facts: Means) -> float | None:
    """What 19 of 20 requests pay at least before the first token, beyond the server's own mean; None where others were
    served, too, where answers come whole, and where the end of the answers pays nothing."""
    own, rows = facts.server.latencies.get(TTFT_FAMILY), facts.rows[facts.rows.status == "ok"]
    share = at_once_share(facts)
    if own is None or len(rows) < FEWEST or (share is not None and share >= HALF):
        return None
    if abs(own.count - len(rows)) > OTHERS * len(rows):
        return None
    floor_ms = float(_from_send_ms(rows).quantile(0.05)) - 1e3 * own.mean
    outside_ms = float(_from_send_ms(rows).mean()) - 1e3 * own.mean
    if floor_ms < HALF * outside_ms or (facts.server.outside_ms or 0.0) < HALF * floor_ms:
        return None
    return floor_ms


def _from_send_ms(rows: pd.DataFrame) -> pd.Series:
    return (rows.first_token_ns.astype("float64") - rows.sent_ns.astype("float64")).dropna() / 1e6


def _some_are_fast(facts: Means) -> str:
    """Requests that no long way could have."""
    own, rows = facts.server.latencies.get(TTFT_FAMILY), facts.rows[facts.rows.status == "ok"]
    if own is None or not len(rows) or outside_floor_ms(facts) is not None:
        return ""
    fastest_ms = float(_from_send_ms(rows).quantile(0.05))
    return f"one request in 20 has its first token within {fastest_ms:,.0f} ms" if fastest_ms == fastest_ms else ""


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """Every request pays much before its first token, whatever its prompt and however many others there are."""
    signs = signs_of(facts)
    goes_with = max(signs.with_crowd or 0.0, signs.with_prompt or 0.0, signs.growth or 0.0)
    if excess.objective != "ttft_ms" or signs.floor_ms is None or goes_with >= GOES_WITH:
        return None
    if signs.floor_ms < EVERYBODY * excess.bound_ms:
        return None
    floor = evidence(f"19 of 20 requests wait at least {signs.floor_ms:,.0f} ms for their first token, whatever else "
                     "happens", signs.floor_ms, "ms", TTFT)  # fmt: skip
    return hint(excess, "every request pays the same before its first token", [floor], 0.4, "a shorter path")


def _variation(way: pd.Series) -> float:
    return float(way.std() / way.mean()) if len(way) > 1 and way.mean() > 0 else 0.0


CAUSE = Cause(
    key="slow_network",
    lifecycles=("client",),
    object="network path between client and server",
    kind="client",
    rival="slow readers: few requests, and only their way out",
    rival_key="slow_reader",
    name="network path",
    asks="Does the way between client and server take long?",
    measurement="the same load from the server's own host",
    figures=(account("client.network"),),
    booked=("client.network",),
    complaints={
        "high_ttft": 1,
        "high_itl": 1,
        "low_device_utilisation": 1,
        "product_latency_poor": 1,
        "devices_do_not_help": 1,
    },
    reads={
        Records: Rule(read_records, accounts=(NETWORK,)),
        Accounts: hold_time(
            accounts=("client.network",),
            words="the time is lost between client and server",
            change="a shorter network path",
            rival="a front that reads late",
            rival_key="",
        ),
        Means: Rule(
            read_means,
            object="way between client and server",
            rival="a slow front or gateway",
            rival_key="blocked_front",
            refuted_by=(Refutation("fast first tokens", _some_are_fast),),
        ),
        Client: Rule(read_client, rival="a slow front", rival_key="blocked_front"),
    },
)
