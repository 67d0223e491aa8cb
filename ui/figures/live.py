"""Figures of live servers: their last minutes, and where a request's time goes."""

from collections.abc import Sequence

import plotly.graph_objects as go

from sojourn.live.watch.document import Part
from sojourn.live.watch.moments import Moment
from sojourn.ui import theme
from sojourn.ui.text import number

PANELS = ("in the server (requests)", "KV use (%)", "tokens per second")
PART_COLOURS = {
    "queue": "request.queue", "prefill": "compute.prefill", "decode": "compute.decode",
    "others' prompts": "request.interference", "memory": "memory.preempted", "writing": "request.stream",
    "host": "compute.host", "text": "token.decode",
}  # fmt: skip
LINES = (  # field of Moment, name, account whose colour it has, factor, unit, panel, dash
    ("running", "running", "request.queue", 1, "requests", 1, "dot"),
    ("waiting", "waiting", "request.queue", 1, "requests", 1, "solid"),
    ("kv_use", "KV use", "memory.blocked", 100, "%", 2, "solid"),
    ("prompt_tokens_per_s", "prompt tokens", "compute.prefill", 1, "tokens per second", 3, "solid"),
    ("output_tokens_per_s", "output tokens", "compute.decode", 1, "tokens per second", 3, "solid"),
)


def history(moments: Sequence[Moment]) -> go.Figure:
    """Three panels on one clock that ends now, a point a scrape."""
    if len(moments) < 2:
        return theme.note("The history begins with the second scrape.")
    at_s = [(moment.ns - moments[-1].ns) / 1e9 for moment in moments]
    fig = theme.panels(PANELS, 420, 0.08, hovermode="x unified")
    for field, name, account, factor, unit, row, dash in LINES:
        values = [None if (value := getattr(moment, field)) is None else factor * value for moment in moments]
        if any(value is not None for value in values):
            fig.add_scatter(
                name=name, x=at_s, y=values, mode="lines", row=row, col=1,
                line=dict(color=theme.ACCOUNT_COLOURS[account], width=1.6, dash=dash),
                hovertemplate=f"{name}: %{{y:,.1f}} {unit}<extra></extra>",
            )  # fmt: skip
    fig.update_yaxes(range=[0, 104], row=2, col=1)
    return fig.update_xaxes(title_text="seconds until now", row=3, col=1)


def parts(found: Sequence[Part]) -> go.Figure:
    """One bar: the mean request's time in the server, of those that ended in the window."""
    if not found:
        return theme.note("No request ended in the window.")
    fig = theme.stacked_bars(["a request"], "share of the mean request’s time in the server (%)", "", range=[0, 100])
    for part in found:
        colour = theme.ACCOUNT_COLOURS.get(PART_COLOURS.get(part.name, ""), theme.UNACCOUNTED_COLOUR)
        theme.add_share_bars(
            fig, part.name, ["a request"], [100 * part.share], [part.share], colour,
            f"{part.name}: %{{x:.1f}}%, {number(part.mean_ms, 'ms')} on average",
        )  # fmt: skip
    return fig
