"""Whose fault the waiting was: a matrix of victims and offenders whose rows sum to the waits in the ledger.

A nanosecond of waiting goes to those who had what the victim waited for:

- in a step with others' prompt work (`request.interference`): by the FLOPs of their prompts, as the engine books it;
- absent from a step, or come while one was computed: by everybody's FLOPs in it;
- in line for a place in the batch: to all who held one, alike; for the token budget: by the tokens they computed; for
  KV blocks (`memory.blocked`), and preempted once its taker is gone: by the blocks that they held;
- held aside: to the prompts under way (for a long one), to the first choice of the same call, or to the request's own
  grammar;
- preempted (`memory.preempted`): to the one whose need took its blocks, as long as that one runs.

What the steps do not explain is a column of its own, UNEXPLAINED, and never spread over the others. Nothing here loops
over requests or steps: what a group of offenders did is summed up along the steps, and a wait is the difference of two
such sums.

A step in which the engine stood still (`stalls`) is charged to nobody: all this is told on a clock without it.

What this cannot tell: what would have happened without an offender. Another one may have taken the place. And steps
that all took longer than their work explains (`device_ns` against `predicted_ns`: a device that slowed down, other work
on its host) are charged to those in them: look at the residuals before anybody is blamed.
"""

from collections.abc import Collection, Iterator
from itertools import pairwise

import numpy as np
import pandas as pd

from sojourn.metrics.request.offenders import WAIT_ACCOUNTS, Book, described, places, slices
from sojourn.metrics.request.waits import Family, StepRanges, account_of

UNEXPLAINED = "unexplained"
OTHERS = "all others"
UNKNOWN = "not recorded"  # offenders without a request record: still running when the run ended
MOST_GROUPS = 20  # of a matrix that people read; its cost grows with requests × groups, and tenants may be thousands


def matrix(book: Book, group_of: pd.Series) -> pd.DataFrame:
    """Rows: request ids. Columns: groups of offenders, and UNEXPLAINED. Nanoseconds; a row sums to its waits.

    `group_of` maps the ids of offending requests to their group; what has none goes to UNKNOWN. The column of a
    victim's own group counts the others in it, and the other choices of its own call.
    """
    group_of = group_of[~group_of.index.duplicated()]
    named = group_of.reindex(book.line.calls).fillna(UNKNOWN).astype(object)
    codes, names = pd.factorize(named.to_numpy())
    group = codes[book.line.owner]
    explained = np.zeros((len(book.requests), len(names)))
    for column, suffered in enumerate(_suffered(book, group, len(names))):
        explained[:, column] = suffered
    spans = book.waits.spans[book.waits.spans.taker >= 0]
    np.add.at(explained, (spans.victim, group[spans.taker]), (spans.end_ns - spans.begin_ns).astype("float64"))
    ran = np.flatnonzero(book.waits.sequence >= 0)
    np.add.at(explained, (ran, group[book.waits.sequence[ran]]), -book.own_ns[ran])
    table = pd.DataFrame(explained, index=pd.Index(book.waits.request_ids, name="request_id"), columns=list(names))
    return table.assign(**{UNEXPLAINED: book.booked_ns.sum(axis=1) - explained.sum(axis=1)})


def waited_ns(book: Book) -> pd.DataFrame:
    """What the ledger says that each request waited, by account: what the rows of a matrix sum to."""
    ids = pd.Index(book.waits.request_ids, name="request_id")
    return pd.DataFrame(book.booked_ns, index=ids, columns=list(WAIT_ACCOUNTS))


def offenders(book: Book) -> pd.DataFrame:
    """By how much each request delayed all others together: `request_id, caused_ns, tenant, klass, prompt_tokens`,
    worst first. Only those that delayed somebody."""
    caused = np.bincount(book.line.owner, weights=_caused(book), minlength=len(book.line.calls))
    facts = described(book.requests).reindex(pd.Index(book.line.calls, name="request_id"))
    table = facts.assign(caused_ns=caused).reset_index()
    table = table[table.caused_ns > 0].sort_values(["caused_ns", "request_id"], ascending=[False, True])
    return table[["request_id", "caused_ns", "tenant", "klass", "prompt_tokens"]].reset_index(drop=True)


