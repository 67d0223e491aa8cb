"""Why one token took so long: the time between two output tokens of a request, account by account.

The same accounts as in the ledger, from the same records, for any single gap. Everything is cut out of one chain that
runs from the request's arrival to its last token without a hole: what the device did, what the host did before and
after it, and what the request waited for in between.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.records import KINDS
from sojourn.metrics.request.offenders import Book
from sojourn.metrics.request.timeline import NOBODY
from sojourn.metrics.request.waits import Family, account_of, encoded_at

OWN_WORK = {
    "prefill": "compute.prefill",
    "recompute": "memory.recompute",
    "decode": "compute.decode",
    "verify": "compute.decode",
}
HOST, STALL = "compute.host", "compute.stall"
SLOW_SHARE = 0.2  # of a gap, by which its steps may exceed the step model before a sentence says so


@dataclass(frozen=True, slots=True)
class GapStep:
    """One step of the engine that lies in a gap. Times are ns within the gap."""

    step: int
    kind: str  # what the request computed in it; "" where it had no part
    new_tokens: int
    batch: int  # requests in the step
    others_prompt_tokens: int
    device_ns: int
    residual_ns: float | None  # device time above the prediction, of the whole step; None where there is none


@dataclass(frozen=True, slots=True)
class Gap:
    """The time before output token `token` (0 is the first): since the token before it, or since the arrival."""

    request_id: str
    token: int
    begin_ns: int
    end_ns: int
    accounts: dict[str, int]  # name → ns, in the order of the first time
    waits: dict[str, int]  # reason → ns, of what the request did not run
    steps: list[GapStep]
    offenders: list[tuple[str, int]]  # whose prompts, and ns, largest first; of the steps it shared

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns

    @property
    def residual_ns(self) -> float | None:
        """By how much the steps took longer than their composition explains; None where no step was predicted."""
        known = [step.residual_ns for step in self.steps if step.residual_ns is not None]
        return sum(known) if known else None


class _Link(NamedTuple):
    """A piece of the chain; `parts` say how it is divided among accounts."""

    begin_ns: int
    end_ns: int
    parts: dict[str, float]  # account → share
    reason: str = ""  # of a wait
    at: int = NOBODY  # of a step


def explain_gap(book: Book, request_id: str, token: int) -> Gap:
    """The time before output token `token` of a request (0: since its arrival). Raises RunDataError."""
    victim, stamps = _tokens(book, request_id)
    if not 0 <= token < len(stamps):
        raise RunDataError(f"token {token} of {request_id} is not there: it has tokens 0 to {len(stamps) - 1}")
    arrived = int(book.requests.arrived_ns.iloc[victim])
    begin, end = int(stamps[token - 1]) if token else arrived, int(stamps[token])
    return _cut(book, victim, _chain_to(book, victim, end), token, begin, end)


def slowest_gaps(book: Book, request_id: str, count: int) -> list[Gap]:
    """The longest gaps between two tokens of a request, longest first. Raises RunDataError."""
    victim, stamps = _tokens(book, request_id)
    lengths = np.diff(stamps)
    tokens = np.argsort(-lengths, kind="stable")[:count] + 1
    chain = _chain_to(book, victim, int(stamps[-1])) if len(tokens) else []
    return [_cut(book, victim, chain, int(k), int(stamps[k - 1]), int(stamps[k])) for k in tokens]


def _tokens(book: Book, request_id: str) -> tuple[int, np.ndarray]:
    """The request's place in the book, and when its tokens left the loop."""
    found = np.flatnonzero(book.waits.request_ids == request_id)
    if not len(found):
        raise RunDataError(f"the server recorded no request {request_id}")
    victim = int(found[0])
    choices = int((book.line.calls[book.line.owner] == request_id).sum())
    if choices > 1:
        raise RunDataError(
            f"{request_id} has {choices} choices whose tokens came side by side; a gap of one is not recorded"
        )
    stamps = book.requests.token_ns.iloc[victim]
    stamps = np.asarray([] if stamps is None else stamps, dtype="int64")
    if not len(stamps):
        raise RunDataError(f"{request_id} has no output token")
    return victim, stamps


