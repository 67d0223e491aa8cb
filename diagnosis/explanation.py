"""One request explained, as data: its ledger, its waits, the requests that caused them, its slowest tokens.

`explain_request` prints it; `sojourn explain --json`, notebooks and agents read it.
"""

from difflib import get_close_matches
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import ACCOUNT_BY_NAME, ACCOUNTS, UNACCOUNTED
from sojourn.metrics.request.blame import UNEXPLAINED, blame_of, waited_ns
from sojourn.metrics.request.offenders import Book, TooLarge, book_of, described
from sojourn.metrics.request.token_gaps import Gap, explain_gap, slowest_gaps, why
from sojourn.metrics.request.waits import reasons
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.fleet import server_run_of
from sojourn.metrics.run.join import uncertainty_sentence
from sojourn.metrics.run.server_alone import requests_of

MOST_GAPS = 5
MOST_COMPARED = 20_000  # ids that an unknown one is compared with
OTHERS_PROMPTS = "others' prompts in its steps"
NOT_SEEN = "not seen: no server records"
WAITS_BEFORE_QUEUE = (
    "request.quota", "request.cold_start", "request.remote_prefill", "memory.transfer", "memory.adapter_load",
)  # fmt: skip
NO_STEPS = "no server recorded its steps, so no other request can be blamed for its waits"
ONE_TOKEN = "it has one output token, so no gap between two"


class Blamed(msgspec.Struct, frozen=True, kw_only=True):
    """A request that delayed this one."""

    request_id: str  # "unexplained" is no request: what the steps do not explain
    delayed_ns: float
    share: float  # of all that this one waited for others, 0 to 1
    reasons_ns: dict[str, float]  # what of it was waited for → ns, largest first
    tenant: str = ""
    klass: str = ""
    prompt_tokens: int | None = None


class StepOfGap(msgspec.Struct, frozen=True, kw_only=True):
    """A step between two tokens."""

    step: int
    kind: str  # what the request computed in it; "" where it had no part
    new_tokens: int
    batch: int  # requests in the step
    others_prompt_tokens: int
    device_ns: int
    residual_ns: float | None  # device time above the prediction, of the whole step


