"""The requests that others waited for: one tenant, one class, one band of prompt lengths."""

from dataclasses import dataclass

import pandas as pd

from sojourn.diagnosis.evidence import Client, Records
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.request.blame import largest_groups, matrix, offenders, waited_ns
from sojourn.metrics.request.offenders import Book, described

NAMED_ONE_HALF = 0.5  # of the late requests: a group of which most late ones are delays itself
MOST_IDS = 50  # of offenders that a finding links to
NAMED = 0.3  # of the waiting: a group that caused less is one among several


@dataclass(frozen=True, slots=True)
class Blamed:
    """A group of requests that others waited for."""

    name: str
    who: str  # "the 31 requests of document"
    share: float  # of the waiting of the late requests, 0 to 1
    of_requests: float  # its share of all requests
    of_others: bool  # most of the late requests are not of the group itself
    prompt_tokens: float  # median
    request_ids: tuple[str, ...]  # those that delayed others most


def blamed_on(facts: Records, excess: Excess, trait: str) -> list[Blamed]:
    """The groups by `tenant`, `klass` or `band` of the prompt that late requests waited for, most first.

    [] where all requests are of one group, or nobody knows who delayed whom.
    """
    book = facts.book()
    if book is None:
        return []
    traits = described(book.requests)
    group_of = traits[trait].astype(str)
    if trait in facts.rows and group_of.nunique() < 2:  # the server was not told; the client knows
        group_of = group_of.index.to_series().map(facts.rows.set_index("request_id")[trait]).fillna("").astype(str)
    late = late_ids(facts, excess, book)
    waited = float(waited_ns(book).loc[late].sum().sum())
    if group_of.nunique() < 2 or waited <= 0:
        return []
    caused = matrix(book, largest_groups(book, group_of)).loc[late].sum()
    own = group_of[~group_of.index.duplicated()].reindex(late).value_counts(normalize=True)
    worst = offenders(book)
    found = []
    for name in caused.index.intersection(group_of.unique()):
        members = group_of[group_of == name].index
        ids = tuple(worst[worst.request_id.isin(members)].request_id.head(MOST_IDS))
        which = {"tenant": f"of tenant {name}", "klass": f"of {name}", "band": f"with prompts of {name}"}[trait]
        found.append(Blamed(
            name=str(name), who=f"the {len(members)} requests {which}", share=float(caused[name] / waited),
            of_requests=len(members) / len(group_of), of_others=float(own.get(name, 0.0)) < NAMED_ONE_HALF,
            prompt_tokens=float(traits.prompt_tokens[members].median()), request_ids=ids,
        ))  # fmt: skip
    return sorted(found, key=lambda each: -each.share)


def blamed_group(facts: Records, excess: Excess | None) -> list[Evidence]:
    """The group of requests (one tenant, one class, one band of prompt lengths) that late requests waited for most.

    [] where no group caused much of their waiting, or where all requests are of one group.
    """
    book = facts.book()
    if book is None or excess is None:
        return []
    facts_of = described(book.requests)
    group_of = facts_of[["tenant", "klass", "band"]].apply(tuple, axis=1)
    late = late_ids(facts, excess, book)
    waited = float(waited_ns(book).loc[late].sum().sum())
    if group_of.nunique() < 2 or waited <= 0:
        return []
    codes, groups = pd.factorize(group_of)
    caused = matrix(book, largest_groups(book, pd.Series(codes, index=group_of.index))).loc[late].sum()
    caused = caused[[name for name in caused.index if name in range(len(groups))]]
    share, (tenant, klass, band) = float(caused.max() / waited), groups[int(caused.idxmax())]
    if share < NAMED:
        return []
    members = group_of[group_of == (tenant, klass, band)].index
    count = int(offenders(book).request_id.isin(members).sum())
    who = f"the {count} requests" if count != 1 else "the one request"
    who += f" of tenant {tenant}" if tenant and facts_of.tenant.nunique() > 1 else ""
    who += f" of {klass}" if klass and facts_of.klass.nunique() > 1 else ""
    statement = f"{who} with prompts of {band} caused {share:.0%} of the waiting of late requests"
    return [evidence(statement, share, "share", "steps: request_ids, new_tokens, refusals; requests: ledger_*_ns")]


def late_ids(facts: Client, excess: Excess, book: Book) -> pd.Series:
    late = facts.rows.request_id[excess.missing]
    return late[late.isin(book.waits.request_ids)]
