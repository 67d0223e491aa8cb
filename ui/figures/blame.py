"""Figures of who delayed whom: the blame matrix as a heat map, waits by reason, and one gap between two tokens."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale, unlabel_rgb

from sojourn.metrics.request.blame import UNEXPLAINED
from sojourn.metrics.request.token_gaps import Gap
from sojourn.ui import theme
from sojourn.ui.text import distinct, duration, label, numbered, percent

MOST_LABELLED, LABELLED_SHARE = 14, 0.02  # columns whose cells have labels; of a row's waiting, to have one
HEAT_SCALE = [[0, "#FFFFFF"], [0.15, "#F6E3EE"], [0.5, "#CC79A7"], [1, "#6B2A4E"]]
WAIT_COLOURS = theme.REFUSAL_COLOURS | {
    "step": theme.ACCOUNT_COLOURS["compute.decode"],
    "preempted": theme.ACCOUNT_COLOURS["memory.preempted"],
    "prompts of others": theme.ACCOUNT_COLOURS["request.interference"],
}
ROUNDING = 1e-5  # a column with a smaller share of the whole is a rounding error


def heat_map(caused_ns: pd.DataFrame, victims: str, offenders: str) -> go.Figure:
    """A blame matrix: rows wait, columns are why. `victims` and `offenders` say what rows and columns are."""
    shown = caused_ns.loc[caused_ns.sum(axis=1) > 0]
    shown = shown.loc[:, shown.abs().sum() > ROUNDING * shown.to_numpy().sum()]
    if shown.empty:
        return theme.note("No request waited for another one.")
    seconds = shown.to_numpy() / 1e9
    rows, columns = _labels(shown.index), _labels(shown.columns)
    fig = theme.figure(150 + 26 * len(rows) + 6 * max(map(len, columns)))
    share = np.divide(seconds, seconds.sum(axis=1, keepdims=True))
    fig.add_heatmap(
        name="waited", z=np.clip(seconds, 0, None), x=columns, y=rows, colorscale=HEAT_SCALE, zmin=0,
        zmax=seconds.max(), xgap=1, ygap=1,
        customdata=100 * share,
        colorbar=dict(title=dict(text="waited (s)", side="right", font_size=13), thickness=12, outlinewidth=0),
        hovertemplate="%{y} waited %{z:.3f} s for %{x}<br>%{customdata:.1f}% of its waiting<extra></extra>",
    )  # fmt: skip
    if len(columns) <= MOST_LABELLED:
        for row, column in np.argwhere(np.abs(share) >= LABELLED_SHARE):
            fig.add_annotation(
                x=int(column), y=int(row), text=duration(seconds[row, column] * 1e9), showarrow=False,
                font=dict(size=11, color=_ink(seconds[row, column] / seconds.max())),
            )  # fmt: skip
    angle = -35 if len(columns) > 4 else 0
    fig.update_xaxes(title_text=offenders, type="category", ticks="", showgrid=False, tickangle=angle)
    fig.update_yaxes(title_text=victims, type="category", ticks="", showgrid=False, autorange="reversed")
    return fig


def _ink(share: float) -> str:
    """Of a label on the colour of HEAT_SCALE at a share of it."""
    red, green, blue = unlabel_rgb(sample_colorscale(HEAT_SCALE, [min(max(share, 0.0), 1.0)])[0])
    return theme.ink_on(f"#{round(red):02x}{round(green):02x}{round(blue):02x}")


def _labels(names: pd.Index) -> list[str]:
    """Short labels that stay different; requests lose what all of them share."""
    plain = [str(name) or "(none)" for name in names]
    own = [name for name in plain if " " not in name]
    short = dict(zip(own, distinct(own, 20), strict=True)) if len(own) > 2 else {}
    return numbered([short.get(name, label(name, 28)) for name in plain])


def waits_by_reason(waited_ns: pd.DataFrame) -> go.Figure:
    """Stacked bars: what each cohort (row) waited for by reason (column), mean per request. The last column `requests`
    is the cohort's size."""
    reasons = [name for name in waited_ns.columns if name != "requests" and waited_ns[name].sum() > 0]
    if not reasons:
        return theme.note("No request waited for another.")
    rows = [
        theme.row_label(label(name, 22), f"n = {count:,.0f}")
        for name, count in zip(waited_ns.index, waited_ns.requests, strict=True)
    ]
    fig = theme.stacked_bars(rows, "waited for, mean of a request (ms)", "cohort", rangemode="tozero")
    total = waited_ns[reasons].sum(axis=1)
    for reason in reasons:
        mean_ms = waited_ns[reason] / waited_ns.requests / 1e6
        part = waited_ns[reason] / total.where(total > 0)
        theme.add_share_bars(
            fig, reason, rows, mean_ms, part.fillna(0), WAIT_COLOURS.get(reason, theme.UNACCOUNTED_COLOUR),
            f"<b>{reason}</b>: %{{x:,.1f}} ms per request, %{{customdata:.1f}}% of the waiting", customdata=100 * part,
        )  # fmt: skip
    return fig


