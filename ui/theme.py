"""How everything looks: one plotly template and the colours of lifecycles, accounts, kinds and states.

A colour means one thing wherever it stands. The four lifecycles keep the colours of `metrics.ledger.COLOURS`, and the
accounts, token kinds and stages of a lifecycle are shades of its colour.
"""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sojourn.metrics.ledger import ACCOUNTS, COLOURS, UNACCOUNTED
from sojourn.ui.text import percent

FONT = "'Source Sans', Inter, 'Segoe UI', 'DejaVu Sans', Roboto, Helvetica, Arial, sans-serif"
INK, MUTED, LINE, PAPER = "#1F2933", "#5F6B7A", "#E3E7EC", "#FFFFFF"
# Ink and paper of a reader with a dark theme: what each colour of the light one becomes. Data keep their colours.
DARK = {
    INK: "#E6EAEE", MUTED: "#9AA5B1", LINE: "#303A45", "#C5CCD5": "#4A5663", "#334155": "#CBD5E1", "#64748B": "#94A3B8",
    "#E8ECF1": "#2A333D", "#B42318": "#F07167",
}  # fmt: skip
DARK_PAPER = "#11161C"
DARK_CSS = """:root {
  --sj-ink: #E6EAEE; --sj-text: #C5CCD5; --sj-muted: #9AA5B1; --sj-line: #303A45; --sj-line-strong: #4A5663;
  --sj-line-bold: #6B7785; --sj-soft: #1A2129; --sj-paper: #11161C; --sj-track: #242D37; --sj-focus: #CBD5E1;
  --sj-good: #4CC38A; --sj-warn: #E0A458; --sj-bad: #F58A80; --sj-accent: #56B4E9;
  --sj-primary: #5F8FD3; --sj-on-primary: #11161C; }
"""  # of style.css
OBJECTIVE_COLOUR = "#B42318"  # the line that an objective draws, and nothing else
UNACCOUNTED_COLOUR = "#D5DAE1"
GOOD, WARN, BAD, QUIET = "var(--sj-good)", "var(--sj-warn)", "var(--sj-bad)", "var(--sj-muted)"  # of style.css
STATE_COLOURS = {
    "healthy": GOOD, "degraded": WARN, "overloaded": BAD, "stuck": BAD, "inconclusive": QUIET, "invalid": QUIET,
}  # fmt: skip
# Cohorts (classes, or objectives side by side) are no lifecycle: their colours are none of the lifecycles'.
COHORT_COLOURS = ("#334155", "#D55E00", "#56B4E9", "#7C5CBF", "#8A6D3B", "#0F766E", "#BE185D", "#94A3B8")
# plotly offers to send charts to a cloud service; the bar that holds this button stays away.
CONFIG = {"displayModeBar": False, "responsive": True}
RUN_CLOCK = "time since the start of the run (s)"
NOTE_CHARACTERS = 40  # of a line: what fits into the narrowest column
MOST_POINTS = 4000  # of a scatter
LABELLED_SHARE = 0.06  # of a bar: room for its label


def shade(colour: str, towards_white: float) -> str:
    """The colour mixed with white (share 0 to 1), or with black where the share is negative; its hue stays."""
    target, share = (255 if towards_white > 0 else 0), abs(towards_white)
    parts = (int(colour[position : position + 2], 16) for position in (1, 3, 5))
    return "#" + "".join(f"{round(part + (target - part) * share):02x}" for part in parts)


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on the colour: at least 4.58 to 1 on any (WCAG 2.2)."""
    return "#000000" if luminance(colour) > 0.179 else "#FFFFFF"


def luminance(colour: str) -> float:
    """Of `#RRGGBB`, 0 to 1, as WCAG 2.2 defines it."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


# Apart from their neighbours in a bar; the account that usually dominates a lifecycle has the lifecycle's own colour.
_TOWARDS_WHITE = {
    "client.lag": -0.25, "client.network": 0.3,
    "token.encode": -0.35, "token.sample": 0.0, "token.decode": 0.5,
    "request.admission": 0.6, "request.queue": 0.0, "request.interference": -0.35, "request.stream": 0.35,
    "request.lost": -0.6, "request.quota": 0.75, "request.moderation": -0.5,
    "request.cold_start": 0.85, "request.routing": -0.75, "request.remote_prefill": 0.5,
    "memory.blocked": 0.0, "memory.preempted": -0.4, "memory.recompute": 0.5, "memory.adapter_load": 0.75,
    "memory.load": -0.2, "memory.store": 0.3, "memory.transfer": 0.15,
    "compute.prefill": -0.45, "compute.decode": 0.0, "compute.host": 0.5, "compute.draft": 0.3,
    "compute.communication": 0.65, "compute.bubble": 0.8, "compute.stall": -0.75,
}  # fmt: skip
ACCOUNT_COLOURS = {info.name: shade(COLOURS[info.lifecycle], _TOWARDS_WHITE[info.name]) for info in ACCOUNTS}
ACCOUNT_COLOURS[UNACCOUNTED] = UNACCOUNTED_COLOUR