class TokenGap(msgspec.Struct, frozen=True, kw_only=True):
    """The time before one output token: since the token before it, or since the arrival."""

    token: int  # 0 is the first
    length_ns: int
    why: str
    accounts_ns: dict[str, int]  # account → ns
    waits_ns: dict[str, int]  # reason → ns, of what the request did not run
    steps: list[StepOfGap]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one request went. What the records cannot show is in `unknown`, and never guessed."""

    schema: str = "sojourn.explanation/1"
    run: str
    request_id: str
    status: str | None = None  # of the client's record: ok, error, timeout, cancelled, missing
    error: str | None = None
    tenant: str = ""
    klass: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None  # from the intended send
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    ledger_ns: dict[str, float]  # account → ns up to the last byte; only accounts that have time
    ttft_ledger_ns: dict[str, float]  # account → ns up to the first text
    waits_ns: dict[str, float]  # reason → ns, largest first
    offenders: list[Blamed]  # largest first
    slowest_tokens: list[TokenGap]  # or the one that was asked for
    unknown: list[str]  # sentences: what cannot be said of this request, and why
    evidence: list[str]  # tables and columns that this rests on


def explanation_of(run: RunDirectory, request_id: str, token: int | None = None) -> Explanation:
    """`token`: that gap alone instead of the slowest ones. Raises RunDataError, with the ids that are nearest."""
    name, run = run.name, server_run_of(run, request_id)  # of a fleet: its own server has its steps
    requests, served = requests_of(run, run.meta()), run.table("requests")
    known, alone = (table[table.request_id == request_id] for table in (requests, served))
    if known.empty and alone.empty:
        raise RunDataError(_unknown_id(request_id, pd.concat([requests.request_id, served.request_id])))
    unknown: list[str] = []
    try:
        book = book_of(run)
    except TooLarge as error:
        book = None
        unknown.append(str(error))
    seen = book is not None and bool((book.waits.request_ids == request_id).any())
    if token is not None and not seen:
        raise RunDataError(f"no server recorded the steps of {request_id}, so its tokens cannot be explained")
    row = (known if len(known) else alone).iloc[-1]
    evidence = ["client.parquet: due_ns, sent_ns, first_token_ns, last_byte_ns"] if len(known) else []
    if len(alone):
        evidence.append("requests.parquet: ledger_*_ns, ttft_*_ns, waits")
    waits: dict[str, float] = {}
    offenders: list[Blamed] = []
    gaps: list[TokenGap] = []
    if not seen:
        unknown.append(NO_STEPS)
    else:
        evidence.append("steps.parquet: request_ids, new_tokens, kinds, device_ns, predicted_ns, refusals")
        waits, offenders = _waits(alone.iloc[-1], book), _offenders(book, request_id)
        gaps = _gaps(book, request_id, token, unknown)
    if note := uncertainty_sentence(run.meta()):
        unknown.append(note)
    return Explanation(
        run=name, request_id=request_id, status=_text(row.get("status")) or None, error=_text(row.get("error")) or None,
        tenant=_text(row.get("tenant")), klass=_text(row.get("klass")),
        prompt_tokens=_count(row, "prompt_tokens"), output_tokens=_count(row, "output_tokens"),
        cached_tokens=_count(row, "cached_tokens"), ttft_ms=_number(row.get("ttft_ms")),
        tpot_ms=_number(row.get("tpot_ms")), e2e_ms=_number(row.get("e2e_ms")), ledger_ns=ledger_of(row),
        ttft_ledger_ns=ledger_of(row, "ttft"), waits_ns=waits, offenders=offenders, slowest_tokens=gaps,
        unknown=unknown, evidence=evidence,
    )  # fmt: skip


def ledger_of(row: pd.Series, prefix: str = "ledger") -> dict[str, float]:
    """The accounts of a request that hold a microsecond or more, and what none explains. Nanoseconds."""
    booked = {info.name: row.get(f"{prefix}_{info.column}", float("nan")) for info in ACCOUNTS}
    rest, latency = ("unaccounted_ns", "e2e_ms") if prefix == "ledger" else ("ttft_unaccounted_ns", "ttft_ms")
    booked[UNACCOUNTED] = row.get(rest, float("nan"))
    accounts = {name: float(ns) for name, ns in booked.items() if pd.notna(ns) and abs(ns) >= 1000}
    if pd.isna(booked[UNACCOUNTED]) and pd.notna(row.get(latency)):  # the client's records alone
        accounts[NOT_SEEN] = row[latency] * 1e6 - sum(accounts.values())
    return accounts


def _unknown_id(request_id: str, ids: pd.Series) -> str:
    """A sentence with the ids that end alike: the app shows the ends of long ids."""
    ids = ids.drop_duplicates()
    ending = request_id.lstrip("…")
    alike = ids[ids.str.endswith(ending)] if ending else ids[:0]
    if len(alike):
        return f"the run has no request {request_id}; do you mean {', '.join(alike.head(3))}?"
    if near := get_close_matches(request_id, ids.head(MOST_COMPARED).tolist(), n=3, cutoff=0.7):
        return f"the run has no request {request_id}; do you mean {', '.join(near)}?"
    others = ", ".join(ids.head(3))
    return f"the run has no request {request_id}{f'; it has, among others, {others}' if others else ''}"


def _waits(row: pd.Series, book: Book) -> dict[str, float]:
    """By reason, as the scheduler booked it, or by account, where an older run has no reasons; and what it waited for
    before the scheduler had it. Of 1 µs or more."""
    by_account = waited_ns(book).loc[row.request_id].to_dict()
    interference = float(by_account.pop("request.interference"))
    before = {name: row.get(f"ledger_{ACCOUNT_BY_NAME[name].column}") for name in WAITS_BEFORE_QUEUE}
    known = {name: ns for name, ns in before.items() if pd.notna(ns)}  # an older run lacks some accounts
    booked = {**(reasons(row.get("waits")) or by_account), **known, OTHERS_PROMPTS: interference}
    return {name: float(ns) for name, ns in sorted(booked.items(), key=lambda item: -item[1]) if ns >= 1000}


def _offenders(book: Book, request_id: str) -> list[Blamed]:
    blamed = blame_of(book, request_id)
    facts = described(book.requests)
    total = float(waited_ns(book).loc[request_id].sum()) or 1.0
    by_offender = blamed.groupby("offender", sort=False)
    order = by_offender.ns.sum().sort_values(ascending=False, kind="stable")
    found = []
    for name, ns in order.items():
        known = name in facts.index
        tokens = facts.prompt_tokens[name] if known else np.nan
        found.append(Blamed(
            request_id=name, delayed_ns=float(ns), share=float(ns) / total,
            reasons_ns={part.reason: float(part.ns) for part in by_offender.get_group(name).itertuples()},
            tenant=facts.loc[name, "tenant"] if known else "", klass=facts.loc[name, "klass"] if known else "",
            prompt_tokens=int(tokens) if np.isfinite(tokens) else None,
        ))  # fmt: skip
    left = total - float(order.sum())
    if abs(left) >= 1000:
        found.append(Blamed(request_id=UNEXPLAINED, delayed_ns=left, share=left / total, reasons_ns={}))
    return found


def _gaps(book: Book, request_id: str, token: int | None, unknown: list[str]) -> list[TokenGap]:
    if token is not None:
        return [_gap(explain_gap(book, request_id, token))]
    try:
        found = slowest_gaps(book, request_id, MOST_GAPS)
    except RunDataError as error:
        unknown.append(str(error))
        return []
    if not found:
        unknown.append(ONE_TOKEN)
    return [_gap(gap) for gap in found]


def _gap(gap: Gap) -> TokenGap:
    steps = [
        StepOfGap(
            step=int(step.step), kind=step.kind, new_tokens=int(step.new_tokens), batch=int(step.batch),
            others_prompt_tokens=int(step.others_prompt_tokens), device_ns=int(step.device_ns),
            residual_ns=None if step.residual_ns is None else float(step.residual_ns),
        )
        for step in gap.steps
    ]  # fmt: skip
    return TokenGap(
        token=gap.token, length_ns=int(gap.length_ns), why=why(gap), steps=steps,
        accounts_ns={name: int(ns) for name, ns in gap.accounts.items()},
        waits_ns={name: int(ns) for name, ns in gap.waits.items()},
    )  # fmt: skip


def _count(row: pd.Series, name: str) -> int | None:
    """The server's count of a token column, else the client's."""
    value = row.get(f"server_{name}")
    value = row.get(name) if pd.isna(value) else value
    return None if pd.isna(value) else int(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""  # NaN where an older run lacks the column


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)
