"""Where the time went, on the terminal: by account, or as far as a server's own metrics show it."""

import math
from collections import Counter

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sojourn.diagnosis.foreign_server import ACCOUNT_SEPARATOR, counts_differ
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.interop.sources.pressure import KV_USE, RUNNING, WAITING
from sojourn.interop.sources.view import ServerView
from sojourn.metrics.ledger import ACCOUNT_BY_NAME, COLOURS, UNACCOUNTED

BAR_CELLS = 28
EIGHTHS = " ▏▎▍▌▋▊▉█"
UNACCOUNTED_COLOUR = "bright_black"
SMALLEST_SHOWN = 0.005  # an account below half a percent is noise in a table of shares
SERVER_BAR_CELLS = 20
SIGHT_STYLES = {"seen": "green", "partly": "yellow", "unseen": "dim"}
LATENCIES = {
    "sojourn_request_ttft_seconds": "TTFT",
    "sojourn_request_itl_seconds": "ITL",
    "sojourn_request_tpot_seconds": "TPOT",
    "sojourn_request_e2e_seconds": "end to end",
}


def bar(share: float, colour: str, cells: int = BAR_CELLS) -> Text:
    """A horizontal bar of `share` (0 to 1) of `cells` cells, to an eighth of a cell."""
    eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
    full, rest = divmod(eighths, 8)
    return Text("█" * full + (EIGHTHS[rest] if rest else ""), style=colour)


def ruled_table(*headings: tuple[str, str]) -> Table:
    """An empty table without a frame; a heading is its text and the alignment of its column."""
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading, justify in headings:
        empty.add_column(heading, justify=justify, header_style="dim", overflow="fold")
    return empty


