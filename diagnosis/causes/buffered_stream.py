"""Something between server and client keeps an answer back until it is whole: the first token comes with the last."""

import pandas as pd

from sojourn.diagnosis.cause import Cause, Excess, Means, Proposal, Refutation, Rule, evidence
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH
from sojourn.diagnosis.statements.accounts import DEFINING
from sojourn.diagnosis.statements.excess import missing_share
from sojourn.diagnosis.statements.means import HISTOGRAMS, TTFT, time_gained
from sojourn.interop.sources.pressure import GAPS

MANY_TOKENS, FEWEST = 8, 5  # of an answer: a shorter one may come in one piece; answers
AT_ONCE = 0.1  # of the server's decode time, in which the client reads the whole answer
MOSTLY = 0.5  # of the answers
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
        change="no buffering in the proxy (nginx: proxy_buffering off; or the header X-Accel-Buffering: no), no "
        "compression of event streams",
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
    reads={Means: Rule(read_means, refuted_by=(Refutation("reads of each answer", _comes_bit_by_bit),))},
)
