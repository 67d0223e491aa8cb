"""One request explained on the terminal: its ledger, its waits, the requests that caused them, slow tokens."""

from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from metrics.diagnosis.terminal.time_spent import UNACCOUNTED_COLOUR, bar, ruled_table, section
from metrics.errors import RunDataError
from metrics.ledger import ACCOUNTS, COLOURS, UNACCOUNTED
from metrics.request.blame import UNEXPLAINED, blame_of, waited_ns
from metrics.request.offenders import Book, book_of, described
from metrics.request.token_gaps import Gap, explain_gap, slowest_gaps, why
from metrics.request.waits import reasons
from metrics.run.directory import RunDirectory
from metrics.run.fleet import server_run_of
from metrics.run.join import uncertainty_sentence

MOST_OFFENDERS = 8
MOST_GAPS = 5
MOST_STEPS = 12
TRAITS = {"tenant": "tenant", "klass": "class"}  # of a request, with their headings


def explain(run: RunDirectory, request_id: str, token: int | None = None) -> RenderableType:
    """What `sojourn explain` prints. `token`: that gap in full instead of the slowest ones. Raises RunDataError."""
    run = server_run_of(run, request_id)  # of a fleet: its own server has its steps
    requests, served = run.requests(), run.table("requests")
    known, alone = (table[table.request_id == request_id] for table in (requests, served))
    if known.empty and alone.empty:
        others = ", ".join(pd.concat([requests.request_id, served.request_id]).drop_duplicates().head(3))
        known_ids = f"; it has, among others, {others}" if others else ""
        raise RunDataError(f"the run has no request {request_id}{known_ids}")
    book = book_of(run)
    seen = book is not None and (book.waits.request_ids == request_id).any()
    if token is not None and not seen:
        raise RunDataError(f"no server recorded the steps of {request_id}, so its tokens cannot be explained")
    if token is not None:
        return _one_gap(explain_gap(book, request_id, token))
    row = (known if len(known) else alone).iloc[-1]
    parts = [_head(row, request_id), _ledger(row, run.meta())]
    if not seen:
        return Group(*parts, _remark("no server recorded its steps, so no other request can be blamed for its waits"))
    parts += [section("What it waited for"), _waits(alone.iloc[-1], book)]
    parts += [section("Requests that delayed it"), _offenders(book, request_id), section("Its slowest tokens")]
    try:
        gaps = slowest_gaps(book, request_id, MOST_GAPS)
    except RunDataError as error:
        return Group(*parts, _remark(str(error)))
    if not gaps:
        return Group(*parts, _remark("it has one output token, so no gap between two"))
    table = ruled_table(("token", "right"), ("ms before it", "right"), ("why", "left"))
    for gap in gaps:
        table.add_row(f"{gap.token:,}", _ms(gap.length_ns), Text(why(gap)))
    return Group(*parts, table)


def _remark(sentence: str) -> RenderableType:
    return Padding(Text(f"{sentence[0].upper()}{sentence[1:]}.", style="dim"), (1, 0, 0, 0))


def _head(row: pd.Series, request_id: str) -> RenderableType:
    traits = [row.get(name) for name in ("tenant", "klass")]  # NaN where an older run lacks the column
    facts = [f"request {request_id}", *(trait for trait in traits if pd.notna(trait) and trait)]
    for name, column in (("prompt tokens", "server_prompt_tokens"), ("output tokens", "output_tokens")):
        value = row.get(column, row.get(column.removeprefix("server_")))
        facts += [f"{value:,.0f} {name}"] if pd.notna(value) else []
    facts += [f"{row.e2e_ms:,.1f} ms from the intended send"] if pd.notna(row.get("e2e_ms")) else []
    return Text(" · ".join(facts), style="bold")


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.2f}" if abs(ns) < 1e8 else f"{ns / 1e6:,.0f}"


def _accounts(accounts: dict[str, float]) -> RenderableType:
    table = ruled_table(("account", "left"), ("ms", "right"), ("share", "right"), ("", "left"))
    total = sum(accounts.values()) or 1.0
    for name, ns in accounts.items():
        colour = COLOURS.get(name.split(".")[0], UNACCOUNTED_COLOUR)
        table.add_row(Text(name, style=colour), _ms(ns), f"{ns / total:.1%}", bar(ns / total, colour))
    return table


def _ledger(row: pd.Series, meta: dict[str, Any]) -> RenderableType:
    booked = {info.name: row[f"ledger_{info.column}"] for info in ACCOUNTS}
    booked[UNACCOUNTED] = row.get("unaccounted_ns", float("nan"))
    accounts = {name: float(ns) for name, ns in booked.items() if pd.notna(ns) and abs(ns) >= 1000}
    if pd.isna(booked[UNACCOUNTED]) and pd.notna(row.get("e2e_ms")):  # the client's records alone
        accounts["not seen: no server records"] = row.e2e_ms * 1e6 - sum(accounts.values())
    note = uncertainty_sentence(meta)
    warning = [Text(f"! {note}", style="yellow")] if note else []
    return Group(section("Where its time went"), _accounts(accounts), *warning)


