"""One request explained on the terminal: its ledger, its waits, the requests that caused them, slow tokens."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sojourn.diagnosis.explanation import NO_STEPS, Blamed, Explanation, TokenGap, explanation_of
from sojourn.diagnosis.terminal.time_spent import UNACCOUNTED_COLOUR, bar, ruled_table, section
from sojourn.metrics.ledger import COLOURS
from sojourn.metrics.request.blame import UNEXPLAINED
from sojourn.metrics.run.directory import RunDirectory

MOST_OFFENDERS = 8
MOST_STEPS = 12
TRAITS = {"tenant": "tenant", "klass": "class"}  # of a request, with their headings


def explain(run: RunDirectory, request_id: str, token: int | None = None) -> RenderableType:
    """What `sojourn explain` prints. `token`: that gap in full instead of the slowest ones. Raises RunDataError."""
    return render(explanation_of(run, request_id, token), alone=token is not None)


def render(found: Explanation, alone: bool = False) -> RenderableType:
    """`alone`: its only token in full."""
    if alone:
        return _one_gap(found.slowest_tokens[0], found.request_id)
    parts = [_head(found), section("Where its time went"), _accounts(found.ledger_ns, found.ttft_ledger_ns)]
    seen = NO_STEPS not in found.unknown
    if seen:
        parts += [section("What it waited for"), _waits(found.waits_ns)]
        parts += [section("Requests that delayed it"), _offenders(found)]
    if found.slowest_tokens:
        table = ruled_table(("token", "right"), ("ms before it", "right"), ("why", "left"))
        for gap in found.slowest_tokens:
            table.add_row(f"{gap.token:,}", _ms(gap.length_ns), Text(gap.why))
        parts += [section("Its slowest tokens"), table]
    return Group(*parts, *map(_remark, found.unknown))


def _remark(sentence: str) -> RenderableType:
    return Padding(Text(f"{sentence[0].upper()}{sentence[1:]}.", style="dim"), (1, 0, 0, 0))


def _head(found: Explanation) -> RenderableType:
    facts = [f"request {found.request_id}", *(trait for trait in (found.tenant, found.klass) if trait)]
    for name, value in (("prompt tokens", found.prompt_tokens), ("output tokens", found.output_tokens)):
        facts += [f"{value:,.0f} {name}"] if value is not None else []
    facts += [f"first token after {found.ttft_ms:,.1f} ms"] if found.ttft_ms is not None else []
    facts += [f"{found.e2e_ms:,.1f} ms from the intended send"] if found.e2e_ms is not None else []
    return Text(" · ".join(facts), style="bold")


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.2f}" if abs(ns) < 1e8 else f"{ns / 1e6:,.0f}"


def _accounts(accounts: dict[str, float], first: dict[str, float] | None = None) -> RenderableType:
    """`first`: the same up to the first text. A token that waits to be written does so beside the steps that make the
    others: its wait is in `first`, and not in the time up to the last byte."""
    named = (("to first token", "right"),) if first else ()
    table = ruled_table(("account", "left"), ("ms", "right"), ("share", "right"), ("", "left"), *named)
    total = sum(accounts.values()) or 1.0
    for name in dict.fromkeys([*accounts, *(first or ())]):
        colour, ns = COLOURS.get(name.split(".")[0], UNACCOUNTED_COLOUR), accounts.get(name, 0.0)
        more = [_ms(first.get(name, 0.0))] if first else []
        table.add_row(Text(name, style=colour), _ms(ns), f"{ns / total:.1%}", bar(ns / total, colour), *more)
    return table


def _waits(waits: dict[str, float]) -> RenderableType:
    return _reasons(waits) if waits else Text("It waited for nobody.", style="dim")


def _reasons(waits: dict[str, float]) -> Table:
    table = ruled_table(("reason", "left"), ("ms", "right"))
    for reason, ns in sorted(waits.items(), key=lambda item: -item[1]):
        table.add_row(Text(reason), _ms(ns))
    return table


def _offenders(found: Explanation) -> RenderableType:
    blamed = [each for each in found.offenders if each.request_id != UNEXPLAINED]
    if not found.offenders:
        return Text("Nobody delayed it.", style="dim")
    traits = [name for name in TRAITS if len({getattr(each, name) for each in blamed}) > 1]
    headings = [("request", "left"), *((TRAITS[name], "left") for name in traits), ("prompt tokens", "right")]
    table = ruled_table(*headings, ("ms", "right"), ("share", "right"), ("how", "left"))
    table.columns[0].no_wrap = True  # an id is copied
    for each in blamed[:MOST_OFFENDERS]:
        reasons = list(each.reasons_ns.items())[:3]
        how = ", ".join(reason if len(reasons) == 1 else f"{reason} {_ms(ns)} ms" for reason, ns in reasons)
        length = "–" if each.prompt_tokens is None else f"{each.prompt_tokens:,.0f}"
        who = Text("its own call" if each.request_id == found.request_id else each.request_id)
        named = [Text(getattr(each, trait)) for trait in traits]
        table.add_row(who, *named, length, _ms(each.delayed_ns), f"{each.share:.1%}", Text(how))
    blank = [""] * (len(traits) + 1)
    if rest := blamed[MOST_OFFENDERS:]:
        _sum_row(table, f"{len(rest)} others", rest, blank)
    if left := found.offenders[len(blamed) :]:
        _sum_row(table, UNEXPLAINED, left, blank)
    return table


def _sum_row(table: Table, name: str, parts: list[Blamed], blank: list[str]) -> None:
    delayed, share = sum(each.delayed_ns for each in parts), sum(each.share for each in parts)
    table.add_row(Text(name, style="dim"), *blank, _ms(delayed), f"{share:.1%}", "")


def _one_gap(gap: TokenGap, request_id: str) -> RenderableType:
    since = "its arrival" if gap.token == 0 else f"token {gap.token - 1:,}"
    parts: list[RenderableType] = [
        Text(f"{request_id}: {_ms(gap.length_ns)} ms between {since} and token {gap.token:,}", style="bold"),
        Text(f"{gap.why}."), Text(""), _accounts({name: float(ns) for name, ns in gap.accounts_ns.items()}),
    ]  # fmt: skip
    if gap.waits_ns:
        parts += [section("What it waited for"), _reasons(dict(gap.waits_ns))]
    if gap.steps:
        parts += [section("Its steps"), _steps(gap)]
    return Group(*parts)


def _steps(gap: TokenGap) -> RenderableType:
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