def _cut(book: Book, victim: int, chain: list[_Link], token: int, begin_ns: int, end_ns: int) -> Gap:
    """The chain stands on the clock without stalls: what that clock lacks of the gap is a stall's."""
    begin, end = book.stalls.removed(np.array([begin_ns, end_ns])).tolist()
    accounts: dict[str, float] = {STALL: float(end_ns - begin_ns - (end - begin))}
    waits: dict[str, int] = {}
    steps: dict[int, int] = {}
    for link in chain:
        inside = min(link.end_ns, end) - max(link.begin_ns, begin)
        if inside <= 0:
            continue
        for name, share in link.parts.items():
            accounts[name] = accounts.get(name, 0.0) + share * inside
        if link.reason:
            waits[link.reason] = waits.get(link.reason, 0) + inside
        if link.at >= 0:
            steps[link.at] = steps.get(link.at, 0) + inside
    return Gap(
        str(book.waits.request_ids[victim]), token, begin_ns, end_ns,
        {name: round(ns) for name, ns in accounts.items() if round(ns)}, waits,
        [_step(book, victim, at, ns) for at, ns in steps.items()], _offenders(book, victim, steps),
    )  # fmt: skip


def _step(book: Book, victim: int, at: int, inside_ns: int) -> GapStep:
    line = book.line
    first, last = np.searchsorted(line.at, [at, at + 1])
    own = line.who[first:last] == book.waits.sequence[victim]
    mine = np.flatnonzero(own) + first
    stalled_ns = book.stalls.of_step(at)
    residual = float(line.device_ns[at] + stalled_ns - line.predicted_ns[at])
    return GapStep(
        step=int(line.step[at]),
        kind=KINDS[line.kind[mine[0]]] if len(mine) else "",
        new_tokens=int(line.new[mine[0]]) if len(mine) else 0,
        batch=int(last - first),
        others_prompt_tokens=int(line.new[first:last][line.is_prompt[first:last] & ~own].sum()),
        device_ns=inside_ns + stalled_ns,
        residual_ns=None if np.isnan(residual) else residual,
    )


def _offenders(book: Book, victim: int, steps: dict[int, int]) -> list[tuple[str, int]]:
    """Whose prompts were in the steps of a gap, and what they cost it."""
    caused: dict[str, float] = {}
    for at, inside in steps.items():
        first, last = np.searchsorted(book.at, [at, at + 1])
        length = max(int(book.line.device_ns[at]), 1)
        for entry in np.flatnonzero(book.inter_ns[first:last] > 0) + first:
            if book.who[entry] != book.waits.sequence[victim]:
                name = str(book.line.calls[book.line.owner[book.who[entry]]])
                caused[name] = caused.get(name, 0.0) + book.inter_ns[entry] * inside / length
    return sorted(((name, round(ns)) for name, ns in caused.items()), key=lambda pair: (-pair[1], pair[0]))


def _chain_to(book: Book, victim: int, until_ns: int) -> list[_Link]:
    return list(_chain(book, victim, int(book.stalls.removed(np.array(until_ns)))))


def _chain(book: Book, victim: int, until: int) -> Iterator[_Link]:
    """Everything between the arrival of a request and a moment, without a hole.

    The device's steps in their order; what lies before a step is the host's, but for the spans in which it waited.
    """
    line, waited = book.line, book.waits
    arrived = int(book.clocked.arrived_ns.iloc[victim])
    encoded = int(encoded_at(book.clocked.iloc[[victim]])[0])
    yield from _front(book.clocked.iloc[victim], arrived, encoded)
    part = {int(line.at[entry]): int(entry) for entry in waited.entry[waited.entry_victim == victim]}
    absent = [at for first, last in waited.absences.of(victim) for at in range(first, last)]
    pieces = [_device(book, victim, at, part.get(at)) for at in sorted({*part, *absent})]
    pieces += list(_waiting(book, victim))
    pieces.sort(key=lambda link: (link.begin_ns, link.end_ns))
    admission_left = int(book.clocked.ledger_request_admission_ns.iloc[victim] or 0)
    cursor = encoded
    for link in pieces:
        if link.begin_ns > cursor:
            # What it took to get into the loop comes first, as far as it is told
            admission = min(admission_left, link.begin_ns - cursor)
            yield _Link(cursor, cursor + admission, {"request.admission": 1.0})
            yield _Link(cursor + admission, link.begin_ns, {HOST: 1.0})
            admission_left -= admission
        if link.end_ns > cursor:
            yield link._replace(begin_ns=max(link.begin_ns, cursor))
            cursor = link.end_ns
    if cursor < until:
        yield _Link(cursor, until, {HOST: 1.0})


