"""Figures of what users get: attainment, latencies against their objective."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from sojourn.metrics.request.goodput import ClassGoodput
from sojourn.metrics.request.objectives import OBJECTIVE_NAMES, objectives_of
from sojourn.ui import theme
from sojourn.ui.tables.request import classes
from sojourn.ui.text import label, number, percent

GOOD_SCALE = [[0, "#B42318"], [0.5, "#E9C46A"], [1, "#1A7F4B"]]


ALL_COLOUR = "#4A6FA5"  # of all objectives: seen on light and dark paper
LABELS_PX = 130  # room for a share with its interval


def attainment(goodput: list[ClassGoodput]) -> go.Figure:
    """Share of the sent requests that met all objectives, and each of them, by class."""
    if not goodput or not any(group.objectives for group in goodput):
        return theme.note("The scenario names no objective, so there is no attainment to show.")
    rows = [label(group.klass, 24) + f"  (n = {group.sent:,})" for group in goodput]
    named = list(dict.fromkeys(name for group in goodput for name in group.attainment_by_objective))
    fig = theme.figure(max(170, 90 + 26 * len(goodput) * (1 + len(named))), barmode="group")
    series = [("all objectives", [group.attainment for group in goodput], ALL_COLOUR, None)]
    for name, colour in zip(named, ("#7B8CA3", "#A9B6C6", "#CBD4DF"), strict=False):
        shares = [group.attainment_by_objective.get(name) for group in goodput]
        series.append((OBJECTIVE_NAMES.get(name, name), shares, colour, name))
    for name, shares, colour, objective in series:
        is_all = objective is None
        fig.add_bar(
            name=name, y=rows, x=[None if share is None else 100 * share for share in shares], orientation="h",
            error_x=_interval_bars(goodput) if is_all else None, marker_color=colour, offsetgroup=name,
            hovertemplate=f"<b>%{{y}}</b><br>{name}: %{{x:.1f}}%<extra></extra>",
        )  # fmt: skip
        words = [
            percent(share) + (_interval(group) if is_all else _counted(group, objective))
            for share, group in zip(shares, goodput, strict=True)
        ]
        fig.add_bar(  # of no length, behind the longest bar and interval: its label meets neither
            name=f"{name}, in figures",
            y=rows, x=[0] * len(rows), base=[100] * len(rows), orientation="h", offsetgroup=name, showlegend=False,
            text=words, textposition="outside", textangle=0, cliponaxis=False, hoverinfo="skip",
        )  # fmt: skip
    fig.update_xaxes(title_text="requests that met the objective (% of sent)", range=[0, 100])
    fig.update_yaxes(title_text="class (requests)", autorange="reversed")
    return fig.update_layout(margin_r=LABELS_PX)


def _counted(group: ClassGoodput, objective: str | None) -> str:
    """Of how many requests a share is, where it could not be measured of all."""
    counted = group.judged_by_objective.get(objective, group.sent)
    return f" of {counted:,}" if counted != group.sent else ""


def _interval(group: ClassGoodput) -> str:
    interval = group.attainment_interval
    if interval is None or interval.low is None or interval.high is None:
        return ""
    return f" ({percent(interval.low)} to {percent(interval.high)})"


def _interval_bars(goodput: list[ClassGoodput]) -> dict | None:
    """The 95% interval of each class's attainment, as plotly's lengths to both sides of the bar's end."""
    if any(group.attainment_interval is None for group in goodput):
        return None
    known = [(100 * group.attainment, group.attainment_interval) for group in goodput]
    return dict(
        type="data", symmetric=False, thickness=1.5, width=4, color=GOOD_SCALE[1][1],  # shows on dark and light
        array=[100 * (interval.high or 0.0) - share for share, interval in known],
        arrayminus=[share - 100 * (interval.low or 0.0) for share, interval in known],
    )  # fmt: skip


def latency_distribution(requests: pd.DataFrame, latency: str, bounds: dict[str, float]) -> go.Figure:
    """Cumulative share of served requests by a latency of OBJECTIVES, a line a class, with the objective's bounds.

    `bounds` gives the bound in ms by class; equal bounds are drawn once.
    """
    known = requests[requests[latency].notna()]
    name = OBJECTIVE_NAMES[latency]
    if known.empty:
        return theme.note(f"No request has a {name}.")
    fig = theme.figure(290 + 20 * (len(classes(known)) + len(set(bounds.values()))))
    for position, klass in enumerate(classes(known)):
        values = known.loc[known.klass.fillna("") == klass, latency].to_numpy()
        colour = theme.COHORT_COLOURS[position % len(theme.COHORT_COLOURS)]
        theme.add_distribution(fig, label(klass, 24) or "requests", values, colour, "%{x:,.1f} ms")
    theme.objective_lines(fig, _named(bounds), 100)
    fig.update_xaxes(title_text=f"{name} (ms, log scale)", **_log_axis(known[latency], bounds))
    fig.update_yaxes(title_text="requests (cumulative %)", range=[0, 102])
    return fig


