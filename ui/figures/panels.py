"""A panel of a Grafana dashboard as a Plotly figure: lines, stacks and heatmaps with the panel's unit and limits."""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import plotly.graph_objects as go

from sojourn.ui.panel_source import Line
from sojourn.ui.theme import ACCOUNT_COLOURS, COHORT_COLOURS, LINE, MUTED, OBJECTIVE_COLOUR

HEIGHT, LEGEND_LINE = 240, 19  # pixels
# Grafana's units → how Plotly writes a tick: format and what follows.
UNITS = {
    "s": ("~s", "s"), "percentunit": (".0%", ""), "bytes": ("~s", "B"), "Bps": ("~s", "B/s"), "flops": ("~s", "FLOP/s"),
    "reqps": ("~g", "/s"), "watt": ("~s", "W"), "hertz": ("~s", "Hz"), "celsius": ("~g", " °C"), "joule": ("~s", "J"),
    "bool_on_off": ("~g", ""),
}  # fmt: skip


def unit_of(panel: dict[str, Any]) -> str:
    """A suffix such as `suffix: tokens/s` is the unit's own word."""
    if panel["type"] == "heatmap":
        return panel["options"]["yAxis"].get("unit", "")
    return panel["fieldConfig"]["defaults"].get("unit", "")


def written(value: float, unit: str) -> str:
    """One figure with its unit, for a panel that shows a number."""
    if math.isnan(value):
        return "–"
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "s":
        return f"{value * 1000:,.0f} ms" if abs(value) < 1 else f"{value:,.2f} s"
    return f"{value:,.4g} {unit.removeprefix('suffix: ')}".rstrip()


def panel_figure(panel: dict[str, Any], lines: list[Line], events: Sequence[tuple[float, str, str]] = ()) -> go.Figure:
    """Lines over the wall clock. Series without a finite value are left out. `events`: when, what, its colour."""
    draw = {"heatmap": _heatmap, "state-timeline": _states}.get(panel["type"])
    figure = draw(lines) if draw else _lines(panel, lines)
    for second, what, colour in events:
        figure.add_vline(datetime.fromtimestamp(second), line={"color": colour, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=datetime.fromtimestamp(second), y=1, yref="paper", text="▾", showarrow=False, hovertext=what,
            font={"color": colour}, captureevents=True,
        )  # fmt: skip
    tick_format, suffix = UNITS.get(unit_of(panel), ("~s", ""))
    named = sum(trace.showlegend is not False for trace in figure.data)
    figure.update_layout(
        height=HEIGHT + LEGEND_LINE * max(0, math.ceil(named / 2) - 2), margin={"l": 8, "r": 8, "t": 6, "b": 6},
        hovermode="x unified", font={"size": 12}, plot_bgcolor="rgba(0,0,0,0)", paper_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "font": {"size": 11}},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=LINE, color=MUTED, nticks=5, tickformat="%H:%M:%S", tickangle=0, automargin=True)
    figure.update_yaxes(
        gridcolor=LINE, color=MUTED, nticks=6, automargin=True, tickformat=tick_format, ticksuffix=suffix
    )
    if draw is None:
        figure.update_yaxes(rangemode="tozero")
    if draw is _states:
        figure.update_yaxes(ticksuffix="", tickformat=None)
    return figure


def _lines(panel: dict[str, Any], lines: list[Line]) -> go.Figure:
    figure = go.Figure()
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    dashed = _dashed(panel)
    shown = [line for line in lines if any(map(math.isfinite, line.values))]
    own = _by_account(panel)
    for place, line in enumerate(shown):
        is_bound = line.labels["refId"] in dashed
        colour = OBJECTIVE_COLOUR if is_bound else own.get(line.name, COHORT_COLOURS[place % len(COHORT_COLOURS)])
        figure.add_scatter(
            x=[datetime.fromtimestamp(second) for second in line.seconds], y=line.values, name=line.name, mode="lines",
            line={"width": 1.5, "color": colour, "dash": "dash" if is_bound else "solid"},
            stackgroup="all" if stacked else None, connectgaps=False,
            showlegend=not stacked or any(value > 0 for value in line.values),
        )  # fmt: skip
    highest = max((value for line in shown for value in line.values if math.isfinite(value)), default=0.0)
    for step in defaults.get("thresholds", {}).get("steps", []):
        if step["value"] is not None and highest >= step["value"] / 2:  # a far limit would flatten the lines
            figure.add_hline(step["value"], line={"color": step["color"], "width": 1, "dash": "dot"})
    return figure


def _states(lines: list[Line]) -> go.Figure:
    """A bar for each series while it has a value."""
    figure = go.Figure()
    for line in lines:
        figure.add_scatter(
            x=[datetime.fromtimestamp(second) for second in line.seconds],
            y=[line.name if math.isfinite(value) else None for value in line.values], name=line.name, mode="lines",
            line={"width": 12, "color": "#D55E00"}, showlegend=False,
        )  # fmt: skip
    return figure


def _heatmap(lines: list[Line]) -> go.Figure:
    """Buckets are cumulative: each row is what it has above the one below."""
    ordered = sorted((line for line in lines if line.labels.get("le") != "+Inf"), key=lambda line: float(line.name))
    moments = sorted({second for line in ordered for second in line.seconds})
    rows, below = [], dict.fromkeys(moments, 0.0)
    for line in ordered:
        counts = dict(zip(line.seconds, line.values, strict=True))
        rows.append([max(0.0, counts.get(moment, 0.0) - below[moment]) for moment in moments])
        below |= counts
    kept = [place for place, row in enumerate(rows) if any(row)]
    figure = go.Figure()
    if kept:
        figure.add_heatmap(
            x=[datetime.fromtimestamp(moment) for moment in moments], y=[float(ordered[place].name) for place in kept],
            z=[rows[place] for place in kept], colorscale="Oranges", showscale=False,
        )  # fmt: skip
        figure.update_yaxes(type="log")
    return figure


def _dashed(panel: dict[str, Any]) -> set[str]:
    """The queries whose lines are objectives."""
    return {
        override["matcher"]["options"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["id"] == "byFrameRefID"
    }


def _by_account(panel: dict[str, Any]) -> dict[str, str]:
    """Accounts of the ledger have their own colours wherever they stand."""
    told = (word in target["expr"] for word in ("ledger", "llm:span_") for target in panel["targets"])
    return (
        ACCOUNT_COLOURS | {f"{name} (sojourn)": colour for name, colour in ACCOUNT_COLOURS.items()} if any(told) else {}
    )
