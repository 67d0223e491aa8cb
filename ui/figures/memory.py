"""Figures of the KV cache: what became of prompt tokens, what more memory would give, how blocks live and die."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sojourn.metrics.catalog.memory import BLOCK_STATES
from sojourn.ui import theme
from sojourn.ui.figures.steps import add_blocks
from sojourn.ui.tables.memory import OUTCOME_MEANING, OUTCOMES
from sojourn.ui.tables.request import binned, step_series
from sojourn.ui.text import label, number

NO_OUTCOMES = "This run has no prefix outcomes: an older or another server recorded it."
NO_CURVE = "This run has no hits of other pool sizes: an older or another server recorded it."
NO_BLOCK_EVENTS = "No cached block was evicted or used again in this run, or its server does not record it."
GREEN = theme.COLOURS["memory"]
TICKS = {0.25: "¼", 0.5: "½", 1: "1", 2: "2", 4: "4", 8: "8"}
OUTCOME_COLOURS = {
    "hit": GREEN,
    "hit_host": theme.shade(GREEN, 0.35),
    "hit_disk": theme.shade(GREEN, 0.6),
    "hit_remote": theme.shade(GREEN, 0.8),
    "hit_peer": theme.shade(GREEN, 0.5),
    "miss_evicted": "#B42318",
    "miss_in_flight": theme.COLOURS["compute"],
    "miss_disabled": theme.INK,
    "miss_diverged": theme.COLOURS["request"],
    "miss_sub_block": theme.shade(theme.COLOURS["token"], 0.4),
    "miss_cold": theme.UNACCOUNTED_COLOUR,
}


def prefix_outcomes(tokens: pd.DataFrame) -> go.Figure:
    """Share of the prompt tokens by outcome, a bar a cohort; `tokens` has a row a cohort and a column an outcome."""
    if tokens.empty or not tokens.to_numpy().sum():
        return theme.note(NO_OUTCOMES)
    total = tokens.sum(axis=1)
    rows = [theme.row_label(label(name, 22), f"{number(count)} tokens") for name, count in total.items()]
    fig = theme.stacked_bars(rows, "share of the prompt tokens (%)", "cohort", range=[0, 100])
    for outcome in OUTCOMES:
        share = tokens[outcome] / total.where(total > 0)
        if not (share > 0.0005).any():
            continue
        theme.add_share_bars(
            fig, outcome.replace("_", " "), rows, 100 * share, share.fillna(0), OUTCOME_COLOURS[outcome],
            f"<b>{outcome}</b>: %{{x:.1f}}%, %{{customdata:,.0f}} tokens<br>{OUTCOME_MEANING[outcome]}",
            customdata=tokens[outcome], marker_line=dict(color="#FFFFFF", width=0.5),
        )  # fmt: skip
    return fig


def hit_rates(rates: pd.DataFrame) -> go.Figure:
    """Hit rate over the run, of the real cache and of one without eviction: `at_s, hit, infinite` (shares)."""
    if rates.empty:
        return theme.note(NO_OUTCOMES)
    fig = theme.figure(300)
    lines = (("infinite", "a cache without eviction", theme.INK, "dot"), ("hit", "this cache", GREEN, "solid"))
    for column, name, colour, dash in lines:
        fig.add_scatter(
            name=name, x=rates.at_s, y=100 * rates[column], mode="lines+markers", marker_size=4,
            line=dict(color=colour, width=2, dash=dash), connectgaps=False,
            hovertemplate=f"{name}: %{{y:.1f}}% of the prompt tokens<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text=theme.RUN_CLOCK)
    fig.update_yaxes(title_text="prompt tokens hit (%)", range=[0, 102])
    return fig


def miss_ratio_curve(curve: pd.DataFrame, actual: float, floor: float) -> go.Figure:
    """Share of prompt tokens missed by pools of other sizes: `pool, miss`, and `low, high` where they are known;
    `actual` and `floor` (that of a cache without eviction) of this run."""
    if curve.empty:
        return theme.note(NO_CURVE)
    fig = theme.figure(300)
    if "low" in curve and curve.low.notna().all():
        fig.add_scatter(
            name="95% interval", x=[*curve.pool, *curve.pool[::-1]], y=100 * np.r_[curve.high, curve.low[::-1]],
            mode="lines", line_width=0, fill="toself", fillcolor=theme.shade(GREEN, 0.75), hoverinfo="skip",
        )  # fmt: skip
    fig.add_scatter(
        name="what a pool of this size would miss", x=curve.pool, y=100 * curve.miss, mode="lines+markers",
        line=dict(color=GREEN, width=2), marker_size=8,
        hovertemplate="%{x} times this pool would miss %{y:.1f}% of the prompt tokens<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        name="measured", x=[1], y=[100 * actual], mode="markers",
        marker=dict(symbol="diamond-open", size=13, color=theme.OBJECTIVE_COLOUR, line_width=2),
        hovertemplate="this run missed %{y:.1f}% of the prompt tokens<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        name="no eviction at all", x=[curve.pool.min(), curve.pool.max()], y=[100 * floor] * 2, mode="lines",
        line=dict(color=theme.INK, width=1, dash="dot"),
        hovertemplate="without eviction: %{y:.1f}% missed<extra></extra>",
    )  # fmt: skip
    ticks = [size for size in TICKS if curve.pool.min() <= size <= curve.pool.max()]
    fig.update_xaxes(
        title_text="pool size (× this pool, log scale)", type="log", tickvals=ticks,
        ticktext=[TICKS[size] for size in ticks],
    )  # fmt: skip
    fig.update_yaxes(title_text="prompt tokens missed (%)", rangemode="tozero")
    return fig


def blocks_over_time(steps: pd.DataFrame, begin_ns: float, block_size: int | None, bins: int = 300) -> go.Figure:
    """KV blocks by state, and how many would hold what is written in them."""
    if steps.empty:
        return theme.note("The server recorded no step.")
    series = step_series(steps, begin_ns)
    series["blocks_written"] = steps.slots_written.astype("float64") / (block_size or np.nan)
    rows, _ = binned(series, bins)
    fig = theme.figure(320)
    add_blocks(fig, rows)
    if (series.blocks_written > 0).any():  # an older server's steps say 0 throughout; a 0 among others is an idle pool
        fig.add_scatter(
            name="slots written", x=rows.at_s, y=rows.blocks_written, mode="lines",
            line=dict(color=theme.INK, width=1.2, dash="dot", shape="hv"),
            hovertemplate="what is written would fill %{y:.1f} blocks<extra></extra>",
        )  # fmt: skip
    lost = series[series.preempted > 0]
    if len(lost):
        fig.add_scatter(
            name="preemption", x=lost.begin_s, y=lost[[f"blocks_{state}" for state in BLOCK_STATES]].sum(axis=1),
            mode="markers", marker=dict(symbol="triangle-down", size=9, color=theme.OBJECTIVE_COLOUR),
            hovertemplate="preemption at %{x:.2f} s<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text=theme.RUN_CLOCK)
    fig.update_yaxes(title_text="KV blocks", rangemode="tozero")
    return fig


def block_lives(events: dict[str, np.ndarray], pool_blocks: int) -> go.Figure:
    """Cumulative distributions: age and idle time of evicted blocks, gaps between uses, reuse distance in blocks.

    `events` by column of `steps`; times in ns.
    """
    if not any(len(values) for values in events.values()):
        return theme.note(NO_BLOCK_EVENTS)
    fig = make_subplots(rows=1, cols=2, horizontal_spacing=0.09)
    fig.update_layout(template=theme.TEMPLATE, height=330)
    times = (
        ("evicted_age_ns", "age when evicted", theme.shade(GREEN, -0.4), "solid"),
        ("evicted_idle_ns", "idle before it was evicted", theme.OBJECTIVE_COLOUR, "dash"),
        ("reuse_gap_ns", "idle before it was used again", GREEN, "solid"),
    )
    every_s, every_block = [], [float(max(pool_blocks, 1))]
    for column, name, colour, dash in times:
        if len(events[column]):
            seconds = np.maximum(events[column] / 1e9, 1e-6)
            every_s += [float(seconds.min()), float(seconds.max())]
            theme.add_distribution(fig, name, seconds, colour, "%{x:,.3~g} s", dash, row=1, col=1)
    if len(distances := events["reuse_distance_blocks"]):
        blocks = np.maximum(distances, 1)
        every_block += [float(blocks.min()), float(blocks.max())]
        theme.add_distribution(fig, "reuse distance", blocks, theme.INK, "%{x:,.3~g} blocks", row=1, col=2)
    else:
        fig.add_annotation(
            text="no sampled block<br>was used again", showarrow=False, x=0.5, y=0.5, xref="x2 domain",
            yref="y2 domain", font=dict(size=13, color=theme.MUTED),
        )  # fmt: skip
    fig.add_scatter(
        name=f"this pool: {pool_blocks:,} blocks", x=[pool_blocks] * 2, y=[0, 100], mode="lines", hoverinfo="skip",
        line=dict(color=GREEN, width=1.5, dash="dash"), row=1, col=2,
    )  # fmt: skip
    fig.update_xaxes(title_text="time (s, log scale)", **theme.log_axis(every_s or [1.0, 10.0]), row=1, col=1)
    fig.update_xaxes(title_text="blocks used since (log scale)", **theme.log_axis(every_block), row=1, col=2)
    fig.update_yaxes(title_text="sampled blocks (cumulative %)", range=[0, 102], row=1, col=1)
    fig.update_yaxes(title_text="sampled uses (cumulative %)", range=[0, 102], row=1, col=2)
    return fig
