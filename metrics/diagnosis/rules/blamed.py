"""Whom late requests waited for, and for what: the blame matrix and the scheduler's own reasons, in words."""

import pandas as pd

from metrics.diagnosis.evidence import Facts
from metrics.diagnosis.excess import Excess
from metrics.diagnosis.rules.candidate import evidence
from metrics.diagnosis.verdict import Evidence
from metrics.request.blame import largest_groups, matrix, offenders, waited_ns
from metrics.request.offenders import described

NAMED = 0.3  # of the waiting: a group that caused less is one among several


def blamed_group(facts: Facts, excess: Excess | None) -> list[Evidence]:
    """The group of requests (one tenant, one class, one band of prompt lengths) that caused most of the waiting of
    those that miss an objective; [] where no group caused much of it, or where all are of one group."""
    book = facts.book()
    if book is None or excess is None:
        return []
    facts_of = described(book.requests)
    group_of = facts_of[["tenant", "klass", "band"]].apply(tuple, axis=1)
    late = facts.rows.request_id[excess.missing]
    late = late[late.isin(book.waits.request_ids)]
    waited = float(waited_ns(book).loc[late].sum().sum())
    if group_of.nunique() < 2 or waited <= 0:
        return []
    names = {group: place for place, group in enumerate(group_of.unique())}
    groups = list(names)
    caused = matrix(book, largest_groups(book, group_of.map(names))).loc[late].sum()
    caused = caused[[name for name in caused.index if name in range(len(groups))]]
    share, (tenant, klass, band) = float(caused.max() / waited), groups[caused.idxmax()]
    if share < NAMED:
        return []
    members = group_of[group_of == (tenant, klass, band)].index
    count = int(offenders(book).request_id.isin(members).sum())
    who = f"the {count} requests" if count != 1 else "the one request"
    who += f" of tenant {tenant}" if tenant and facts_of.tenant.nunique() > 1 else ""
    who += f" of {klass}" if klass and facts_of.klass.nunique() > 1 else ""
    return [
        evidence(f"{who} with prompts of {band} caused {share:.0%} of the waiting of those that miss it", share,
                 "share", "steps: request_ids, new_tokens, refusals; requests: ledger_*_ns")
    ]  # fmt: skip


def long_prompt_share(facts: Facts, excess: Excess, longer_than: float) -> tuple[float, pd.DataFrame]:
    """Of what others cost those that miss an objective, the part that prompts of at least so many tokens caused; and
    those requests, as `offenders` tells them."""
    book = facts.book()
    if book is None:
        return 0.0, pd.DataFrame()
    tokens = described(book.requests).prompt_tokens
    late = facts.rows.request_id[excess.missing]
    late = late[late.isin(book.waits.request_ids)]
    caused = matrix(book, (tokens >= longer_than).map({True: "long", False: "other"})).loc[late].sum()
    total = float(caused.clip(lower=0).sum())
    table = offenders(book)
    return float(caused.get("long", 0.0)) / total if total > 0 else 0.0, table[table.prompt_tokens >= longer_than]