def between(book: Book, trait: str, victims: Collection[str] | None = None) -> pd.DataFrame:
    """Who delayed whom, by `tenant`, `klass` or `band` of the prompt: rows of victims, columns of offenders, ns.
    `victims`: the requests whose waits count; all by default.

    Where there are more than MOST_GROUPS, those that waited and delayed others least are OTHERS."""
    trait_of = largest_groups(book, described(book.requests)[trait])
    rows = matrix(book, trait_of)
    if victims is not None:
        rows = rows[rows.index.isin(victims)]
    return rows.groupby(trait_of.reindex(rows.index).to_numpy()).sum()


def largest_groups(book: Book, group_of: pd.Series) -> pd.Series:
    """The groups of requests by their id: OTHERS for all but the MOST_GROUPS that waited and delayed others most."""
    if group_of.nunique() <= MOST_GROUPS:
        return group_of
    caused = offenders(book).set_index("request_id").caused_ns
    weight = waited_ns(book).sum(axis=1).add(caused, fill_value=0.0).reindex(group_of.index).fillna(0.0)
    largest = weight.groupby(group_of).sum().sort_values(ascending=False, kind="stable").index[:MOST_GROUPS]
    return group_of.where(group_of.isin(largest), OTHERS)


def worst(book: Book, count: int) -> pd.DataFrame:
    """The matrix with a column for each of the `count` worst offenders, OTHERS and UNEXPLAINED."""
    top = offenders(book).request_id.head(count).tolist()
    group_of = pd.Series(OTHERS, index=pd.Index(book.line.calls).union(top), dtype=object)
    group_of[top] = top
    table = matrix(book, group_of)
    return table.assign(**{OTHERS: table.get(OTHERS, 0.0)})[[*top, OTHERS, UNEXPLAINED]]


def gini(caused: np.ndarray) -> float:
    """How unevenly delay is caused: 0 where all cause alike, near 1 where one causes all. NaN without any delay."""
    values = np.sort(np.asarray(caused, dtype="float64"))
    total = values.sum()
    if total <= 0:
        return float("nan")
    ranks = np.arange(1, len(values) + 1)
    return float((2 * ranks - len(values) - 1) @ values / (len(values) * total))


def blame_of(book: Book, request_id: str) -> pd.DataFrame:
    """One request's waits in full: `account, reason, offender, ns`, largest first.

    Raises KeyError for a request that is not in the book.
    """
    found = np.flatnonzero(book.waits.request_ids == request_id)
    if not len(found):
        raise KeyError(request_id)
    parts = [*_blamed_spans(book, int(found[0])), *_blamed_steps(book, int(found[0]))]
    table = pd.DataFrame(parts, columns=["account", "reason", "sequence", "ns"])
    names = book.line.calls[book.line.owner[table.sequence.to_numpy(dtype="int64")]] if len(table) else []
    table = table.assign(offender=names).groupby(["account", "reason", "offender"], as_index=False, sort=False).ns.sum()
    table = table[table.ns > 0].sort_values("ns", ascending=False, kind="stable", ignore_index=True)
    return table[["account", "reason", "offender", "ns"]]


