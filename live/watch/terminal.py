"""A watch on the terminal: a page to leave open, a report, and a line for each change."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sojourn.diagnosis.terminal.time_spent import bar, labelled_grid, ruled_table, section
from sojourn.diagnosis.verdict import Finding
from sojourn.live.watch.document import Met, Now, Watch, WatchedServer
from sojourn.live.watch.moments import Moment
from sojourn.live.watch.steady import Change, clock
from sojourn.metrics.ledger import COLOURS

STYLES = {
    "healthy": "bold green", "idle": "green", "degraded": "bold yellow", "overloaded": "bold red",
    "stuck": "bold red", "cannot tell": "bold cyan", "unreachable": "bold magenta", "event": "bold blue",
}  # fmt: skip
PART_COLOURS = {
    "queue": COLOURS["request"], "prefill": COLOURS["compute"], "decode": COLOURS["compute"],
    "others' prompts": COLOURS["request"], "memory": COLOURS["memory"], "writing": COLOURS["request"],
    "host": COLOURS["compute"], "text": COLOURS["token"],
    "rest": COLOURS["client"],
}  # fmt: skip
TICKS = "▁▂▃▄▅▆▇█"
DASH = "–"
BAR_CELLS, SPARK_CELLS = 24, 36
IN_A_LINE = ("requests_per_s", "output_tokens_per_s", "running", "waiting")  # of several servers
SHOWN_CHANGES, SHOWN_EVIDENCE = 4, 3


class Gauge(NamedTuple):
    label: str
    field: str  # of Moment and Now
    unit: str


GAUGES = (
    Gauge("output", "output_tokens_per_s", "tok/s"), Gauge("prompts", "prompt_tokens_per_s", "tok/s"),
    Gauge("requests", "requests_per_s", "req/s"), Gauge("running", "running", ""), Gauge("waiting", "waiting", ""),
    Gauge("KV use", "kv_use", "%"),
)  # fmt: skip


def page(
    watch: Watch, histories: Mapping[str, Sequence[Moment]], changes: Sequence[Change], size: ConsoleDimensions
) -> RenderableType:
    """The page of this second, not wider than the terminal; what does not fit below is cut by the terminal."""
    parts: list[RenderableType] = []
    if len(watch.servers) > 1:
        parts.append(_servers(watch))
    if watch.servers:
        shown = next(each for each in watch.servers if each.state == watch.state)
        parts += _server(shown, histories.get(shown.name, ()), size.width)
    else:
        parts.append(Text(watch.headline))
    if changes:
        parts += [section("What changed"), *(Text(change_line(each), no_wrap=True, overflow="ellipsis")
                                             for each in changes[-SHOWN_CHANGES:])]  # fmt: skip
    parts.append(Text(f"{watch.at}   Ctrl-C ends it", style="dim"))
    return Group(*parts)


def report(watch: Watch) -> RenderableType:
    """What `--once` prints."""
    parts: list[RenderableType] = [_servers(watch)] if len(watch.servers) > 1 else []
    for server in watch.servers:
        parts += _server(server, (), 80)
    return Group(*parts) if parts else Text(watch.headline)


def change_line(change: Change) -> str:
    """A line of a log."""
    said = change.sentence
    state = "" if said.lower().startswith(change.state) else f"{change.state}: "
    return f"{clock(change.ns)}  {change.server}  {state}{said}"


def _servers(watch: Watch) -> Table:
    rows = ruled_table(("server", "left"), ("state", "left"), ("req/s", "right"), ("tok/s", "right"),
                       ("run", "right"), ("wait", "right"), ("KV", "right"), ("TTFT ms", "right"))  # fmt: skip
    for each in watch.servers:
        now = each.now
        rows.add_row(
            Text(each.name.removeprefix("http://")), Text(each.state, style=STYLES[each.state]),
            *(_number(getattr(now, name, None)) for name in IN_A_LINE),
            _percent(now.kv_use if now else None), _number(each.ttft_ms),
        )  # fmt: skip
    return rows


def _server(server: WatchedServer, history: Sequence[Moment], width: int) -> list[RenderableType]:
    style = STYLES[server.state]
    about = f"{server.title} · {server.name} · {server.window_s:.0f} s of {_reads(server)}"
    parts: list[RenderableType] = [
        Panel(
            Group(Text(server.headline), Text(about, style="dim")), title=Text(f" {server.state} ", style=style),
            title_align="left", border_style=style.split()[-1], padding=(0, 1), width=min(width, 100),
        )
    ]  # fmt: skip
    if server.now is not None:
        parts.append(_now(server, server.now, history))
    if server.met:
        parts += [section("Objectives"), _met(server.met)]
    if server.parts:
        parts += [section("Where the time of a request goes"), _parts(server)]
    if server.devices:
        parts += [section("Devices, by their sensors"), *map(Text, server.devices)]
    causes = [each for each in server.findings if each.role == "cause"]
    others = [each for each in server.findings if each.role != "cause"]
    if causes:
        parts += [section("Findings"), *(_finding(each) for each in causes)]
        parts += [Text(f"or: {each.cause}", style="dim") for each in others]
    if server.ruled_out:
        parts += [section("Ruled out by the page"), *(Text(f"× {each}", style="dim") for each in server.ruled_out)]
    if server.unknown:
        parts += [
            section("What cannot be known from these metrics"),
            *(Text(f"? {each}", style="dim") for each in server.unknown),
        ]
    return [*parts, *(Text.assemble(("! ", "bold yellow"), each) for each in server.warnings)]


def _reads(server: WatchedServer) -> str:
    failed = f", {server.failed_scrapes} failed" if server.failed_scrapes else ""
    scraped = f"/metrics ({server.scrapes} scrapes{failed})"
    if not server.evidence:
        return scraped
    return f"{scraped}, {server.evidence.removeprefix('/metrics; ')}{'' if server.reads == 'records' else ', not used'}"


def _now(server: WatchedServer, now: Now, history: Sequence[Moment]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    for gauge in GAUGES:
        value = getattr(now, gauge.field)
        shown = _percent(value) if gauge.unit == "%" else _number(value, gauge.unit)
        grid.add_row(
            gauge.label, shown, Text(sparkline([getattr(each, gauge.field) for each in history]), style="blue")
        )
    means = [("TTFT", server.ttft_ms), ("TPOT", server.tpot_ms), ("end to end", server.e2e_ms)]
    line = " · ".join(f"{name} {_number(ms)} ms" for name, ms in means if ms is not None)
    hits = f"prefix hits {server.hit_rate:.0%}" if server.hit_rate is not None else ""
    means_line = " · ".join(filter(None, (line, hits)))
    return Group(grid, Text.assemble(("means  ", "dim"), means_line)) if means_line else grid


def _met(met: Sequence[Met]) -> Table:
    grid = labelled_grid()
    for each in met:
        low, high = f"{each.at_least:.0%}", f"{each.at_most:.0%}"
        share = low if low == high else f"{low} to {high}"
        label = f"{each.klass}: {each.objective}" if each.klass else each.objective
        grid.add_row(label, Text.assemble(bar(each.at_least, "green", BAR_CELLS), f" {share} of {each.requests}"))
    return grid


def _parts(server: WatchedServer) -> Table:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    for part in server.parts:
        if part.share >= 0.005:
            grid.add_row(part.name, f"{_number(part.mean_ms)} ms", f"{part.share:.0%}",
                         bar(part.share, PART_COLOURS[part.name], BAR_CELLS))  # fmt: skip
    return grid


def _finding(found: Finding) -> RenderableType:
    grid = labelled_grid()
    for fact in found.evidence[:SHOWN_EVIDENCE]:
        grid.add_row("for" if fact.supports else "against", Text(fact.statement))
    grid.add_row("change", Text(found.fix.change))
    grid.add_row("to prove it", Text(found.probe.measurement))
    if found.probe.command:
        grid.add_row("", Text(f"$ {found.probe.command}", style="bold"))
    lifecycle = found.lifecycles[0]
    head = Text.assemble(("● ", COLOURS.get(lifecycle, "white")), (found.cause, "bold"),
                         (f"  {lifecycle} · {found.object} · confidence {found.confidence:.0%}", "dim"))  # fmt: skip
    return Group(head, grid)


def sparkline(values: Sequence[float | None], cells: int = SPARK_CELLS) -> str:
    """The last values as bars, each cell the mean of as many, from 0 to the largest; a gap where none is known."""
    if not values:
        return ""
    per_cell = max(1, math.ceil(len(values) / cells))
    groups = [values[place : place + per_cell] for place in range(0, len(values), per_cell)]
    means = [
        sum(known) / len(known) if (known := [value for value in group if value is not None]) else None
        for group in groups
    ]
    top = max((mean for mean in means if mean is not None), default=0.0)
    return "".join(
        " " if mean is None else TICKS[0] if top <= 0 else TICKS[round(mean / top * (len(TICKS) - 1))] for mean in means
    )


def _number(value: float | None, unit: str = "") -> str:
    if value is None or not math.isfinite(value):
        return DASH
    shown = f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"
    return f"{shown} {unit}".strip()


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"
