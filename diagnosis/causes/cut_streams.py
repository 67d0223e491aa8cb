"""Answers end unfinished at one age, whatever they had to say: something in front of the server has a time limit."""

from dataclasses import dataclass

import pandas as pd

from sojourn.diagnosis.cause import Cause, Client, Evidence, Excess, Means, Proposal, Refutation, Rule, evidence
from sojourn.diagnosis.statements.accounts import DEFINING
from sojourn.diagnosis.statements.means import COUNTERS
from sojourn.diagnosis.statements.transit import is_broken
from sojourn.interop.sources.translate import key
from sojourn.interop.sources.view import FINISHED

FEWEST, SAME_S, LEAST_S = 3, 1.0, 3.0  # cut answers; their ages agree within; a younger age is no time limit
APART = 3.0  # times the spread of the ages, of the moments when they ended: else one event ended all of them
AGES = "client: sent_ns, last_byte_ns, error"


@dataclass(frozen=True, slots=True)
class Cut:
    number: int
    age_s: float  # from sending to the last text
    spread_s: float
    outlived: float  # of the served requests, what lived clearly longer


def cut_of(facts: Client) -> Cut | None:
    """None where fewer were cut, at different ages, or all at one moment."""
    rows = facts.rows
    broken = [status not in ("ok", "timeout", "cancelled") and is_broken(str(error))
              for status, error in zip(rows.status, rows.error, strict=True)]  # fmt: skip
    lost = rows[pd.Series(broken, index=rows.index, dtype=bool) & rows.first_token_ns.notna()]
    if len(lost) < FEWEST:
        return None
    ages, ends = _age_s(lost), lost.last_byte_ns.astype("float64") / 1e9
    age_s, spread_s = float(ages.median()), float(ages.max() - ages.min())
    if age_s < LEAST_S or spread_s > SAME_S or float(ends.max() - ends.min()) < APART * max(spread_s, 0.1):
        return None
    served = _age_s(rows[rows.status == "ok"])
    return Cut(len(lost), age_s, spread_s, float((served > age_s + SAME_S).mean()) if len(served) else 0.0)


def _age_s(rows: pd.DataFrame) -> pd.Series:
    return (rows.last_byte_ns.astype("float64") - rows.sent_ns.astype("float64")) / 1e9


def read_client(facts: Client, loss: Excess) -> Proposal | None:
    """Streams are cut at one age, and no answer lives longer."""
    cut = cut_of(facts)
    if cut is None or not is_broken(loss.error) or _outlived(facts):
        return None
    limit = f"{cut.age_s:.0f} s"
    return Proposal(
        cause=f"streams are cut at the age of {limit}: {cut.number} answers end unfinished, all within "
        f"{max(cut.spread_s, 0.1):.1f} s of it",
        evidence=[
            evidence(f"{cut.number} answers end {cut.age_s:.1f} s after they were sent, within {cut.spread_s:.1f} s of "
                     "each other, at different moments", cut.spread_s, "s", AGES, weight=DEFINING),
            *([] if facts.served == 0 else [
                evidence("no answer that was served lived longer", 0.0, "share", AGES, weight=2)
            ]),
            *_server_evidence(facts, cut),
        ],
        measurement="one long answer sent to the server's own address, past every proxy",
        if_cause=f"it lives longer than {limit} there, and is cut again through the proxy",
        if_rival=f"it ends at {limit} there, too: the limit is the server's own",
        change=f"the limit of {limit} in the proxy, gateway or load balancer: above the longest answer; or heartbeats "
        "where the limit is on silence",
        explained=1.0,
        in_replay=False,
    )  # fmt: skip


def _server_evidence(facts: Client, cut: Cut) -> list[Evidence]:
    """What the server counted of them: aborted, or finished as if nothing had been."""
    if not isinstance(facts, Means):
        return []
    ended = {name: facts.server.totals.get(key(FINISHED, (("outcome", name),)), 0.0)
             for name in ("stop", "length", "abort", "error")}  # fmt: skip
    if None in ended.values() or not sum(ended.values()):
        return []
    unharmed = max(0.0, ended["stop"] + ended["length"] - facts.served)
    return [evidence(f"{facts.server.title} counts {ended['abort']:,.0f} aborted, {ended['error']:,.0f} failed, and "
                     f"{unharmed:,.0f} finished requests more than the client received", ended["error"], "requests",
                     COUNTERS, supports=ended["error"] < cut.number / 2)]  # fmt: skip


def is_cut(facts: Client) -> bool:
    """Whether a time limit explains the connections that end."""
    return cut_of(facts) is not None and not _outlived(facts)


def _outlived(facts: Client) -> str:
    cut = cut_of(facts)
    if cut is None or not cut.outlived:
        return ""
    return f"{cut.outlived:.0%} of the served requests lived longer than {cut.age_s:.0f} s"


_RULE = Rule(read_client, needs=("loss",), refuted_by=(Refutation("ages of served requests", _outlived),))
CAUSE = Cause(
    key="cut_streams",
    lifecycles=("client", "request"),
    object="time limit in front of the server",
    kind="policy",
    rival="a limit of the server itself, or a crash",
    rival_key="broken_connections",
    reads={Means: _RULE},
    lost=_RULE,
)
