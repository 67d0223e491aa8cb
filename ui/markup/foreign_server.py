"""What the app and the report show of a server's own metrics, where it recorded nothing for us."""

from sojourn.diagnosis.foreign_server import counts_differ
from sojourn.diagnosis.terminal.time_spent import LATENCIES, sight
from sojourn.interop.sources.pressure import KV_USE, RUNNING, WAITING
from sojourn.interop.sources.view import ServerView
from sojourn.ui.markup.fragments import STATUS_COLOURS, Tile, chip, dot, folded, html_table, wrap
from sojourn.ui.text import number, percent, safe
from sojourn.ui.theme import WARN

SIGHT_COLOURS = {"seen": STATUS_COLOURS["absent"], "partly": WARN, "unseen": STATUS_COLOURS["unknown"]}


def introduction(view: ServerView) -> str:
    """What the figures rest on, in one sentence."""
    failed = f", {view.failed_scrapes} failed" if view.failed_scrapes else ""
    return wrap(
        f'<p class="sj-small sj-muted">{safe(view.title)}’s own metrics: {view.scrapes:,} scrapes in '
        f"{number(view.seconds)} s{failed}. Means are over {number(view.finished)} finished requests, gauges are "
        "samples; neither says anything about a single request. The client’s side is exact.</p>"
    )


def tiles_of(view: ServerView) -> list[Tile]:
    """Gauges, totals and mean latencies, with what they rest on."""
    tiles: list[Tile] = []
    for name, what, unit in ((RUNNING, "running", "requests"), (WAITING, "waiting", "requests")):
        if (gauge := view.gauges.get(name)) is not None:
            tiles.append((what, number(gauge.mean), unit, f"{number(gauge.largest)} at most, n = {gauge.samples:,}"))
    if (gauge := view.gauges.get(KV_USE)) is not None:
        tiles.append(("KV use", percent(gauge.mean), "", f"{percent(gauge.largest)} at most, n = {gauge.samples:,}"))
    if view.hit_rate is not None:
        tiles.append(("prefix hits", percent(view.hit_rate), "", "of the prompt tokens queried"))
    if view.preemptions is not None:
        tiles.append(("preemptions", number(view.preemptions), "", f"{number(view.finished)} requests finished"))
    for name, what in LATENCIES.items():
        if (latency := view.latencies.get(name)) is not None:
            tiles.append((f"{what} (server)", number(latency.mean * 1e3), "ms", f"mean of {number(latency.count)}"))
    return tiles


def accounts(view: ServerView) -> str:
    """Each account of the ledger and whether it can be seen in the server's metrics; closed until a reader asks."""
    rows = [
        [safe(account.account), chip(account.account.split(".")[0]),
         dot(SIGHT_COLOURS[account.visibility]) + safe(sight(account.visibility, view.title)), safe(account.why)]
        for account in view.accounts
    ]  # fmt: skip
    seen = sum(account.visibility == "seen" for account in view.accounts)
    return folded(
        f"{seen} of {len(rows)} accounts are seen", html_table(["account", "lifecycle", "seen", "because"], rows)
    )


def spans(view: ServerView) -> str:
    """The stretches of time that the server measures and a request spent, closed until a reader asks; and where what
    it does not explain lies."""
    spent = [span for span in view.spans if any((span.mean_ms, span.ttft_ms))]
    rows = [
        [f'<span style="white-space:nowrap" title="{safe(span.meaning)}">{safe(span.name)}</span>',
         number(span.mean_ms), number(span.ttft_ms), safe(", ".join(span.accounts))]
        for span in spent
    ]  # fmt: skip
    left = ""
    if view.inside_ms is not None and view.outside_ms is not None:
        left = wrap(
            f'<p class="sj-small">Unaccounted: {number(view.inside_ms)} ms inside {safe(view.title)}’s own end-to-end '
            f"latency, {number(view.outside_ms)} ms outside of it ({safe(', '.join(view.outside))}).</p>"
        )
    columns = ["interval", "mean (ms)", "to first token (ms)", "ledger accounts"]
    none = len(view.spans) - len(spent)
    words = f"The intervals in figures{f'; {none} in which no time was spent are left out' if none else ''}"
    return folded(words, html_table(columns, rows, right=(1, 2))) + left


def agreement(view: ServerView) -> str:
    """Counts of client and server side by side."""
    if not view.agreement:
        return wrap('<p class="sj-small sj-muted">Client and server share no count that could be compared.</p>')
    parts = []
    for pair in view.agreement:
        colour = STATUS_COLOURS["present" if counts_differ(pair) else "absent"]
        parts.append(f"{dot(colour)}{safe(pair.what)}: client {number(pair.client)}, server {number(pair.server)}")
    return wrap(f'<p class="sj-small"><b>Counts of both sides</b>: {"; ".join(parts)}.</p>')
