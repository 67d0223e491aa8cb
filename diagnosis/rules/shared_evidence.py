"""Evidence that several causes give: excess, load, residual, and the requests that caused the waiting."""

from dataclasses import dataclass

import pandas as pd

from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.request.blame import largest_groups, matrix, offenders, waited_ns
from sojourn.metrics.request.offenders import Book, described

# Device time above what the composition of the steps explains. The step model is good to about 10 %, a shared machine
# jitters as much again; a third more over a quarter of the run is neither.
SLOW_DEVICE = 1.3
NAMED_ONE_HALF = 0.5  # of the late requests: a group of which most late ones are delays itself
MOST_IDS = 50  # of offenders that a finding links to
NAMED = 0.3  # of the waiting: a group that caused less is one among several
SPARED = 0.01  # of the excess, time that other accounts save: above it, the excess is not the whole difference
LONGER = {
    "ttft_ms": ("wait", "for the first token"),
    "tpot_ms": ("take", "per output token"),
    "e2e_ms": ("take", "from end to end"),
}


def excess_evidence(excess: Excess | None, accounts: tuple[str, ...]) -> list[Evidence]:
    """The share of the excess that these accounts explain, and against it the largest account that they leave out."""
    if excess is None or not excess.total_ms:
        return []
    source = f"requests: {'ttft' if excess.objective == 'ttft_ms' else 'ledger'}_*_ns"
    share = excess.share(*accounts)
    named = " + ".join(name for name, part in excess.ranked() if name in accounts and part >= 0.01)
    explained = f"{share:.0%} of that is {named} ({_ms(share * excess.total_ms)})"
    found = [evidence(f"{_longer(excess)}; {explained}", share, "share", source)] if named else []
    rest = [(name, part) for name, part in excess.ranked() if name not in accounts]
    if rest and rest[0][1] >= 0.1:
        name, part = rest[0]
        against = f"{part:.0%} of it is {name}, which this cause does not explain"
        found.append(evidence(against, part, "share", source, supports=False))
    return found


def _longer(excess: Excess) -> str:
    """How much longer late requests take: "late requests of chat wait 900 ms longer for the first token than …"."""
    late = f"late requests of {excess.klass}" if excess.klass else "late requests"
    verb, what = LONGER[excess.objective]
    longer = f"{late} {verb} {_ms(excess.total_ms)} longer {what} than {excess.baseline}"
    spared = excess.total_ms - sum(excess.accounts.values())
    return longer + (", counting the accounts that grew" if spared > SPARED * excess.total_ms else "")


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:,.1f} ms"


def missing_share(excess: Excess | None) -> str:
    """The late or lost requests, for a prediction: "the share of chat above 400 ms (94%)"."""
    if excess is None:
        return "what is measured now"
    missed = "that is not served" if excess.objective == SERVED else f"above {excess.bound_ms:,.0f} ms"
    return f"the share of {excess.klass or 'requests'} {missed} ({excess.missed / excess.sent:.0%})"


def load_evidence(statement: str, load: float, *, supports: bool = True, weight: float = 1.0) -> Evidence:
    source = "steps: fit of wall time; client: due_ns"
    return evidence(statement, load, "ratio", source, supports=supports, weight=weight)


def residual_evidence(facts: Facts) -> list[Evidence]:
    """Whether the device takes longer than its steps explain: evidence for every cause that is not the device.

    Against the normal speed of this model and device where that is known; else against the rest of the run, which shows
    a slow part and never a slow whole.
    """
    speed = facts.speed()
    if speed is not None and speed.source == "reference":
        slowdown, weight = speed.device.slowdown, 3.0
        statement, source = "they take at normal speed", "steps: device_ns; run.json: speed reference"
    elif facts.steps is not None and facts.steps.slowdown is not None:
        slowdown, weight = facts.steps.slowdown, 1.0
        statement, source = "their composition explains", "steps: device_ns, predicted_ns"
    else:
        return []
    at_fault = slowdown >= SLOW_DEVICE
    statement = f"steps take {slowdown:.2f} times what {statement}: the device "
    statement += f"{'may be' if at_fault else 'is not'} at fault"
    return [evidence(statement, slowdown, "ratio", source, supports=not at_fault, weight=weight if at_fault else 1.0)]


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


def blamed_on(facts: Facts, excess: Excess, trait: str) -> list[Blamed]:
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
    late = _late_ids(facts, excess, book)
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


def blamed_group(facts: Facts, excess: Excess | None) -> list[Evidence]:
    """The group of requests (one tenant, one class, one band of prompt lengths) that late requests waited for most.

    [] where no group caused much of their waiting, or where all requests are of one group.
    """
    book = facts.book()
    if book is None or excess is None:
        return []
    facts_of = described(book.requests)
    group_of = facts_of[["tenant", "klass", "band"]].apply(tuple, axis=1)
    late = _late_ids(facts, excess, book)
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


def long_prompt_share(facts: Facts, excess: Excess, longer_than: float) -> tuple[float, pd.DataFrame]:
    """The share of the late requests' delay by others that prompts of at least so many tokens caused, and the requests
    with such prompts, as a table of `offenders`."""
    book = facts.book()
    if book is None:
        return 0.0, pd.DataFrame()
    tokens = described(book.requests).prompt_tokens
    late = _late_ids(facts, excess, book)
    caused = matrix(book, (tokens >= longer_than).map({True: "long", False: "other"})).loc[late].sum()
    total = float(caused.clip(lower=0).sum())
    table = offenders(book)
    return float(caused.get("long", 0.0)) / total if total > 0 else 0.0, table[table.prompt_tokens >= longer_than]


def _late_ids(facts: Facts, excess: Excess, book: Book) -> pd.Series:
    late = facts.rows.request_id[excess.missing]
    return late[late.isin(book.waits.request_ids)]
