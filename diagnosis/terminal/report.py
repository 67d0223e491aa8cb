"""The whole diagnosis on the terminal: headline, goodput, where the time went, findings, the six checks, closure."""

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sojourn.diagnosis.terminal.time_spent import (
    accounts,
    labelled_grid,
    lifecycles,
    render_server,
    ruled_table,
    section,
)
from sojourn.diagnosis.verdict import (
    NEEDS_SECOND_RUN,
    Diagnosis,
    Finding,
    label_fix,
    rivals_fix,
    tell_confidence,
    tell_missed,
    without_finding,
)
from sojourn.metrics.ledger import COLOURS
from sojourn.metrics.request.deadlines import FLUID_SHARE
from sojourn.metrics.request.goodput import ClassGoodput
from sojourn.metrics.request.latencies import DEFINITIONS, QUANTILE_MIN_SAMPLES, Estimate
from sojourn.metrics.request.objectives import short
from sojourn.metrics.results.energy import energy_line
from sojourn.metrics.results.load import CLOSED_ORIGIN
from sojourn.metrics.results.prices import cost_line
from sojourn.metrics.results.summary import Results
from sojourn.metrics.statistics.intervals import Interval

STATE_STYLES = {
    "healthy": "bold green",
    "degraded": "bold yellow",
    "overloaded": "bold red",
    "stuck": "bold red",
    "inconclusive": "bold cyan",
    "invalid": "bold magenta",
}
DASH = Text("–", style="dim")
STATUS_MARKS = {"present": ("●", "bold yellow"), "absent": ("○", "green"), "unknown": ("?", "dim")}
SHOWN_QUANTILES = ("p50", "p90", "p99")
ORIGINS = {"intended send": "intended", "actual send": "sent", "the token before": "token", "the chunk before": "chunk"}
OPEN_ORIGIN = "the intended or the actual send"
VERDICT_STYLES = {"steady": "green", "no steady state": "bold yellow", "cannot tell": "dim"}


def render(diagnosis: Diagnosis) -> RenderableType:
    """The whole report for `rich.print`. All text of the run is shown as it is, never read as markup."""
    parts: list[RenderableType] = [headline_panel(diagnosis), section("Goodput"), _goodput(diagnosis.goodput)]
    parts += _results(diagnosis.results) if diagnosis.results is not None else []
    parts += [Text(f"Energy: {energy_line(diagnosis.energy)}")] if diagnosis.energy is not None else []
    parts += [Text.assemble(("! ", "bold yellow"), each) for each in (*diagnosis.left_out, *diagnosis.warnings)]
    if diagnosis.devices:
        parts += [section("Devices, by their sensors"), *map(Text, diagnosis.devices)]
    if diagnosis.server is not None:
        parts += [section("Where the time went"), render_server(diagnosis)]
    elif diagnosis.ledger_share:
        parts += [section("Where the time went"), lifecycles(diagnosis), Text(""), accounts(diagnosis)]
    parts += [section("Findings")]
    causes = [finding for finding in diagnosis.findings if finding.role == "cause"]
    parts += [_finding(place, finding) for place, finding in enumerate(causes, start=1)]
    others = [finding for finding in diagnosis.findings if finding.role == "alternative"]
    parts += _alternatives(others, {finding.key for finding in causes})
    parts += [Text(sentence)] if (sentence := without_finding(diagnosis)) else []
    parts += [section("The six symptoms"), _checks(diagnosis), _closure(diagnosis)]
    return Group(*parts)


def headline_panel(diagnosis: Diagnosis) -> RenderableType:
    style = STATE_STYLES[diagnosis.state]
    run = f"run {diagnosis.run}" + (f" against {diagnosis.against}" if diagnosis.against else "")
    return Panel(
        Group(Text(diagnosis.headline), Text(run, style="dim")), title=Text(f" {diagnosis.state} ", style=style),
        title_align="left", border_style=style.split()[-1], padding=(0, 1),
    )  # fmt: skip


