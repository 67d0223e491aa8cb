"""Figures of the engine's steps: what each batch held, what waited, who owned the blocks, where a step's time went."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from sojourn.metrics.catalog.memory import BLOCK_STATES
from sojourn.metrics.records import KINDS, REFUSALS, STAGES
from sojourn.ui import theme
from sojourn.ui.tables.request import binned, step_series
from sojourn.ui.text import number, percent

NO_STEPS = "The server recorded no step. Start it with a run directory to record them."
PANELS = ("tokens per step", "waiting (requests)", "KV blocks", "time of a step (ms)")
BUDGET_IN_SIGHT = 4  # times the largest step


def over_time(steps: pd.DataFrame, begin_ns: float, bins: int = 200) -> go.Figure:
    """Four panels on one clock: tokens by kind, waiting requests by reason, KV blocks by state, host stages."""
    if steps.empty:
        return theme.note(NO_STEPS)
    rows, width = binned(step_series(steps, begin_ns), bins)
    fig = theme.panels(PANELS, 860, 0.045, barmode="stack", bargap=0)
    if not width:  # a bar is a step, as wide as the step was long
        width = (rows.end_s - rows.begin_s).clip(lower=1e-4)
        rows = rows.assign(at_s=rows.begin_s + width / 2)
    for kind in KINDS:
        hover = "%{y:.1f} tokens, near step %{customdata:.0f}"
        _bars(fig, rows, width, kind, f"tokens_{kind}", theme.KIND_COLOURS[kind], hover, 1, customdata=rows.step)
    _budget(fig, rows)
    for reason in REFUSALS:
        colour = theme.REFUSAL_COLOURS[reason]
        _bars(fig, rows, width, reason, f"refused_{reason}", colour, "%{y:.1f} waiting requests", 2)
    _queue(fig, rows)
    add_blocks(fig, rows, row=3, col=1)
    for stage in STAGES:
        _bars(fig, rows, width, stage, f"stage_{stage}_ms", theme.STAGE_COLOURS[stage], "%{y:.2f} ms", 4)
    if rows.predicted_ms.notna().any():
        fig.add_scatter(
            name="device time expected", x=rows.at_s, y=rows.predicted_ms, mode="lines",
            line=dict(color=theme.OBJECTIVE_COLOUR, width=1.2), row=4, col=1,
            hovertemplate="expected by the step model: %{y:.2f} ms<extra></extra>",
        )  # fmt: skip
    return _legend_by_panel(fig)


def _bars(
    fig: go.Figure, rows: pd.DataFrame, width: float | pd.Series, name: str, column: str, colour: str, hover: str,
    row: int, **more: Any,
) -> None:  # fmt: skip
    """One part of a panel's stacked bars; none where the column is 0 throughout, or below 5 µs."""
    if (rows[column] > 0.005).any():
        fig.add_bar(
            name=name, x=rows.at_s, y=rows[column], width=width, marker_color=colour, marker_line_width=0,
            hovertemplate=f"{name}: {hover}<extra></extra>", row=row, col=1, **more,
        )  # fmt: skip


def _budget(fig: go.Figure, rows: pd.DataFrame) -> None:
    largest, budget = rows[[f"tokens_{kind}" for kind in KINDS]].sum(axis=1).max(), rows.budget.max()
    is_far = 0 < largest < budget / BUDGET_IN_SIGHT  # drawn to its scale, the steps would be too low to be seen
    if is_far:
        fig.update_yaxes(range=[0, 1.2 * largest], row=1, col=1)
    fig.add_scatter(
        name=f"budget {budget:,.0f}, above" if is_far else "budget", x=rows.at_s, y=rows.budget, mode="lines",
        line=dict(color=theme.INK, width=1, dash="dot"),
        hovertemplate="budget %{y:.0f} tokens<extra></extra>", row=1, col=1,
    )  # fmt: skip


def _queue(fig: go.Figure, rows: pd.DataFrame) -> None:
    for name, style in (("waiting", "solid"), ("running", "dot")):
        fig.add_scatter(
            name=name, x=rows.at_s, y=rows[name], mode="lines", line=dict(color=theme.INK, width=1.2, dash=style),
            hovertemplate=f"{name}: %{{y:.1f}} requests<extra></extra>", row=2, col=1,
        )  # fmt: skip
    preempted = rows[rows.preempted > 0]
    if len(preempted):
        fig.add_scatter(
            name="preemption", x=preempted.at_s, y=preempted.waiting, mode="markers", row=2, col=1,
            marker=dict(symbol="triangle-down", size=9, color=theme.COLOURS["memory"]),
            hovertemplate="preemption at %{x:.2f} s<extra></extra>",
        )  # fmt: skip