def _waits(row: pd.Series, book: Book) -> RenderableType:
    """By reason, as the scheduler booked it; by account, where an older run has no reasons."""
    by_account = waited_ns(book).loc[row.request_id].to_dict()
    interference = float(by_account.pop("request.interference"))
    booked = reasons(row.get("waits")) or by_account
    table = _reasons({**booked, "others' prompts in its steps": interference}, smallest_ns=1000)
    return table if table.row_count else Text("It waited for nobody.", style="dim")


def _reasons(waits: dict[str, float], smallest_ns: float = 0) -> Table:
    table = ruled_table(("reason", "left"), ("ms", "right"))
    for reason, ns in sorted(waits.items(), key=lambda item: -item[1]):
        if ns >= smallest_ns:
            table.add_row(Text(reason), _ms(ns))
    return table


def _offenders(book: Book, request_id: str) -> RenderableType:
    blamed = blame_of(book, request_id)
    facts = described(book.requests)
    traits = [name for name in ("tenant", "klass") if (facts[name] != "").any()]
    headings = [("request", "left"), *((TRAITS[name], "left") for name in traits), ("prompt tokens", "right")]
    table = ruled_table(*headings, ("ms", "right"), ("share", "right"), ("how", "left"))
    table.columns[0].no_wrap = True  # an id is copied
    total = float(waited_ns(book).loc[request_id].sum()) or 1.0
    by_offender = blamed.groupby("offender", sort=False)
    order = by_offender.ns.sum().sort_values(ascending=False, kind="stable")
    for name in order.index[:MOST_OFFENDERS]:
        parts = by_offender.get_group(name)
        how = ", ".join(f"{row.reason} {_ms(row.ns)} ms" for row in parts.head(3).itertuples())
        known = name in facts.index
        tokens = facts.prompt_tokens[name] if known else np.nan
        named = [Text(facts.loc[name, trait] if known else "") for trait in traits]
        length = f"{tokens:,.0f}" if np.isfinite(tokens) else "–"
        who = Text("its own call" if name == request_id else name)
        share = f"{order[name] / total:.1%}"
        table.add_row(who, *named, length, _ms(order[name]), share, Text(how))
    blank = [""] * (len(traits) + 1)
    rest = order.iloc[MOST_OFFENDERS:]
    if len(rest):
        others = Text(f"{len(rest)} others", style="dim")
        table.add_row(others, *blank, _ms(rest.sum()), f"{rest.sum() / total:.1%}", "")
    left = total - float(order.sum())
    if abs(left) >= 1000:
        table.add_row(Text(UNEXPLAINED, style="dim"), *blank, _ms(left), f"{left / total:.1%}", "")
    return table if table.row_count else Text("Nobody delayed it.", style="dim")


def _one_gap(gap: Gap) -> RenderableType:
    since = "its arrival" if gap.token == 0 else f"token {gap.token - 1:,}"
    parts: list[RenderableType] = [
        Text(f"{gap.request_id}: {_ms(gap.length_ns)} ms between {since} and token {gap.token:,}", style="bold"),
        Text(f"{why(gap)}."), Text(""), _accounts({name: float(ns) for name, ns in gap.accounts.items()}),
    ]  # fmt: skip
    if gap.waits:
        parts += [section("What it waited for"), _reasons(gap.waits)]
    if gap.steps:
        parts += [section("Its steps"), _steps(gap)]
    return Group(*parts)


def _steps(gap: Gap) -> RenderableType:
    headings = (("step", "right"), ("it computed", "left"), ("requests", "right"), ("others' prompt tokens", "right"))
    table = ruled_table(*headings, ("device ms", "right"), ("above expected", "right"))
    shown = sorted(gap.steps, key=lambda step: -step.device_ns)[:MOST_STEPS]
    for step in sorted(shown, key=lambda step: step.step):
        own = f"{step.kind}, {step.new_tokens:,} tokens" if step.kind else "nothing"
        above = "–" if step.residual_ns is None else _ms(step.residual_ns)
        table.add_row(f"{step.step:,}", Text(own), f"{step.batch:,}", f"{step.others_prompt_tokens:,}",
                      _ms(step.device_ns), above)  # fmt: skip
    if len(gap.steps) > len(shown):
        table.add_row("", Text(f"and {len(gap.steps) - len(shown):,} shorter ones", style="dim"), "", "", "", "")
    return table