def labelled_grid() -> Table:
    """A grid of two columns: a label, and text that wraps."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def section(title: str) -> RenderableType:
    return Padding(Text(title, style="bold"), (1, 0, 0, 0))


def whole_percents(shares: list[float]) -> list[int]:
    """Shares in whole per cent that sum to the rounded sum: what is left goes to the largest remainders."""
    percents = [math.floor(100 * share) for share in shares]
    left = round(100 * sum(shares)) - sum(percents)
    by_remainder = sorted(range(len(shares)), key=lambda place: percents[place] - 100 * shares[place])
    for place in by_remainder[:left]:
        percents[place] += 1
    return percents


def lifecycles(diagnosis: Diagnosis) -> RenderableType:
    """One line of all the time, in the lifecycles' colours and grey for what no account explains, and its legend. Of a
    server that measures accounts together, its own stretches."""
    spans = {} if diagnosis.server is None else {
        ACCOUNT_SEPARATOR.join(each.accounts): (each.name, each.accounts[0].split(".")[0])
        for each in diagnosis.server.spans if len(each.accounts) > 1
    }  # fmt: skip
    together = {name: share for name, share in diagnosis.ledger_share.items() if name in spans}
    shares = diagnosis.lifecycle_share | together | {UNACCOUNTED: diagnosis.ledger_share.get(UNACCOUNTED, 0.0)}
    line, legend = Text(), []
    for account, share in shares.items():
        name, lifecycle = spans.get(account, (account, account))
        colour = COLOURS.get(lifecycle, UNACCOUNTED_COLOUR)
        line.append("█" * math.floor(max(share, 0.0) * 2 * BAR_CELLS + 0.5), style=colour)
        if share >= SMALLEST_SHOWN:
            legend.append((name, colour, share))
    percents = whole_percents([share for *_, share in legend])
    entries = [
        Text.assemble(("■ ", colour), f"{name} {percent}%")
        for (name, colour, _), percent in zip(legend, percents, strict=True)
    ]
    return Group(line, Columns(entries, padding=(0, 3)))


def accounts(diagnosis: Diagnosis) -> RenderableType:
    table = ruled_table(("account", "left"), ("all time", "right"), ("", "left"), ("to first token", "right"))
    for name in (*ACCOUNT_BY_NAME, UNACCOUNTED):
        share, first = diagnosis.ledger_share.get(name, 0.0), diagnosis.ttft_share.get(name, 0.0)
        if max(abs(share), first) < SMALLEST_SHOWN:
            continue
        colour = COLOURS.get(name.split(".")[0], UNACCOUNTED_COLOUR)
        label = Text(name, style=colour)
        if name == "client.network" and diagnosis.clock_uncertainty_ms is not None:
            label.append(f"  ± {diagnosis.clock_uncertainty_ms:.3f} ms a request", style="dim")
        table.add_row(label, f"{share:.1%}", bar(share, colour), f"{first:.1%}")
    return table


def render_server(diagnosis: Diagnosis) -> RenderableType:
    """Shares of the time as far as they are seen, each account with how it is seen, gauges and counts."""
    view = diagnosis.server
    parts = [Text(_head(view), style="dim"), Text("")]
    if diagnosis.ledger_share:
        parts += [_spans(diagnosis), Text("")]
    parts += [_account_sights(view), Text(""), _figures(view), Padding(_agreement(view), (1, 0, 0, 0))]
    return Group(*parts)


def sight(visibility: str, title: str) -> str:
    """The visibility of an account, as a phrase."""
    return {"seen": "seen", "partly": "seen in part", "unseen": f"not visible in {title}'s metrics"}[visibility]


def _head(view: ServerView) -> str:
    failed = f", {view.failed_scrapes} failed" if view.failed_scrapes else ""
    means = (
        f"means over {view.finished:,.0f} finished requests" if view.finished else "no request finished, so no means"
    )
    scrapes = f"{view.scrapes} scrapes in {view.seconds:,.0f} s{failed}"
    return f"{view.title}'s metrics, {scrapes}: {means}; gauges are samples. The client's side is exact."


def _ms(value: float) -> str:
    return f"{round(value, 1) + 0.0:,.1f}"  # + 0.0: no minus before what rounds to nothing


def _spans(diagnosis: Diagnosis) -> RenderableType:
    view = diagnosis.server
    headings = (("part of the time", "left"), ("mean, ms", "right"), ("all time", "right"), ("", "left"))
    grid = ruled_table(*headings, ("to first token", "right"))
    named = {ACCOUNT_SEPARATOR.join(span.accounts): span for span in view.spans}
    for name, share in diagnosis.ledger_share.items():
        span = named.get(name)
        if abs(share) < SMALLEST_SHOWN:
            continue
        colour = COLOURS.get(name.split(".")[0], UNACCOUNTED_COLOUR)
        label = Text(span.name if span is not None else name, style=colour)
        first = diagnosis.ttft_share.get(name)
        mean = _ms(span.mean_ms) if span is not None else ""
        until_first = f"{first:.1%}" if first is not None else "–"
        grid.add_row(label, mean, f"{share:.1%}", bar(share, colour, SERVER_BAR_CELLS), until_first)
    notes = [Text(f"{span.name}: {span.meaning}", style="dim") for span in view.spans if span.name not in span.accounts]
    if view.inside_ms is not None and view.outside_ms is not None:
        inside = f"{_ms(view.inside_ms)} ms inside {view.title}'s own end-to-end latency"
        outside = f"{_ms(view.outside_ms)} ms outside of it ({', '.join(view.outside)})"
        notes.append(Text(f"{UNACCOUNTED}: {inside}, {outside}", style="dim"))
    return Group(grid, *notes)


def _account_sights(view: ServerView) -> RenderableType:
    """A line an account; where most are seen alike (our own server's), one line for these, as `all others`."""
    commonest, number = Counter((account.visibility, account.why) for account in view.accounts).most_common(1)[0]
    others = commonest if number > len(view.accounts) / 2 else None
    lines = [(account.account, account.visibility, account.why) for account in view.accounts
             if (account.visibility, account.why) != others]  # fmt: skip
    lines += [("all others", *others)] if others is not None else []
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, visibility, why in lines:
        seen = Text(sight(visibility, view.title), style=SIGHT_STYLES[visibility])
        grid.add_row(Text(name), seen, Text(why, style="dim"))
    return grid


def _figures(view: ServerView) -> RenderableType:
    grid = labelled_grid()
    for name, what in ((RUNNING, "running"), (WAITING, "waiting")):
        if (gauge := view.gauges.get(name)) is not None:
            grid.add_row(what, f"{gauge.mean:,.1f} on average, {gauge.largest:,.0f} at most ({gauge.samples} samples)")
    if (gauge := view.gauges.get(KV_USE)) is not None:
        grid.add_row("KV use", f"{gauge.mean:.1%} on average, {gauge.largest:.1%} at most")
    if view.hit_rate is not None:
        grid.add_row("prefix hits", f"{view.hit_rate:.1%} of the prompt tokens")
    if view.preemptions is not None:
        grid.add_row("preemptions", f"{view.preemptions:,.0f}")
    for name, what in LATENCIES.items():
        if (latency := view.latencies.get(name)) is not None:
            grid.add_row(what, f"{latency.mean * 1e3:,.1f} ms on average{_p99(latency.between.get('p99'))}")
    return grid


def _p99(between: tuple[float, float | None] | None) -> str:
    if between is None:
        return ""
    above, at_most = between
    return f", p99 above {above:g} s" if at_most is None else f", p99 between {above:g} and {at_most:g} s"


def _agreement(view: ServerView) -> Text:
    if not any(pair.client or pair.server for pair in view.agreement):
        return Text("Client and server share no count that could be compared", style="dim")
    differ = any(map(counts_differ, view.agreement))
    counts = [
        f"{pair.client:,.0f} {pair.what}" + (f" (the server: {pair.server:,.0f})" if pair.server != pair.client else "")
        for pair in view.agreement
    ]
    sentence = f"Client and server {'differ' if differ else 'agree'}: {', '.join(counts)}"
    return Text(sentence, style="yellow" if differ else "green")