def throughput_against_tpot(windows: pd.DataFrame, bounds: dict[str, float]) -> go.Figure:
    """Output tokens per second against time per output token, a point a window of the run, as goodput_by_tpot gives it.

    The colour is the share of the window's tokens that belong to good requests, the size the open streams; `bounds`
    gives the objective in ms by class.
    """
    known = windows[windows.tpot_ms.notna()]
    if known.empty:
        return theme.note("In no window of this run did a client wait for a next token.")
    fig = theme.figure(400)
    most = max(known.streams.max(), 1.0)
    fig.add_scatter(
        name="a window of the run", x=known.tpot_ms, y=known.tokens_per_s, mode="markers",
        marker=dict(
            size=8 + 16 * np.sqrt(known.streams / most), opacity=0.85, line=dict(color="#FFFFFF", width=1),
            color=100 * (known.good_tokens_per_s / known.tokens_per_s).fillna(0.0),
            colorscale=GOOD_SCALE, cmin=0, cmax=100, showscale=True,
            colorbar=dict(
                title=dict(text="tokens of good requests (%)", side="right", font_size=13), thickness=12,
                outlinewidth=0, len=1.0,
            ),
        ),
        customdata=np.stack([known.begin_s, known.streams, known.good_tokens_per_s], axis=1),
        hovertemplate="from second %{customdata[0]:.0f}: %{customdata[1]:.1f} streams<br>%{x:.1f} ms per output token"
        "<br>%{y:.0f} output tokens/s, %{customdata[2]:.0f} of them good<extra></extra>",
    )  # fmt: skip
    theme.objective_lines(fig, _named(bounds), known.tokens_per_s.max() * 1.12)
    fig.update_xaxes(title_text="time per output token (ms, log scale)", **_log_axis(known.tpot_ms, bounds))
    fig.update_yaxes(title_text="output tokens per second", range=[0, known.tokens_per_s.max() * 1.12])
    return fig


def bounds(requests: pd.DataFrame, objectives: list[dict], latency: str) -> dict[str, float]:
    """The objective of a latency in ms by class, for those classes of the run that have one."""
    limits_by_class = {klass: objectives_of(klass, objectives) for klass in classes(requests)}
    return {klass: limits[latency] for klass, limits in limits_by_class.items() if latency in limits}


def quantile_table(goodput: list[ClassGoodput]) -> pd.DataFrame:
    """Quantiles of each latency by class as text in ms, `–` where too few requests make one a guess."""
    rows = []
    for group in goodput:
        for latency, quantiles in group.quantiles_ms.items():
            row = {"latency (ms)": OBJECTIVE_NAMES.get(latency, latency), "class": group.klass or "(no class)"}
            row |= {"served": f"{group.completed:,}", "sent": f"{group.sent:,}"}
            rows.append(row | {name: number(value) for name, value in quantiles.items()})
    table = pd.DataFrame(rows)
    return table.sort_values("latency (ms)", kind="stable", ascending=False).fillna("–") if rows else table


def _named(bounds: dict[str, float]) -> dict[float, str]:
    """The label of each bound: with its classes where classes have different ones."""
    groups: dict[float, list[str]] = {}
    for klass, bound in bounds.items():
        groups.setdefault(bound, []).append(label(klass, 20))
    several = len(groups) > 1
    return {
        bound: f"objective ≤ {number(bound, 'ms')}" + (f" ({', '.join(names)})" if several else "")
        for bound, names in sorted(groups.items())
    }


def _log_axis(values: pd.Series, bounds: dict[str, float]) -> dict:
    """Without the lowest half percent: one instant answer would push all others aside."""
    points = [value for value in (values.quantile(0.005), values.max(), *bounds.values()) if value > 0]
    axis = theme.log_axis(points or [0.1, 10])
    low, high = axis["range"]
    return axis | {"range": [low, high + 0.05 * (high - low)]}  # room for the last label
