"""A diagnosis on the terminal: headline, goodput, where the time went, findings, the six checks, closure."""

import math

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from metrics.diagnosis.terminal.bars import BAR_CELLS, bar, ruled_table
from metrics.diagnosis.terminal.foreign_server import render_server
from metrics.diagnosis.terminal.results import render_results, share_bounds
from metrics.diagnosis.verdict import Diagnosis, Evidence, Finding, without_finding
from metrics.ledger import ACCOUNTS, COLOURS, LIFECYCLES, UNACCOUNTED
from metrics.request.goodput import ClassGoodput
from metrics.request.latencies import QUANTILE_MIN_SAMPLES
from metrics.request.objectives import short
from metrics.results.energy import energy_line

SMALLEST_SHOWN = 0.005  # an account below half a percent is noise in a table of shares
STATE_STYLES = {
    "healthy": "bold green",
    "degraded": "bold yellow",
    "overloaded": "bold red",
    "inconclusive": "bold cyan",
    "invalid": "bold magenta",
}
STATUS_MARKS = {"present": ("●", "bold yellow"), "absent": ("○", "green"), "unknown": ("?", "dim")}


def render(diagnosis: Diagnosis) -> RenderableType:
    """The whole report for `rich.print`. All text of the run is shown as it is, never read as markup."""
    parts: list[RenderableType] = [_headline(diagnosis), _section("Goodput"), _goodput(diagnosis.goodput)]
    parts += render_results(diagnosis.results) if diagnosis.results is not None else []
    parts += [Text(f"Energy: {energy_line(diagnosis.energy)}")] if diagnosis.energy is not None else []
    if diagnosis.server is not None:
        parts += [_section("Where the time went"), render_server(diagnosis)]
    elif diagnosis.ledger_share:
        parts += [_section("Where the time went"), _lifecycles(diagnosis), _accounts(diagnosis)]
    parts += [_section("Findings")]
    parts += [_finding(place, finding) for place, finding in enumerate(diagnosis.findings, start=1)]
    parts += [Text(sentence)] if (sentence := without_finding(diagnosis)) else []
    parts += [_section("The six symptoms"), _checks(diagnosis), _closure(diagnosis)]
    parts += [Text.assemble(("! ", "bold yellow"), warning) for warning in diagnosis.warnings]
    return Group(*parts)


def _headline(diagnosis: Diagnosis) -> RenderableType:
    style = STATE_STYLES[diagnosis.state]
    run = f"run {diagnosis.run}" + (f" against {diagnosis.against}" if diagnosis.against else "")
    return Panel(
        Group(Text(diagnosis.headline), Text(run, style="dim")), title=Text(f" {diagnosis.state} ", style=style),
        title_align="left", border_style=style.split()[-1], padding=(0, 1),
    )  # fmt: skip


def _section(title: str) -> RenderableType:
    return Padding(Text(title, style="bold"), (1, 0, 0, 0))


def _goodput(rows: list[ClassGoodput]) -> RenderableType:
    table = ruled_table(("class", "left"), ("good / sent", "right"), ("kept", "right"), ("good req/s", "right"),
                   ("good tok/s", "right"))  # fmt: skip
    latency = ruled_table(("class", "left"), ("latency, ms", "left"), ("objective", "right"), ("kept", "right"),
                     ("p50", "right"), ("p90", "right"), ("p99", "right"), ("max", "right"))  # fmt: skip
    for row in rows:
        kept = _share(row.attainment if row.sent else None)
        if row.attainment_interval is not None:
            kept.append(f" ({share_bounds(row.attainment_interval)})", style="dim")
        table.add_row(Text(row.klass), f"{row.good} / {row.sent}", kept,
                      f"{row.goodput_rps:.2f}", _rate(row.goodput_tokens_per_s))  # fmt: skip
        for name, quantiles in row.quantiles_ms.items():
            if quantiles["max"] is None:
                continue
            bound = row.objectives.get(name)
            latency.add_row(
                Text(row.klass), short(name), f"≤ {bound:,.0f}" if bound is not None else "–",
                _kept(row, name),
                *(_ms(quantiles[quantile]) for quantile in ("p50", "p90", "p99", "max")),
            )  # fmt: skip
    per_second = Text(rows[0].window.sentence() if rows and rows[0].window is not None else "", style="dim")
    if not latency.row_count:
        return Group(table, per_second)
    words = (
        f"–: too few requests for the claim (p99 needs {QUANTILE_MIN_SAMPLES['p99']}), or it falls among failed ones"
    )
    note = Text(words, style="dim")
    return Group(table, per_second, Text(""), latency, note)


def _ms(value: float | None) -> Text:
    return Text("–", style="dim") if value is None else Text(f"{value:,.1f}" if value < 100 else f"{value:,.0f}")


def _rate(value: float | None) -> Text:
    return Text("–", style="dim") if value is None else Text(f"{value:,.1f}")


def _share(value: float | None) -> Text:
    if value is None:
        return Text("–", style="dim")
    return Text(f"{value:.0%}", style="green" if value >= 0.9 else "yellow" if value >= 0.5 else "red")