def _front(request: pd.Series, arrived: int, encoded: int) -> Iterator[_Link]:
    """What the front did before the core got the prompt. Older runs lack the columns of the first two accounts."""
    granted = min(encoded, arrived + _nanoseconds(request.get("ledger_request_quota_ns")))
    loaded = min(encoded, granted + _nanoseconds(request.get("ledger_request_cold_start_ns")))
    tokens_ready = min(encoded, loaded + _nanoseconds(request.ledger_token_encode_ns))
    ends = {
        "request.quota": granted, "request.cold_start": loaded, "token.encode": tokens_ready,
        "request.moderation": encoded,
    }  # fmt: skip
    cursor = arrived
    for account, end in ends.items():
        if end > cursor:
            yield _Link(cursor, end, {account: 1.0})
        cursor = end


def _nanoseconds(cell: float | None) -> int:
    return 0 if pd.isna(cell) else int(cell)


def _device(book: Book, victim: int, at: int, entry: int | None) -> _Link:
    """A step on the device: own work, others' prompts and the draw, or all of it others' where it had no part."""
    line = book.line
    begin, end = int(line.device_begin_ns[at]), int(line.device_end_ns[at])
    if entry is None:
        return _Link(begin, end, {"request.interference": 1.0}, "left out", at)
    first, last = np.searchsorted(book.at, [at, at + 1])
    others = book.who[first:last] != book.waits.sequence[victim]
    interference = float(book.inter_ns[first:last][others].sum())
    length, work = max(end - begin, 1), float(line.work_ns[at])
    parts = {
        OWN_WORK[KINDS[line.kind[entry]]]: (work - interference) / length,
        "request.interference": interference / length,
        "token.sample": (end - begin - work) / length,
    }
    return _Link(begin, end, {name: share for name, share in parts.items() if share > 0}, "", at)


def _waiting(book: Book, victim: int) -> Iterator[_Link]:
    """Its spans of waiting; one in line is cut where the reason changes."""
    line, waited = book.line, book.waits
    for span in waited.spans[waited.spans.victim == victim]:
        family, taker, begin, end = Family(span.family), int(span.taker), int(span.begin_ns), int(span.end_ns)
        if family is not Family.LINE:
            account, reason = account_of(family, "")
            if taker >= 0 and family is Family.ASIDE:
                reason = "grammar" if taker == waited.sequence[victim] else "leader"
            yield _Link(begin, end, {account: 1.0}, reason)
            continue
        low = max(int(np.searchsorted(line.planned_ns, begin, side="right")) - 1, 0)
        high = int(np.searchsorted(line.planned_ns, end, side="left"))
        edges = [begin, *(int(ns) for ns in line.planned_ns[low + 1 : high]), end]
        for step, (left, right) in enumerate(pairwise(edges), start=low):
            account, reason = account_of(family, str(line.reason[step]))
            yield _Link(left, right, {account: 1.0}, reason or "unknown")


def why(gap: Gap) -> str:
    """The gap in one sentence: what took most of it, through whom, and whether its steps were slower than expected."""
    if not gap.accounts:
        return "nothing is booked in it"
    name = max(gap.accounts, key=lambda account: gap.accounts[account])
    sentence = f"{gap.accounts[name] / max(gap.length_ns, 1):.0%} {name}"
    reason = max(gap.waits, key=lambda each: gap.waits[each], default="")
    if name == STALL:
        longest = max(gap.steps, key=lambda step: step.device_ns, default=None)
        return sentence + (f": the engine stood still in step {longest.step}" if longest is not None else "")
    if reason and reason not in name and name not in ("request.interference", HOST):
        sentence += f" ({reason})"
    prompts = sum(step.others_prompt_tokens for step in gap.steps)
    if name == "request.interference" and gap.offenders:
        more = f" and {len(gap.offenders) - 1} more" if len(gap.offenders) > 1 else ""
        sentence += f": {prompts:,} prompt tokens of {gap.offenders[0][0]}{more}"
    elif len(gap.steps) > 1:
        sentence += f" in {len(gap.steps)} steps"
    residual = gap.residual_ns
    if residual is not None and residual > SLOW_SHARE * gap.length_ns:
        sentence += f"; its steps took {residual / 1e6:.1f} ms longer than what they held explains"
    return sentence