def _goodput(rows: list[ClassGoodput]) -> RenderableType:
    table = ruled_table(("class", "left"), ("good / sent", "right"), ("met", "right"), ("good req/s", "right"),
                   ("good tok/s", "right"))  # fmt: skip
    latency = ruled_table(("class", "left"), ("latency, ms", "left"), ("objective", "right"), ("met", "right"),
                     ("p50", "right"), ("p90", "right"), ("p99", "right"), ("max", "right"))  # fmt: skip
    for row in rows:
        met = _share(row.attainment if row.sent else None)
        if row.attainment_interval is not None:
            met.append(f" ({percent_bounds(row.attainment_interval)})", style="dim")
        tokens = DASH.copy() if row.goodput_tokens_per_s is None else f"{row.goodput_tokens_per_s:,.1f}"
        table.add_row(Text(row.klass), f"{row.good} / {row.sent}", met, f"{row.goodput_rps:.2f}", tokens)
        for name, quantiles in row.quantiles_ms.items():
            if quantiles["max"] is None:
                continue
            bound = row.objectives.get(name)
            objective = f"≤ {bound:,.0f}" if bound is not None else "–"
            values = (tell_ms(quantiles[quantile]) for quantile in ("p50", "p90", "p99", "max"))
            latency.add_row(Text(row.klass), short(name), objective, draw_met(row, name), *values)
    per_second = Text(rows[0].window.sentence() if rows and rows[0].window is not None else "", style="dim")
    if not latency.row_count:
        return Group(table, per_second)
    few = f"too few requests (p99 needs {QUANTILE_MIN_SAMPLES['p99']})"
    note = Text(f"–: no objective, {few}, or the value falls among failed requests", style="dim")
    return Group(table, per_second, Text(""), latency, note)


def tell_ms(value: float | None) -> Text:
    return DASH.copy() if value is None else Text(f"{value:,.1f}" if value < 100 else f"{value:,.0f}")


def _share(value: float | None) -> Text:
    if value is None:
        return DASH.copy()
    return Text(f"{value:.0%}", style="green" if value >= 0.9 else "yellow" if value >= 0.5 else "red")


def draw_met(row: ClassGoodput, objective: str) -> Text:
    """The share, and its number of requests where not every request could be measured."""
    share, counted = _share(row.attainment_by_objective.get(objective)), row.judged_by_objective.get(objective)
    return share.append(f" of {counted}", style="dim") if counted not in (None, row.sent) else share


def _results(results: Results) -> list[RenderableType]:
    """The table of latencies with 95% intervals, then a line each for steadiness, deadlines and cost."""
    parts: list[RenderableType] = []
    if results.latencies:
        origins = ORIGINS | ({"intended send": "turn"} if results.closed else {})
        table = ruled_table(("latency, ms", "left"), ("from", "left"), ("n", "right"),
                            *((name, "right") for name in SHOWN_QUANTILES))  # fmt: skip
        for row in results.latencies:
            definition = DEFINITIONS[row.name]
            table.add_row(
                definition.title.removesuffix(" from send"), origins[definition.origin], f"{row.samples:,}",
                *(_estimate(row.quantiles[name]) for name in SHOWN_QUANTILES),
            )  # fmt: skip
        begin = f"{CLOSED_ORIGIN} (closed loop), the actual send" if results.closed else OPEN_ORIGIN
        note = f"'from' is where the clock starts: {begin}, the token or the chunk before; ranges are 95% intervals"
        parts += [Text(""), table, Text(note, style="dim")]
    steady = (results.steady.verdict, VERDICT_STYLES[results.steady.verdict])
    parts.append(Text.assemble("Steady state: ", steady, (f" ({results.steady.reason})", "dim")))
    for each in results.deadlines:
        parts.append(Text(
            f"Deadlines of {each.klass or 'all'}: fluidity {each.fluidity:.1%}"
            f"{f' ({percent_bounds(each.fluidity_interval)})' if each.fluidity_interval is not None else ''}, "
            f"{each.fluid} of {each.sent} met {FLUID_SHARE:.0%} of theirs; smooth goodput "
            f"{each.smooth_goodput_tokens_per_s:,.1f} of {each.output_tokens_per_s:,.1f} tokens/s"
        ))  # fmt: skip
    return [*parts, Text(f"Cost: {cost_line(results.cost)}")] if results.cost is not None else parts


def _bounds(interval: Interval, shown: Callable[[float], str]) -> str:
    return "–".join("?" if bound is None else shown(bound) for bound in (interval.low, interval.high))


def percent_bounds(interval: Interval) -> str:
    return _bounds(interval, lambda bound: f"{100 * min(1.0, max(0.0, bound)):.0f}") + "%"


