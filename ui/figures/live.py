"""Figures of live servers: their last minutes, percentiles of latencies, goodput, and where a request's time goes."""

from collections.abc import Sequence

import plotly.graph_objects as go

from sojourn.live.watch.document import Part
from sojourn.live.watch.moments import Moment
from sojourn.live.watch.percentiles import LATENCIES, LatencyPoint
from sojourn.ui import theme
from sojourn.ui.text import number

PANELS = ("in the server (requests)", "KV use (%)", "tokens per second")
PART_COLOURS = {
    "queue": "request.queue", "prefill": "compute.prefill", "decode": "compute.decode",
    "others' prompts": "request.interference", "memory": "memory.preempted", "writing": "request.stream",
    "host": "compute.host", "text": "token.decode",
}  # fmt: skip
BANDS = {"p50": "compute.decode", "p99": "request.queue"}  # account whose colour it has
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


def percentiles(points: Sequence[LatencyPoint]) -> go.Figure:
    """A panel per latency: p50 and p99 as bands, each between the two bounds of the server's buckets."""
    seen = [name for name in LATENCIES if any(name in point.between_ms for point in points)]
    if len(points) < 2 or not seen:
        return theme.note("No request ended in the last minutes, or the server has no histograms of latencies.")
    at_s = [(point.ns - points[-1].ns) / 1e9 for point in points]
    fig = theme.panels([f"{name} (ms)" for name in seen], 130 + 110 * len(seen), 0.08, hovermode="x unified")
    for row, name in enumerate(seen, start=1):
        for place, account in BANDS.items():
            found = [point.between_ms.get(name, {}).get(place) for point in points]
            lows = [None if each is None else each[0] for each in found]
            highs = [None if each is None else each[0] if each[1] is None else each[1] for each in found]
            texts = ["" if each is None else between(*each) for each in found]
            line = dict(color=theme.ACCOUNT_COLOURS[account], width=1.4, shape="hv")
            fig.add_scatter(
                x=at_s, y=lows, mode="lines", line=line | {"width": 0}, showlegend=False, hoverinfo="skip",
                legendgroup=place, row=row, col=1,
            )  # fmt: skip
            fig.add_scatter(
                name=place, x=at_s, y=highs, mode="lines", line=line, fill="tonexty", legendgroup=place,
                showlegend=row == 1, customdata=texts, hovertemplate=f"{place}: %{{customdata}}<extra></extra>",
                row=row, col=1,
            )  # fmt: skip
        fig.update_yaxes(rangemode="tozero", row=row, col=1)
    return fig.update_xaxes(title_text="seconds until now", row=len(seen), col=1)


def between(low: float, high: float | None) -> str:
    return f"above {number(low, 'ms')}" if high is None else f"{number(low)} to {number(high, 'ms')}"


def goodput(points: Sequence[LatencyPoint]) -> go.Figure | None:
    """Goodput in requests and in tokens; None where the server and the reader name no objective."""
    at_s = [(point.ns - points[-1].ns) / 1e9 for point in points]
    has_requests = any(point.goodput_rps is not None for point in points)
    has_tokens = any(point.good_tokens_per_s is not None for point in points)
    titles = ["good requests/s"] * has_requests + ["good tokens/s"] * has_tokens
    if len(points) < 2 or not titles:
        return None
    fig = theme.panels(titles, 90 + 120 * len(titles), 0.12, hovermode="x unified")
    line = dict(color=theme.ACCOUNT_COLOURS["compute.decode"], width=1.4, shape="hv")
    if has_requests:
        bounds = [point.goodput_rps or (None, None) for point in points]
        fig.add_scatter(x=at_s, y=[low for low, _ in bounds], mode="lines", line=line, showlegend=False, row=1, col=1,
                        hovertemplate="at least %{y:.3g} requests per second<extra></extra>")  # fmt: skip
        fig.add_scatter(x=at_s, y=[high for _, high in bounds], mode="lines", line=line, fill="tonexty",
                        showlegend=False, row=1, col=1,
                        hovertemplate="at most %{y:.3g} requests per second<extra></extra>")  # fmt: skip
    if has_tokens:
        fig.add_scatter(x=at_s, y=[point.good_tokens_per_s for point in points], mode="lines", line=line,
                        showlegend=False, row=len(titles), col=1,
                        hovertemplate="%{y:,.1f} tokens per second<extra></extra>")  # fmt: skip
    fig.update_yaxes(rangemode="tozero")
    return fig.update_xaxes(title_text="seconds until now", row=len(titles), col=1)


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