def offenders(blamed: pd.DataFrame, total_ns: float, count: int = 8) -> go.Figure:
    """The requests that delayed one request: a bar for each, by reason; `blamed` is `blame_of`."""
    if blamed.empty:
        return theme.note("Nobody delayed this request.")
    named = blamed.assign(reason=blamed.reason.replace({"prompt": "prompts of others"}))
    order = named.groupby("offender").ns.sum().sort_values(ascending=False, kind="stable")
    top = order.index[:count]
    rows = dict(zip(top, distinct(list(top), 24), strict=True))
    table = named.assign(row=named.offender.map(rows).fillna(f"{len(order) - len(top)} others"))
    left = total_ns - float(order.sum())
    names = [*rows.values(), *([f"{len(order) - len(top)} others"] if len(order) > len(top) else [])]
    fig = theme.figure(150 + 26 * (len(names) + 1), barmode="stack")
    for reason, part in table.groupby("reason", sort=False):
        sums = part.groupby("row").ns.sum() / 1e6
        fig.add_bar(
            name=str(reason), y=list(sums.index), x=sums.to_numpy(), orientation="h",
            marker_color=WAIT_COLOURS.get(str(reason), theme.UNACCOUNTED_COLOUR),
            hovertemplate=f"%{{y}}<br>{reason}: %{{x:,.2f}} ms<extra></extra>",
        )  # fmt: skip
    if abs(left) >= 1e4:
        fig.add_bar(
            name=UNEXPLAINED, y=[UNEXPLAINED], x=[max(left, 0) / 1e6], orientation="h",
            marker_color=theme.UNACCOUNTED_COLOUR,
            hovertemplate="what the steps do not explain: %{x:,.2f} ms<extra></extra>",
        )  # fmt: skip
        names.append(UNEXPLAINED)
    fig.update_xaxes(title_text="waiting that it caused this request (ms)", rangemode="tozero")
    fig.update_yaxes(title_text="request", categoryorder="array", categoryarray=names[::-1], ticks="", showgrid=False)
    return fig


def gap(found: Gap) -> go.Figure:
    """One gap between two tokens, account by account, as one bar."""
    if not found.accounts:
        return theme.note("Nothing is booked in this gap.")
    fig = theme.figure(120 + 20 * len(found.accounts), barmode="stack")  # in a narrow column each has a line of legend
    for name, ns in found.accounts.items():
        share = ns / max(found.length_ns, 1)
        theme.add_share_bars(
            fig, name, [f"token {found.token:,}"], [ns / 1e6], [share], theme.ACCOUNT_COLOURS[name],
            f"<b>{name}</b>: %{{x:,.3f}} ms, {percent(share)} of the gap",
        )  # fmt: skip
    since = "the arrival" if found.token == 0 else f"token {found.token - 1:,}"
    fig.update_xaxes(title_text=f"time since {since} (ms)", rangemode="tozero")
    fig.update_yaxes(title_text="", showticklabels=False, ticks="")
    return fig


def gap_lengths(token_ns: list[int], slowest: list[int], chosen: int) -> go.Figure:
    """The time before each output token of a request, the slowest ones marked."""
    stamps = np.asarray(token_ns, dtype="float64")
    if len(stamps) < 2:
        return theme.note("This request has no two output tokens, so there is no gap between them.")
    gaps = np.diff(stamps) / 1e6
    fig = theme.figure(250)
    fig.add_scatter(
        name="time before a token", x=np.arange(1, len(stamps)), y=gaps, mode="lines+markers",
        line=dict(color=theme.ACCOUNT_COLOURS["compute.decode"], width=1), marker=dict(size=4),
        hovertemplate="token %{x}: %{y:,.2f} ms after the one before<extra></extra>",
    )  # fmt: skip
    marked = [token for token in dict.fromkeys([*slowest, chosen]) if 1 <= token < len(stamps)]
    fig.add_scatter(
        name="slowest", x=marked, y=[gaps[token - 1] for token in marked], mode="markers",
        marker=dict(size=10, symbol="circle-open", color=theme.OBJECTIVE_COLOUR, line_width=2),
        hovertemplate="token %{x}: %{y:,.2f} ms<extra></extra>",
    )  # fmt: skip
    fig.update_xaxes(title_text="output token", tickformat="d", type="linear")
    fig.update_yaxes(title_text="time since the token before (ms)", rangemode="tozero")
    return fig