def _suffered(book: Book, group: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """What each group did to each victim, [R] nanoseconds, the victim's own prompts included."""
    size, rows = len(book.line), len(book.requests)
    spans = {family: places(book, family) for family in Family}

    def summed(rate: np.ndarray, ranges: StepRanges) -> np.ndarray:
        """[R] what a rate [N] adds up to over the steps of each victim."""
        upto = np.append(0.0, np.cumsum(rate))
        return np.bincount(ranges.victim, upto[ranges.last] - upto[ranges.first], rows).astype(float)  # int of nobody

    group_of_entry = group[book.who]
    order = np.argsort(group_of_entry, kind="stable")
    bounds = np.searchsorted(group_of_entry[order], np.arange(count + 1))
    for first, last in pairwise(bounds):
        mine = order[first:last]
        at = book.at[mine]
        share = {family: np.bincount(at, weights[mine], size) for family, weights in book.share.items()}
        result = summed(np.bincount(at, book.inter_ns[mine], size), book.waits.runs)
        result += summed(share[Family.UNDER_WAY] * book.line.device_ns, book.waits.absences)
        for family, span in spans.items():
            result += np.bincount(span.victim, span.integral(share[family]), rows)
        yield result


def _caused(book: Book) -> np.ndarray:
    """[S] ns by which each sequence delayed all others: the sums of the whole matrix's columns, without the matrix."""
    line, waited, size = book.line, book.waits, len(book.line)
    members = np.bincount(line.at[waited.entry], minlength=size)
    left, back = (np.bincount(steps, minlength=size + 1) for steps in (waited.absences.first, waited.absences.last))
    absent = np.cumsum(left - back)[:-1]
    by_entry = book.inter_ns * members[book.at]
    by_entry += book.share[Family.UNDER_WAY] * (absent * line.device_ns)[book.at]
    for family in Family:
        by_entry += book.share[family] * places(book, family).covered_ns()[book.at]
    caused = np.bincount(book.who, weights=by_entry, minlength=len(line.sequences))
    ran = waited.sequence >= 0
    np.add.at(caused, waited.sequence[ran], -book.own_ns[ran])
    spans = waited.spans[waited.spans.taker >= 0]
    np.add.at(caused, spans.taker, (spans.end_ns - spans.begin_ns).astype("float64"))
    return caused


def _blamed_spans(book: Book, victim: int) -> Iterator[tuple[str, str, int, float]]:
    waited = book.waits
    for span in waited.spans[waited.spans.victim == victim]:
        family, taker, begin_ns, end_ns = Family(span.family), int(span.taker), span.begin_ns, span.end_ns
        if taker >= 0:
            alone = ("request.queue", "grammar" if taker == waited.sequence[victim] else "leader")
            account, reason = account_of(family, "") if family is Family.PREEMPTED else alone
            yield account, reason, taker, float(end_ns - begin_ns)
            continue
        begins, length = slices(book.line, family)
        low = max(int(np.searchsorted(begins, begin_ns, side="right")) - 1, 0)
        high = int(np.searchsorted(begins, end_ns, side="left"))
        first, last = np.searchsorted(book.at, [low, high])
        shared = np.flatnonzero(book.share[family][first:last] > 0) + first
        at = book.at[shared]
        inside = np.minimum(begins[at] + length[at], end_ns) - np.maximum(begins[at], begin_ns)
        for entry, step, ns in zip(shared, at, np.clip(inside, 0, None), strict=True):
            blamed = book.share[family][entry] * ns
            yield *account_of(family, str(book.line.reason[step])), int(book.who[entry]), float(blamed)


def _blamed_steps(book: Book, victim: int) -> Iterator[tuple[str, str, int, float]]:
    own = book.waits.sequence[victim]
    for steps in book.waits.runs.of(victim):
        first, last = np.searchsorted(book.at, steps)
        costly = (book.inter_ns[first:last] > 0) & (book.who[first:last] != own)
        for entry in np.flatnonzero(costly) + first:
            yield "request.interference", "prompt", int(book.who[entry]), float(book.inter_ns[entry])
    device_ns, share = book.line.device_ns, book.share[Family.UNDER_WAY]
    for steps in book.waits.absences.of(victim):
        first, last = np.searchsorted(book.at, steps)
        for entry in np.flatnonzero(share[first:last] > 0) + first:
            ns = share[entry] * device_ns[book.at[entry]]
            yield "request.interference", "left out", int(book.who[entry]), float(ns)