def _kept(row: ClassGoodput, objective: str) -> Text:
    """The share, and of how many requests where that could not be told of all."""
    share, counted = _share(row.attainment_by_objective.get(objective)), row.judged_by_objective.get(objective)
    return share.append(f" of {counted}", style="dim") if counted not in (None, row.sent) else share


def _lifecycles(diagnosis: Diagnosis) -> RenderableType:
    """One line of all the time, in the lifecycles' colours and grey for what no account explains, and its legend."""
    line, legend = Text(), Text()
    for name in (*LIFECYCLES, "client"):
        share = diagnosis.lifecycle_share.get(name, 0.0)
        line.append("█" * math.floor(max(share, 0.0) * 2 * BAR_CELLS + 0.5), style=COLOURS[name])
        if share >= SMALLEST_SHOWN:
            legend.append("■ ", style=COLOURS[name])
            legend.append(f"{name} {share:.0%}   ")
    left = diagnosis.ledger_share.get(UNACCOUNTED, 0.0)
    if left >= SMALLEST_SHOWN:
        line.append("█" * math.floor(left * 2 * BAR_CELLS + 0.5), style="bright_black")
        legend.append("■ ", style="bright_black")
        legend.append(f"{UNACCOUNTED} {left:.0%}")
    return Group(line, legend, Text(""))


def _accounts(diagnosis: Diagnosis) -> RenderableType:
    table = ruled_table(("account", "left"), ("all time", "right"), ("", "left"), ("to first token", "right"))
    for info in ACCOUNTS:
        share, first = diagnosis.ledger_share.get(info.name, 0.0), diagnosis.ttft_share.get(info.name, 0.0)
        if max(share, first) >= SMALLEST_SHOWN:
            name = Text(info.name, style=COLOURS[info.lifecycle])
            if info.name == "client.network" and diagnosis.clock_uncertainty_ms is not None:
                name.append(f"  ± {diagnosis.clock_uncertainty_ms:.3f} ms a request", style="dim")
            table.add_row(name, f"{share:.1%}", bar(share, COLOURS[info.lifecycle]), f"{first:.1%}")
    left = diagnosis.ledger_share.get(UNACCOUNTED, 0.0)
    if abs(left) >= SMALLEST_SHOWN:
        table.add_row(Text(UNACCOUNTED, style="dim"), f"{left:.1%}", bar(left, "bright_black"),
                      f"{diagnosis.ttft_share.get(UNACCOUNTED, 0.0):.1%}")  # fmt: skip
    return table


def _finding(place: int, finding: Finding) -> RenderableType:
    lifecycle = finding.lifecycles[0] if finding.lifecycles else "client"
    colour = COLOURS.get(lifecycle, COLOURS["client"])
    missed = "it" if finding.objective else "an objective"
    lost = f" · {finding.goodput_lost:.0%} of the requests miss {missed}" if finding.goodput_lost else ""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("cause", Text(finding.cause))
    grid.add_row("where", Text(f"{' → '.join(finding.lifecycles)} · {finding.object} · {finding.kind}"))
    if finding.objective:
        grid.add_row("objective", Text(finding.objective))
    grid.add_row("hits", Text(finding.cohort))
    for label, facts in (("for", _sorted(finding, True)), ("against", _sorted(finding, False))):
        for number, fact in enumerate(facts):
            mark, style = ("+ ", "green") if fact.supports else ("– ", "red")
            grid.add_row(label if not number else "", Text.assemble((mark, style), fact.statement))
    grid.add_row("prove it", Text(finding.probe.measurement))
    if finding.probe.command:
        grid.add_row("", Text(f"$ {finding.probe.command}", style="bold"))
    grid.add_row("if so", Text(finding.probe.if_cause))
    grid.add_row("rival", Text(f"{finding.probe.rival}; then {finding.probe.if_rival}"))
    grid.add_row("fix", Text.assemble((finding.fix.change, "bold")))
    grid.add_row("", Text.assemble(finding.fix.gain, (f"  ({finding.fix.basis})", "dim")))
    title = Text(f"{place} · {finding.title}{lost}", style="bold")
    return Panel(Group(title, Text(""), grid), border_style=colour, padding=(0, 1))


def _sorted(finding: Finding, supports: bool) -> list[Evidence]:
    return [fact for fact in finding.evidence if fact.supports is supports]


def _checks(diagnosis: Diagnosis) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=2)
    table.add_column(overflow="fold", ratio=3)
    for item in diagnosis.checks:
        mark, style = STATUS_MARKS[item.status]
        table.add_row(Text(f"{mark} {item.status}", style=style), Text(item.title), Text(item.reason, style="dim"))
    return table


def _closure(diagnosis: Diagnosis) -> RenderableType:
    closed = diagnosis.closure
    if not closed.joined:
        return Padding(Text("Closure: no request has records of both client and server", style="dim"), (1, 0, 0, 0))
    worst = (
        f"; worst {closed.worst_share:.2%} and {closed.worst_ns / 1e6:.2f} ms"
        if closed.worst_share is not None and closed.worst_ns is not None
        else ""
    )
    words = (
        f"Closure: {closed.closed} of {closed.joined} ledgers sum to the client's latency within 1 % and 1 ms{worst}"
    )
    return Padding(Text(words, style="green" if closed.closed == closed.joined else "yellow"), (1, 0, 0, 0))
