"""On the terminal: what its own metrics show of a server that recorded nothing for us, and what they do not."""

from collections import Counter

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from metrics.diagnosis.foreign_server import SEVERAL, TOLD_APART
from metrics.diagnosis.terminal.bars import bar, ruled_table
from metrics.diagnosis.verdict import Diagnosis
from metrics.ledger import COLOURS, UNACCOUNTED
from metrics.sources.view import KV_USE, RUNNING, WAITING, ServerView

BAR_CELLS = 20
SIGHT_STYLES = {"seen": "green", "partly": "yellow", "unseen": "dim"}
LATENCIES = {
    "sojourn_request_ttft_seconds": "TTFT",
    "sojourn_request_itl_seconds": "ITL",
    "sojourn_request_tpot_seconds": "TPOT",
    "sojourn_request_e2e_seconds": "end to end",
}


def render_server(diagnosis: Diagnosis) -> RenderableType:
    """Shares of the time as far as they are seen, each account with how it is seen, gauges and counts."""
    view = diagnosis.server
    parts = [Text(_head(view), style="dim"), Text("")]
    if diagnosis.ledger_share:
        parts += [_spans(diagnosis), Text("")]
    parts += [_accounts(view), Text(""), _figures(view), Padding(_agreement(view), (1, 0, 0, 0))]
    return Group(*parts)


def sight(visibility: str, title: str) -> str:
    """How an account is seen, in words."""
    return {"seen": "seen", "partly": "seen in part", "unseen": f"unseen by {title}'s metrics"}[visibility]


def _head(view: ServerView) -> str:
    failed = f", {view.failed_scrapes} failed" if view.failed_scrapes else ""
    means = (
        f"means over {view.finished:,.0f} finished requests" if view.finished else "no request finished, so no means"
    )
    return (
        f"{view.title}'s metrics, {view.scrapes} scrapes in {view.seconds:,.0f} s{failed}: {means}; gauges are "
        "samples. The client's side is exact."
    )


def _ms(value: float) -> str:
    return f"{round(value, 1) + 0.0:,.1f}"  # + 0.0: no minus before what rounds to nothing


def _spans(diagnosis: Diagnosis) -> RenderableType:
    view = diagnosis.server
    headings = (("part of the time", "left"), ("mean, ms", "right"), ("all time", "right"), ("", "left"))
    grid = ruled_table(*headings, ("to first token", "right"))
    named = {SEVERAL.join(span.accounts): span for span in view.spans}
    for name, share in diagnosis.ledger_share.items():
        span = named.get(name)
        colour = COLOURS.get(name.split(".")[0], "bright_black")
        label = Text(span.name if span is not None else name, style=colour)
        first = diagnosis.ttft_share.get(name)
        mean = _ms(span.mean_ms) if span is not None else ""
        until_first = f"{first:.1%}" if first is not None else "–"
        grid.add_row(label, mean, f"{share:.1%}", bar(share, colour, BAR_CELLS), until_first)
    notes = [Text(f"{span.name}: {span.meaning}", style="dim") for span in view.spans if span.name not in span.accounts]
    return Group(grid, *notes, *_unaccounted(view))


def _unaccounted(view: ServerView) -> list[Text]:
    """Where what no metric explains lies, as far as the server's own end-to-end latency tells."""
    if view.inside_ms is None or view.outside_ms is None:
        return []
    words = (
        f"{UNACCOUNTED}: {_ms(view.inside_ms)} ms inside {view.title}'s own end-to-end latency, {_ms(view.outside_ms)} "
        f"ms outside of it ({', '.join(view.outside)})"
    )
    return [Text(words, style="dim")]


def _accounts(view: ServerView) -> RenderableType:
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
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
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
        if (told := view.latencies.get(name)) is not None:
            grid.add_row(what, f"{told.mean * 1e3:,.1f} ms on average{_p99(told.between.get('p99'))}")
    return grid


def _p99(between: tuple[float, float | None] | None) -> str:
    if between is None:
        return ""
    above, at_most = between
    return f", p99 above {above:g} s" if at_most is None else f", p99 between {above:g} and {at_most:g} s"


def _agreement(view: ServerView) -> Text:
    if not any(pair.client or pair.server for pair in view.agreement):
        return Text("Client and server share no count that could be compared", style="dim")
    words, agrees = [], True
    for pair in view.agreement:
        same = abs(pair.server - pair.client) <= TOLD_APART * max(pair.client, 1.0)
        agrees = agrees and same
        both = pair.server == pair.client
        words.append(f"{pair.client:,.0f} {pair.what}" + ("" if both else f" (the server: {pair.server:,.0f})"))
    head = "Client and server agree" if agrees else "Client and server differ"
    return Text(f"{head}: {', '.join(words)}", style="green" if agrees else "yellow")