def _estimate(estimate: Estimate) -> Text:
    if estimate.value is None:
        return DASH.copy()
    text = Text(_three_digits(estimate.value))
    return text if estimate.interval is None else text.append(f" {_bounds(estimate.interval, _three_digits)}", "dim")


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _finding(place: int, finding: Finding) -> RenderableType:
    lifecycle = finding.lifecycles[0] if finding.lifecycles else "client"
    colour = COLOURS.get(lifecycle, COLOURS["client"])
    lost = f" · {missed}" if (missed := tell_missed(finding)) else ""
    grid = labelled_grid()
    grid.add_row("cause", Text(finding.cause))
    grid.add_row("where", Text(f"{' → '.join(finding.lifecycles)} · {finding.object} · {finding.kind}"))
    if finding.objective:
        grid.add_row("objective", Text(finding.objective))
    grid.add_row("affects", Text(finding.cohort))
    grid.add_row("", Text(tell_confidence(finding)))
    if finding.unsafe:
        grid.add_row("", Text.assemble(("! ", "bold yellow"), finding.unsafe))
    for label, supports, mark in (("for", True, ("+ ", "green")), ("against", False, ("– ", "red"))):
        statements = [fact.statement for fact in finding.evidence if fact.supports is supports]
        for number, statement in enumerate(statements):
            grid.add_row(label if not number else "", Text.assemble(mark, statement))
    grid.add_row("prove it", Text(finding.probe.measurement))
    if finding.probe.command:
        grid.add_row("", Text(f"$ {finding.probe.command}", style="bold"))
    grid.add_row("if so", Text(finding.probe.if_cause))
    grid.add_row("rival", Text(f"{finding.probe.rival}; then {finding.probe.if_rival}"))
    if sentence := rivals_fix(finding):
        grid.add_row("", Text(sentence, style="dim"))
    grid.add_row(label_fix(finding.fix), Text.assemble((finding.fix.change, "bold")))
    grid.add_row("", Text.assemble(finding.fix.gain, (f"  ({finding.fix.basis})", "dim")))
    title = Text(f"{place} · {finding.title}{lost}", style="bold")
    return Panel(Group(title, Text(""), grid), border_style=colour, padding=(0, 1))


def _alternatives(findings: list[Finding], named: set[str]) -> list[RenderableType]:
    """Causes that the evidence does not rule out, each with what tells it from the others and with its fix; and
    consequences of the named ones."""
    if not findings:
        return []
    grid = labelled_grid()
    for number, finding in enumerate(findings):
        follows = bool(named & {*finding.follows})
        grid.add_row("follows" if follows else "or else" if not number else "", Text.assemble(
            finding.cause, (f"  ({finding.kind}, {tell_confidence(finding)}; {finding.fix.gain})", "dim")
        ))  # fmt: skip
        grid.add_row(Text("prove it", style="dim"), Text(finding.probe.measurement, style="dim"))
        grid.add_row(Text(label_fix(finding.fix), style="dim"), Text(finding.fix.change, style="dim"))
    return [Padding(grid, (0, 2))]


def _checks(diagnosis: Diagnosis) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=2)
    table.add_column(overflow="fold", ratio=3)
    shown = [item for item in diagnosis.checks if item.reason != NEEDS_SECOND_RUN]
    for item in shown:
        mark, style = STATUS_MARKS[item.status]
        table.add_row(Text(f"{mark} {item.status}", style=style), Text(item.title), Text(item.reason, style="dim"))
    compared = ", ".join(item.title for item in diagnosis.checks if item not in shown)
    return Group(table, Text(f"With --against RUN2: {compared}", style="dim")) if compared else table


def _closure(diagnosis: Diagnosis) -> RenderableType:
    closed = diagnosis.closure
    if not closed.joined:
        return Padding(Text("Closure: no request has records of both client and server", style="dim"), (1, 0, 0, 0))
    sentence = f"Closure: {closed.closed} of {closed.joined} ledgers sum to the client's latency within 1% and 1 ms"
    if closed.worst_share is not None and closed.worst_ns is not None:
        sentence += f"; worst {closed.worst_share:.2%} and {closed.worst_ns / 1e6:.2f} ms"
    return Padding(Text(sentence, style="green" if closed.closed == closed.joined else "yellow"), (1, 0, 0, 0))