def add_blocks(fig: go.Figure, rows: pd.DataFrame, **panel: int) -> None:
    """KV blocks by state, stacked: they sum to the pool."""
    for state in BLOCK_STATES:
        if rows[f"blocks_{state}"].any():
            fig.add_scatter(
                name=state, x=rows.at_s, y=rows[f"blocks_{state}"], mode="lines", stackgroup="blocks",
                line=dict(width=0, shape="hv"), fillcolor=theme.BLOCK_COLOURS[state],
                hovertemplate=f"{state}: %{{y:.0f}} blocks<extra></extra>", **panel,
            )  # fmt: skip


def _legend_by_panel(fig: go.Figure) -> go.Figure:
    """A legend beside each panel instead of one for all, so that a colour is read where it is drawn."""
    for panel in range(1, len(PANELS) + 1):
        number = "" if panel == 1 else panel
        fig.update_traces(legend=f"legend{number}", row=panel, col=1)
        top = fig.layout[f"yaxis{number}"].domain[1]
        legend = dict(x=1.005, xanchor="left", y=top, yanchor="top", orientation="v", font_size=11)
        fig.update_layout({f"legend{number}": legend | {"traceorder": "normal"}})
    return fig.update_layout(margin=dict(r=8, t=8))


def expected_against_actual(steps: pd.DataFrame, begin_ns: float) -> go.Figure:
    """Device time of each step against what its composition explains; above the diagonal, a step took too long."""
    if steps.empty:
        return theme.note(NO_STEPS)
    series = step_series(steps, begin_ns)
    known = series[series.predicted_ms.notna()]
    if known.empty:
        return theme.note("The step model had not seen enough steps to expect anything of this run's steps.")
    known = theme.thinned(known)
    fig = theme.figure(330)
    prompt = (known.tokens_prefill > 0) | (known.tokens_recompute > 0)
    groups = (
        ("decode only", known[~prompt], "decode", "circle", 6),
        ("with prompt tokens", known[prompt], "prefill", "diamond-open", 8),
    )
    top = float(max(known.predicted_ms.max(), known.device_ms.max())) * 1.05
    fig.add_scatter(
        name="as expected", x=[0, top], y=[0, top], mode="lines", line=dict(color=theme.OBJECTIVE_COLOUR, width=1),
        hoverinfo="skip",
    )  # fmt: skip
    for name, group, kind, symbol, size in groups:
        if len(group):
            fig.add_scatter(
                name=f"{name} (n = {len(group):,})", x=group.predicted_ms, y=group.device_ms, mode="markers",
                marker=dict(color=theme.KIND_COLOURS[kind], size=size, opacity=0.6, symbol=symbol),
                customdata=np.stack([group.step, group.running], axis=1),
                hovertemplate="step %{customdata[0]:.0f}, %{customdata[1]:.0f} requests<br>expected %{x:.2f} ms, "
                "took %{y:.2f} ms<extra></extra>",
            )  # fmt: skip
    fig.update_xaxes(title_text="device time expected (ms)", range=[0, top])
    fig.update_yaxes(title_text="device time measured (ms)", range=[0, top])
    return fig


def stage_breakdown(steps: pd.DataFrame) -> go.Figure:
    """Where the host's time in steps went: share of each stage of all steps' wall time."""
    if steps.empty:
        return theme.note(NO_STEPS)
    totals_ns = pd.Series({stage: float(steps[f"stage_{stage}_ns"].sum()) for stage in STAGES})
    shares = totals_ns / max(float((steps.end_ns - steps.begin_ns).sum()), 1.0)
    means = [number(ns / 1e6 / len(steps), "ms") for ns in totals_ns]
    return theme.labelled_bars(
        330, 100 * shares, [f"{percent(share)} · {mean}" for share, mean in zip(shares, means, strict=True)],
        [theme.STAGE_COLOURS[stage] for stage in STAGES], "<b>%{y}</b>: %{x:.2f}% of the steps' wall time",
        "share of all steps' wall time (%)", "stage",
    )  # fmt: skip
