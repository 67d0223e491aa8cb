"""Figures of two runs side by side: aligned ledgers, what each account differs by, latencies, and pairs of requests."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from sojourn.metrics.compare.sides import ALL_ACCOUNTS, AccountDifference, LedgerDifference
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.request.objectives import OBJECTIVE_NAMES
from sojourn.ui import theme
from sojourn.ui.text import number, percent

A_COLOUR, B_COLOUR = theme.COHORT_COLOURS[0], theme.COHORT_COLOURS[1]
DIVERGING = [[0.0, "#2166AC"], [0.5, "#F1F5F9"], [1.0, "#B2182B"]]  # shorter, alike, longer
SMALLEST_SHARE = 0.002  # of the longer side: accounts below it are in the table only


def aligned_ledgers(found: LedgerDifference, names: tuple[str, str]) -> go.Figure:
    """Two bars on one scale: the mean request of each run, account by account."""
    rows = [
        theme.row_label(f"{side}: {name}", f"n = {count:,}")
        for side, name, count in zip("AB", names, found.requests, strict=True)
    ]
    fig = theme.stacked_bars(rows, "mean time of a request, from the intended send (ms)", "run", rangemode="tozero")
    total = next(row for row in found.rows if row.account == ALL_ACCOUNTS)
    for row in found.rows:
        if row.account == ALL_ACCOUNTS or max(row.a_ms, row.b_ms) < SMALLEST_SHARE * max(total.a_ms, total.b_ms):
            continue
        lengths = [max(row.a_ms, 0.0), max(row.b_ms, 0.0)]
        shares = [part / whole if whole else 0.0 for part, whole in zip(lengths, (total.a_ms, total.b_ms), strict=True)]
        theme.add_share_bars(
            fig, row.account, rows, lengths, shares, theme.ACCOUNT_COLOURS[row.account],
            f"<b>{row.account}</b>: %{{x:,.1f}} ms, %{{customdata}} of the request",
            customdata=[percent(share) for share in shares], marker_line=dict(color="#FFFFFF", width=0.5),
        )  # fmt: skip
    return fig


class Box(NamedTuple):
    """Of an icicle. `width_ms` is its own, beside its parts."""

    name: str
    parent: str
    a_ms: float
    b_ms: float
    width_ms: float = 0.0
    is_open: bool = False  # its interval holds 0

    @property
    def change_ms(self) -> float:
        return self.b_ms - self.a_ms


def icicle_of_differences(found: LedgerDifference) -> go.Figure:
    """Both ledgers as one icicle: the request, its lifecycles, their accounts. A box is as wide as the longer of both
    sides, and its colour says by how much B is longer or shorter; pale where the interval leaves it open."""
    boxes = _boxes(found)
    most = max((abs(each.change_ms) for each in boxes if each.width_ms), default=0.0) or 1.0
    fig = theme.figure(330)
    fig.add_icicle(
        labels=[each.name for each in boxes], parents=[each.parent for each in boxes],
        values=[each.width_ms for each in boxes], branchvalues="remainder", sort=False,
        tiling=dict(orientation="v", pad=1),
        marker=dict(
            colors=[0.0 if each.is_open else each.change_ms for each in boxes], colorscale=DIVERGING, cmin=-most,
            cmid=0.0, cmax=most, showscale=True, colorbar=dict(title="B − A (ms)", thickness=12),
        ),
        text=[f"{each.change_ms:+,.1f} ms" for each in boxes], texttemplate="%{label}<br>%{text}",
        customdata=[[number(each.a_ms), number(each.b_ms)] for each in boxes], meta=["A (ms)", "B (ms)"],
        hovertemplate="<b>%{label}</b>: %{text}<br>A %{customdata[0]} ms, B %{customdata[1]} ms<extra></extra>",
    )  # fmt: skip
    return fig.update_layout(margin=dict(l=8, r=8, t=8, b=8))


def _boxes(found: LedgerDifference) -> list[Box]:
    """The request, then each lifecycle with its accounts."""
    lifecycles = {info.name: info.lifecycle for info in ACCOUNTS}
    total = next(row for row in found.rows if row.account == ALL_ACCOUNTS)
    groups: dict[str, list[AccountDifference]] = {}
    for row in found.rows:
        if row.account != ALL_ACCOUNTS and max(row.a_ms, row.b_ms) > 0:
            groups.setdefault(lifecycles.get(row.account, "other"), []).append(row)
    boxes = [Box(ALL_ACCOUNTS, "", total.a_ms, total.b_ms, is_open=_is_open(total))]
    for name, rows in groups.items():
        boxes.append(Box(name, ALL_ACCOUNTS, sum(row.a_ms for row in rows), sum(row.b_ms for row in rows)))
        boxes += [Box(row.account, name, row.a_ms, row.b_ms, max(row.a_ms, row.b_ms), _is_open(row)) for row in rows]
    return boxes


def _is_open(row: AccountDifference) -> bool:
    return row.low_ms is not None and row.high_ms is not None and row.low_ms <= 0 <= row.high_ms


def differences(found: LedgerDifference) -> go.Figure:
    """B − A by account with its 95% interval, in the order of the ledger; the sum below."""
    total = next(row for row in found.rows if row.account == ALL_ACCOUNTS)
    least = SMALLEST_SHARE * max(total.a_ms, total.b_ms)
    rows = [row for row in found.rows if max(abs(row.difference_ms), row.a_ms, row.b_ms) >= least]
    names = [row.account for row in rows]
    fig = theme.figure(120 + 25 * len(rows), showlegend=False)
    colours = [theme.ACCOUNT_COLOURS.get(name, A_COLOUR) for name in names]
    known = [row.low_ms is not None for row in rows]
    fig.add_bar(
        y=names, x=[row.difference_ms for row in rows], orientation="h", marker_color=colours,
        error_x=dict(
            type="data", symmetric=False, thickness=1.5, width=4, color="#64748B",
            array=[(row.high_ms or 0.0) - row.difference_ms if row.high_ms is not None else 0.0 for row in rows],
            arrayminus=[row.difference_ms - row.low_ms if row.low_ms is not None else 0.0 for row in rows],
        ) if any(known) else None,
        customdata=[[number(row.a_ms), number(row.b_ms), number(row.low_ms), number(row.high_ms)] for row in rows],
        hovertemplate="<b>%{y}</b>: %{x:+,.2f} ms<br>A %{customdata[0]} ms, B %{customdata[1]} ms<br>95%: "
        "%{customdata[2]} to %{customdata[3]} ms<extra></extra>",
    )  # fmt: skip
    fig.add_vline(x=0, line=dict(color=theme.MUTED, width=1))
    fig.update_xaxes(title_text="B − A, mean of a request (ms)")
    return fig.update_yaxes(title_text="account", autorange="reversed", ticks="", showgrid=False)


def distributions(a: pd.DataFrame, b: pd.DataFrame, latency: str) -> go.Figure:
    """Cumulative share of the served requests of both runs by a latency of OBJECTIVES."""
    sides = [rows[latency].dropna().astype("float64").to_numpy() for rows in (a, b)]
    positive = np.concatenate([side[side > 0] for side in sides])
    if not len(positive):
        return theme.note(f"No request has a {OBJECTIVE_NAMES[latency]}.")
    fig = theme.figure(290)
    for name, values, colour, dash in zip("AB", sides, (A_COLOUR, B_COLOUR), ("solid", "dash"), strict=True):
        if len(values):
            theme.add_distribution(fig, name, values, colour, "%{x:,.1f} ms", dash)
    axis = theme.log_axis([float(np.quantile(positive, 0.005)), float(positive.max())])
    fig.update_xaxes(title_text=f"{OBJECTIVE_NAMES[latency]} (ms, log scale)", **axis)
    return fig.update_yaxes(title_text="requests (cumulative %)", range=[0, 102])


def pairs(table: pd.DataFrame, latency: str = "e2e_ms") -> go.Figure:
    """A point a request of the schedule: its latency in A and in B. Below the line B was faster."""
    known = theme.thinned(table[table[f"{latency}_a"].gt(0) & table[f"{latency}_b"].gt(0)])
    if known.empty:
        return theme.note("No request was served in both runs.")
    x, y = known[f"{latency}_a"], known[f"{latency}_b"]
    fig = theme.figure(400)
    names = list(known.klass.value_counts().index)
    for place, name in enumerate(names):
        part = known[known.klass == name]
        fig.add_scattergl(
            name=name or "requests", x=part[f"{latency}_a"], y=part[f"{latency}_b"], mode="markers",
            marker=dict(size=6, opacity=0.7, color=theme.COHORT_COLOURS[place % len(theme.COHORT_COLOURS)]),
            customdata=part[["request_a", "account", "account_ms"]],
            hovertemplate="%{customdata[0]}<br>A %{x:,.1f} ms, B %{y:,.1f} ms<br>largest change: %{customdata[1]} "
            "%{customdata[2]:+,.1f} ms<extra></extra>",
        )  # fmt: skip
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
    fig.add_scatter(
        name="same in both", x=[low, high], y=[low, high], mode="lines", hoverinfo="skip",
        line=dict(color=theme.MUTED, width=1, dash="dot"),
    )  # fmt: skip
    axis = theme.log_axis([low, high])
    fig.update_xaxes(title_text=f"{OBJECTIVE_NAMES[latency]} in A (ms, log scale)", **axis)
    return fig.update_yaxes(title_text="in B (ms, log scale)", **axis)