KIND_COLOURS = {
    "prefill": ACCOUNT_COLOURS["compute.prefill"],
    "recompute": ACCOUNT_COLOURS["memory.recompute"],
    "decode": ACCOUNT_COLOURS["compute.decode"],
    "verify": ACCOUNT_COLOURS["token.sample"],
}
STAGE_COLOURS = {
    "receive": ACCOUNT_COLOURS["request.admission"],
    "schedule": ACCOUNT_COLOURS["request.queue"],
    "prepare": shade(COLOURS["compute"], 0.75),
    "launch": ACCOUNT_COLOURS["compute.host"],
    "wait": ACCOUNT_COLOURS["compute.decode"],
    "sample": ACCOUNT_COLOURS["token.sample"],
    "commit": shade(COLOURS["compute"], 0.25),
    "publish": ACCOUNT_COLOURS["request.interference"],
}
BLOCK_COLOURS = {
    "active": ACCOUNT_COLOURS["memory.blocked"],
    "reusable": ACCOUNT_COLOURS["memory.recompute"],
    "free": "#E8ECF1",
}
REFUSAL_COLOURS = {
    "batch_cap": ACCOUNT_COLOURS["request.queue"],
    "token_budget": ACCOUNT_COLOURS["request.routing"],
    "behind_head": ACCOUNT_COLOURS["request.admission"],
    "kv_blocks": ACCOUNT_COLOURS["memory.blocked"],
    "policy": ACCOUNT_COLOURS["request.stream"],
    "leader": ACCOUNT_COLOURS["compute.prefill"],
    "grammar": ACCOUNT_COLOURS["token.encode"],
    "kv_load": ACCOUNT_COLOURS["memory.load"],
    "kv_transfer": ACCOUNT_COLOURS["memory.transfer"],
    "adapter": ACCOUNT_COLOURS["client.network"],
    "quota": ACCOUNT_COLOURS["client.lag"],
}

_AXIS = dict(
    gridcolor=LINE, linecolor="#C5CCD5", zeroline=False, ticks="outside", ticklen=4, tickcolor="#C5CCD5",
    automargin=True, title=dict(font=dict(size=13, color=MUTED), standoff=8), tickformat=",",
    tickfont=dict(size=12, color=MUTED),
)  # fmt: skip
TEMPLATE = go.layout.Template(
    layout=dict(
        font=dict(family=FONT, size=13, color=INK),
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        colorway=list(COHORT_COLOURS),
        xaxis=_AXIS,
        yaxis=_AXIS,
        title=dict(font=dict(size=14, color=INK), x=0, xref="container", xanchor="left", y=0.99, yanchor="top"),
        margin=dict(l=8, r=16, t=34, b=8),
        legend=dict(orientation="h", yanchor="bottom", y=1, xanchor="left", x=0, font_size=12, traceorder="normal"),
        hoverlabel=dict(bgcolor=PAPER, bordercolor="#C5CCD5", font=dict(family=FONT, size=12, color=INK)),
        bargap=0.28,
        barcornerradius=0,
    )
)


def figure(height_px: int, **layout) -> go.Figure:
    """An empty figure in Sojourn's look, `height_px` high."""
    return go.Figure(layout=dict(template=TEMPLATE, height=height_px) | layout)


