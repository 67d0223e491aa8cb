"""Figures of a server that is known by its own metrics only: parts of the mean latency, and its state over time."""

import pandas as pd
import plotly.graph_objects as go

from sojourn.diagnosis.foreign_server import ACCOUNT_SEPARATOR
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.interop.sources.pressure import KV_USE, RUNNING, WAITING
from sojourn.interop.sources.view import PREEMPTIONS
from sojourn.metrics.ledger import UNACCOUNTED
from sojourn.ui import theme
from sojourn.ui.text import number

NOTHING_SEEN = "No metric of the server was scraped, or it is of a kind that is not known here."
PANELS = ("in the server (requests)", "KV use (%)", "tokens per second")
TOKENS = {
    "sojourn_token_prompt_tokens_total": ("prompt tokens", "compute.prefill"),
    'sojourn_memory_prefix_tokens_total{result="hit"}': ("of them from the cache", "memory.recompute"),
    "sojourn_token_generated_tokens_total": ("output tokens", "compute.decode"),
}


def parts_of_the_time(diagnosis: Diagnosis) -> go.Figure:
    """Two bars: the mean latency to the last byte and to the first token, by the stretches that the server measures."""
    view = diagnosis.server
    if view is None or not diagnosis.ledger_share:
        return theme.note(NOTHING_SEEN)
    rows = {"the last byte": diagnosis.ledger_share, "the first token": diagnosis.ttft_share}
    named = {ACCOUNT_SEPARATOR.join(span.accounts): span for span in view.spans}
    x_title = "share of the client’s mean time from the intended send (%)"
    fig = theme.stacked_bars(list(rows), x_title, "until", range=[0, 100])
    for name in diagnosis.ledger_share:
        span = named.get(name)
        shares = [max(part.get(name, 0.0), 0.0) for part in rows.values()]
        if max(shares) < 0.0005:
            continue
        colour = theme.ACCOUNT_COLOURS.get(name.split(ACCOUNT_SEPARATOR)[0], theme.UNACCOUNTED_COLOUR)
        means = [span.mean_ms, span.ttft_ms] if span is not None else [None, None]
        theme.add_share_bars(
            fig, span.name if span is not None else name, list(rows), [100 * share for share in shares], shares,
            colour, "%{x:.1f}%, %{customdata[0]} on average<br>%{customdata[1]}",
            marker_line=dict(color="#FFFFFF", width=0.5),
            customdata=[[number(mean, "ms"), name if name != UNACCOUNTED else "what no metric explains"]
                        for mean in means],
        )  # fmt: skip
    return fig


def over_time(series: pd.DataFrame, begin_ns: float) -> go.Figure:
    """Three panels on one clock, a point a scrape: requests, KV use, tokens per second since the scrape before."""
    if series.empty:
        return theme.note(NOTHING_SEEN)
    at_s = (series.index.to_numpy(dtype="float64") - begin_ns) / 1e9
    seconds = pd.Series(at_s, index=series.index).diff()
    fig = theme.panels(PANELS, 620, 0.07, hovermode="x unified")
    for column, name, dash in ((RUNNING, "running", "dot"), (WAITING, "waiting", "solid")):
        if column in series:
            _line(fig, at_s, series[column], name, theme.COLOURS["request"], "%{y:,.0f} requests", 1, dash)
    if KV_USE in series:
        _line(fig, at_s, 100 * series[KV_USE], "KV use", theme.COLOURS["memory"], "%{y:.1f}%", 2)
    _preemptions(fig, at_s, series)
    for column, (name, account) in TOKENS.items():
        if column in series:
            rate = series[column] / seconds
            _line(fig, at_s, rate, name, theme.ACCOUNT_COLOURS[account], "%{y:,.0f} tokens per second", 3)
    return fig.update_yaxes(range=[0, 104], row=2, col=1)


def _line(
    fig: go.Figure, at_s, values: pd.Series, name: str, colour: str, shown: str, row: int, dash: str = "solid"
) -> None:
    fig.add_scatter(
        name=name, x=at_s, y=values, mode="lines", line=dict(color=colour, width=1.6, dash=dash),
        hovertemplate=f"{name}: {shown}<extra></extra>", row=row, col=1,
    )  # fmt: skip


def _preemptions(fig: go.Figure, at_s, series: pd.DataFrame) -> None:
    """A mark at each scrape that found new preemptions."""
    if PREEMPTIONS not in series or not (series[PREEMPTIONS] > 0).any():
        return
    found = (series[PREEMPTIONS] > 0).to_numpy()
    fig.add_scatter(
        name="preemptions", x=at_s[found], y=[100] * int(found.sum()), mode="markers",
        marker=dict(symbol="triangle-down", size=9, color=theme.ACCOUNT_COLOURS["memory.preempted"]),
        customdata=series[PREEMPTIONS][found], row=2, col=1,
        hovertemplate="%{customdata:,.0f} preemptions since the scrape before<extra></extra>",
    )  # fmt: skip
