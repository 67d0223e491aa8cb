"""Something between server and client keeps an answer back until it is whole: the first token comes with the last."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from sojourn.diagnosis.cause import Cause, Client, Excess, Means, Proposal, Records, Refutation, Rule, evidence
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH
from sojourn.diagnosis.statements.accounts import DEFINING
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.means import HISTOGRAMS, TTFT, time_gained
from sojourn.interop.sources.pressure import GAPS

MANY_TOKENS, FEWEST = 8, 5  # of an answer: a shorter one may come in one piece; answers
AT_ONCE = 0.1  # of the server's decode time, in which the client reads the whole answer
MOSTLY = 0.5  # of the answers
NETWORK = "client.network"
UNBUFFERED = (
    "no buffering in the proxy (nginx: proxy_buffering off; or the header X-Accel-Buffering: no), no compression of "
    "event streams"
)
READS = "client: first_token_ns, last_byte_ns; scrapes: histograms"


def at_once_share(facts: Means) -> float | None:
    """Of the longer answers, those of which all text came in a small part of the time that the server took for it."""
    gaps, rows = facts.server.latencies.get(GAPS), facts.rows[facts.rows.status == "ok"]
    long = rows[rows.output_tokens.astype("float64") >= MANY_TOKENS]
    if gaps is None or len(long) < FEWEST:
        return None
    read_s = (long.last_byte_ns.astype("float64") - long.first_token_ns.astype("float64")) / 1e9
    made_s = (long.output_tokens.astype("float64") - 1) * gaps.mean
    return float((read_s <= AT_ONCE * made_s).mean())


def held_back(facts: Client) -> tuple[float, float] | None:
    """By the server's own record of each token: the share of the longer answers that the client read at one moment, and
    the mean time in ms for which it was kept from their first token."""
    rows = facts.rows[facts.rows.status == "ok"]
    if "token_ns" not in rows:
        return None
    tokens = [np.asarray(each if isinstance(each, Iterable) else (), dtype="float64") for each in rows.token_ns]
    long = np.array([len(each) >= MANY_TOKENS for each in tokens], dtype=bool)
    if long.sum() < FEWEST:
        return None
    first, last = (rows[name].astype("float64").to_numpy()[long] for name in ("first_token_ns", "last_byte_ns"))
    made = np.array([each[-1] - each[0] for each in tokens if len(each) >= MANY_TOKENS])
    begun = np.array([each[0] for each in tokens if len(each) >= MANY_TOKENS])
    return float(np.mean(last - first <= AT_ONCE * made)), float(np.mean(first - begun)) / 1e6


def is_buffered(facts: Client) -> bool:
    found = held_back(facts)
    return found is not None and found[0] >= MOSTLY and found[1] > 0


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    """The server wrote token by token, and the client read them all at one moment."""
    found = held_back(facts)
    if found is None or found[0] < MOSTLY or excess.objective == "tpot_ms":
        return None
    share, kept_ms = found
    if kept_ms < EXPLAINS_ENOUGH * float(facts.rows[facts.rows.status == "ok"].ttft_ms.astype("float64").mean()):
        return None
    return Proposal(
        cause=f"something buffers the stream: {share:.0%} of the answers come whole, {kept_ms:,.0f} ms after their "
        "first token was made",
        evidence=[
            evidence(f"{share:.0%} of the answers are read in less than a tenth of the time between the server's first "
                     "and last token", share, "share", "client: first_token_ns, last_byte_ns; requests: token_ns",
                     weight=DEFINING),
            *excess_evidence(excess, (NETWORK,)),
        ],
        measurement="the same request to the server's own address, past every proxy",
        if_cause=f"tokens come one by one there, and {missing_share(excess)} falls",
        if_rival="tokens come in one piece there, too: the server or the client does not stream",
        change=UNBUFFERED,
        claims={NETWORK: 1.0},
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """The server makes tokens one by one, and the client reads them all at one moment."""
    view, share = facts.server, at_once_share(facts)
    own, gaps = view.latencies.get(TTFT), view.latencies.get(GAPS)
    if share is None or share < MOSTLY or own is None or excess.objective == "tpot_ms":
        return None
    ttft_ms = float(facts.rows[facts.rows.status == "ok"].ttft_ms.astype("float64").mean())
    kept_ms = ttft_ms - 1e3 * own.mean
    if kept_ms < EXPLAINS_ENOUGH * ttft_ms:
        return None
    return Proposal(
        cause=f"something buffers the stream: {share:.0%} of the answers come whole, and {view.title} gave their first "
        f"token {kept_ms:,.0f} ms before",
        evidence=[
            evidence(f"{share:.0%} of the answers are read in less than a tenth of the time between the server's "
                     f"tokens, {1e3 * gaps.mean:,.0f} ms each", share, "share", READS, weight=DEFINING),
            evidence(f"the time to first token is {ttft_ms:,.0f} ms for the client and {1e3 * own.mean:,.0f} ms for "
                     f"{view.title}", kept_ms / ttft_ms, "share", f"{READS}; {HISTOGRAMS}", weight=2),
        ],
        measurement="the same request to the server's own address, past every proxy",
        if_cause=f"tokens come every {1e3 * gaps.mean:,.0f} ms there, and {missing_share(excess)} falls",
        if_rival="tokens come in one piece there, too: the server or the client does not stream",
        change=UNBUFFERED,
        explained=min(1.0, kept_ms / ttft_ms),
        gain=time_gained(view, f"{kept_ms:,.0f} ms between the server's first token and the client's"),
    )  # fmt: skip


def _comes_bit_by_bit(facts: Means) -> str:
    share = at_once_share(facts)
    if share is None or share >= MOSTLY or pd.isna(share):
        return ""
    return f"{1 - share:.0%} of the answers come bit by bit"


CAUSE = Cause(
    key="buffered_stream",
    lifecycles=("client", "token"),
    object="proxy between server and client",
    kind="fault",
    rival="a server or a client that does not stream",
    reads={
        Records: Rule(read_records, accounts=(NETWORK,)),
        Means: Rule(read_means, refuted_by=(Refutation("reads of each answer", _comes_bit_by_bit),)),
    },
)