def panels(titles: Sequence[str], height_px: int, gap: float, **layout) -> go.Figure:
    """An empty figure of panels, one below the other, on the clock of the run; `titles` name their y axes."""
    fig = make_subplots(rows=len(titles), cols=1, shared_xaxes=True, vertical_spacing=gap)
    for row, title in enumerate(titles, start=1):
        fig.update_yaxes(title_text=title, rangemode="tozero", row=row, col=1)
    fig.update_xaxes(title_text="")
    fig.update_xaxes(title_text=RUN_CLOCK, row=len(titles), col=1)
    return fig.update_layout(template=TEMPLATE, height=height_px, **layout)


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A log axis that begins and ends at a labelled tick: some of each decade, or every decade of many. Labels of a
    narrow figure stand side by side."""
    decades = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    span = math.log10(max(values) / min(values))
    steps = (1, 2, 5) if span < 1.3 else (1, 3) if span < 2.5 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    first = max(tick for tick in ticks if tick <= min(values))
    last = min(tick for tick in ticks if tick > max(values))
    return {
        "type": "log", "range": [math.log10(first), math.log10(last)], "tickvals": ticks,
        "ticktext": [f"{tick:,g}" for tick in ticks],
    }  # fmt: skip


def thinned(points: pd.DataFrame) -> pd.DataFrame:
    """At most MOST_POINTS of them, evenly, so that the picture stays the same and the page light."""
    return points.iloc[:: len(points) // (MOST_POINTS + 1) + 1]


def note(text: str, height_px: int = 120) -> go.Figure:
    """A figure that says in a sentence why there is nothing to draw."""
    empty = figure(height_px, xaxis_visible=False, yaxis_visible=False)
    return empty.add_annotation(
        text="<br>".join(wrap(text, NOTE_CHARACTERS)), showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper",
        font=dict(size=13, color=MUTED),
    )  # fmt: skip


def labelled_bars(
    height_px: int, lengths: pd.Series, labels: list[str], colours: list[str], hover: str, x_title: str, y_title: str,
    **more: Any,
) -> go.Figure:  # fmt: skip
    """A bar for each row of `lengths`, from the top down, with its label behind its end."""
    fig = figure(height_px, showlegend=False)
    fig.add_bar(
        name=y_title, y=list(lengths.index), x=lengths.to_numpy(), text=labels, marker_color=colours, orientation="h",
        textposition="outside", cliponaxis=False, hovertemplate=f"{hover}<extra></extra>", **more,
    )  # fmt: skip
    fig.update_xaxes(title_text=x_title, range=[0, 1.6 * lengths.max() or 1], nticks=5)
    return fig.update_yaxes(title_text=y_title, autorange="reversed", ticks="")


def stacked_bars(rows: Sequence[str], x_title: str, y_title: str, **x_axis: Any) -> go.Figure:
    """A figure with a place for the bar of each of `rows`, from the top down; `add_share_bars` fills it."""
    fig = figure(150 + 46 * len(rows), barmode="stack")
    fig.update_xaxes(title_text=x_title, **x_axis)
    return fig.update_yaxes(title_text=y_title, autorange="reversed", ticks="", ticklabelstandoff=6)


def row_label(name: str, detail: str) -> str:
    return f"{name}<br><span style='color:{MUTED}'>{detail}</span>"


def add_share_bars(
    fig: go.Figure, name: str, rows: Sequence[str], lengths: Iterable[float], shares: Iterable[float], colour: str,
    hover: str, **more: Any,
) -> None:  # fmt: skip
    """One part of stacked horizontal bars, labelled with its share of each bar where the label fits."""
    bar = dict(
        text=[percent(share) if share >= LABELLED_SHARE else "" for share in shares], textposition="inside",
        textangle=0, insidetextanchor="middle", textfont=dict(size=11, color=ink_on(colour)), marker_color=colour,
    )  # fmt: skip
    fig.add_bar(name=name, y=rows, x=lengths, orientation="h", hovertemplate=f"{hover}<extra></extra>", **bar | more)


def add_distribution(
    fig: go.Figure, name: str, values: np.ndarray, colour: str, within: str, dash: str = "solid", **panel: int
) -> None:
    """The cumulative share of `values` [n], with 1,000 steps at most; `within` is the hover text of a value."""
    ordered = np.sort(values)
    steps = np.linspace(0, len(ordered) - 1, min(len(ordered), 1000)).astype(int)
    fig.add_scatter(
        name=f"{name} (n = {len(values):,})", x=ordered[steps], y=100 * (steps + 1) / len(ordered), mode="lines",
        line=dict(color=colour, width=2, dash=dash, shape="hv"),
        hovertemplate=f"{name}: %{{y:.0f}}% within {within}<extra></extra>", **panel,
    )  # fmt: skip


def objective_lines(fig: go.Figure, bounds: dict[float, str], top: float) -> go.Figure:
    """Draws a line from 0 to `top` at each objective's bound on the x axis; the legend holds its name.

    Names stand in the legend because two bounds may lie so close that labels beside them would overlap.
    """
    for (bound, name), dash in zip(bounds.items(), itertools.cycle(("dash", "dot", "dashdot")), strict=False):
        fig.add_scatter(
            name=name, x=[bound, bound], y=[0, top], mode="lines", hoverinfo="skip",
            line=dict(color=OBJECTIVE_COLOUR, width=1.5, dash=dash),
        )  # fmt: skip
    return fig


def in_the_dark(light: go.Figure) -> go.Figure:
    """The same figure for a dark theme: its ink and paper change, the colours of the data do not."""
    text = light.to_json()
    for colour, other in DARK.items():
        text = text.replace(f'"{colour}"', f'"{other}"').replace(f":{colour}'", f":{other}'")
    dark = go.Figure(json.loads(text))
    return dark.update_layout(
        paper_bgcolor=DARK_PAPER, plot_bgcolor=DARK_PAPER, hoverlabel_bgcolor=DARK_PAPER, meta="dark"
    )
