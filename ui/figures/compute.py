"""Figures of the device: the roofline of its steps, where FLOPs and kernel time go, power and clocks."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from sojourn.metrics.compute.cost_model import PARTS
from sojourn.metrics.compute.roofline import Ceilings
from sojourn.ui import theme
from sojourn.ui.tables.compute import TOKEN_MEANING, sensors
from sojourn.ui.text import number, percent

NO_WORK = "No step of this run has FLOPs, bytes and device time."
PHASE_COLOURS = {
    "prefill": theme.KIND_COLOURS["prefill"],
    "mixed": theme.ACCOUNT_COLOURS["request.interference"],
    "decode": theme.KIND_COLOURS["decode"],
}
PHASE_SYMBOLS = {"prefill": "diamond-open", "mixed": "x-thin-open", "decode": "circle"}
PART_COLOURS = {
    "attention": theme.COLOURS["compute"],
    "mlp": theme.shade(theme.COLOURS["compute"], 0.5),
    "head": theme.COLOURS["token"],
    "adapters": theme.COLOURS["memory"],
}
TOKEN_COLOURS = {
    "computed": theme.COLOURS["compute"],
    "cached": theme.COLOURS["memory"],
    "recomputed": theme.ACCOUNT_COLOURS["memory.recompute"],
    "drafted": theme.shade(theme.COLOURS["token"], 0.4),
    "accepted": theme.COLOURS["token"],
    "padding": theme.UNACCOUNTED_COLOUR,
    "overrun": theme.COLOURS["client"],
}
KERNEL_COLOURS = {
    "attention": PART_COLOURS["attention"], "gemm": PART_COLOURS["mlp"], "norm": "#7C5CBF", "rope_kv": "#009E73",
    "sampling": theme.COLOURS["token"], "communication": "#CC79A7", "copy": "#56B4E9", "other": "#8C8C8C",
    "gap": theme.UNACCOUNTED_COLOUR,
}  # fmt: skip


def roofline(points: pd.DataFrame, ceilings: Ceilings | None, precision: str) -> go.Figure:
    """Achieved GFLOP/s of each step against its FLOPs a byte, below the ceilings of the device where they are known."""
    if points.empty:
        return theme.note(NO_WORK)
    fig = theme.figure(440)
    shown = theme.thinned(points)
    low, high = float(points.intensity.min()) / 1.6, float(points.intensity.max()) * 1.6
    top = float(points.gflops.max())
    if ceilings is not None and precision in ceilings.precisions:
        peak, ridge = ceilings.peak_flops(precision) / 1e9, ceilings.ridge(precision)
        low, high, top = min(low, ridge / 2), max(high, ridge * 2), max(top, peak)
        x = np.array([low, ridge, high])
        fig.add_scatter(
            name=f"measured ceilings: {number(peak)} GFLOP/s in {precision}, {number(ceilings.bandwidth / 1e9)} GB/s",
            x=x, y=np.minimum(peak, ceilings.bandwidth / 1e9 * x), mode="lines",
            line=dict(color=theme.OBJECTIVE_COLOUR, width=2),
            hovertemplate="at most %{y:,.1f} GFLOP/s at %{x:,.2f} FLOPs a byte<extra></extra>",
        )  # fmt: skip
    for phase, symbol in PHASE_SYMBOLS.items():
        part = shown[shown.phase == phase]
        if part.empty:
            continue
        fig.add_scatter(
            name=f"{phase} steps (n = {(points.phase == phase).sum():,})", x=part.intensity, y=part.gflops,
            mode="markers", marker=dict(symbol=symbol, size=7, opacity=0.6, color=PHASE_COLOURS[phase]),
            customdata=np.stack([part.step, part.tokens, part.device_ms, part.gbytes], axis=1),
            hovertemplate="step %{customdata[0]:.0f}: %{customdata[1]:,.0f} tokens in %{customdata[2]:.2f} ms<br>"
            "%{x:,.2f} FLOPs a byte<br>%{y:,.1f} GFLOP/s and %{customdata[3]:,.2f} GB/s<extra></extra>",
        )  # fmt: skip
    bottom = float(points.gflops.quantile(0.002))
    fig.update_xaxes(
        title_text="arithmetic intensity (FLOPs a byte, log scale)", type="log", range=np.log10([low, high]).tolist(),
        tickformat="~g", dtick="D2",
    )  # fmt: skip
    fig.update_yaxes(
        title_text="achieved while the device worked (GFLOP/s, log scale)", type="log", tickformat="~g", dtick="D2",
        range=np.log10([bottom / 1.5, top * 1.5]).tolist(),
    )  # fmt: skip
    return fig


def utilisation(table: pd.DataFrame) -> go.Figure:
    """MFU, MBU and the share of the roofline by phase, on busy time, and of all steps on wall time."""
    if not table.mfu.notna().any():
        return theme.note("The ceilings of this run's device are not known here, so there is no utilisation to show.")
    rows = [theme.row_label(row.phase, f"{row.seconds:,.1f} s") for row in table.itertuples()]
    fig = theme.figure(130 + 62 * len(rows), barmode="group", bargap=0.25)
    series = (
        ("of_roofline", "share of the roofline: the larger of both, step by step", theme.INK),
        ("mbu", "MBU: bytes against the measured bandwidth", theme.COLOURS["memory"]),
        ("mfu", "MFU: FLOPs against the measured peak", theme.COLOURS["compute"]),
    )
    for column, name, colour in series:
        fig.add_bar(
            name=name, y=rows, x=100 * table[column], orientation="h", marker_color=colour, textposition="outside",
            text=[percent(value) for value in table[column]], cliponaxis=False, textfont_size=11,
            hovertemplate=f"%{{y}}<br>{name}: %{{x:.1f}}%<extra></extra>",
        )  # fmt: skip
    most = float(100 * table[["mfu", "mbu", "of_roofline"]].max().max())
    fig.update_xaxes(title_text="share of the measured ceiling (%)", range=[0, max(100.0, most) * 1.08])
    fig.update_yaxes(title_text="steps", autorange="reversed", ticks="", ticklabelstandoff=6)
    return fig


def tokens_by_kind(tokens: pd.Series) -> go.Figure:
    if tokens.empty:
        return theme.note("No request of this run has its token counts.")
    labels = [f"{number(value)} · {percent(value / tokens.sum())}" for value in tokens]
    return theme.labelled_bars(
        110 + 34 * len(tokens), tokens, labels, [TOKEN_COLOURS[name] for name in tokens.index],
        "<b>%{y}</b>: %{x:,.0f} tokens<br>%{customdata}", "tokens of the run (tokens)", "kind",
        customdata=[TOKEN_MEANING[name] for name in tokens.index],
    )  # fmt: skip


def flops_by_part(table: pd.DataFrame) -> go.Figure:
    """FLOPs per token by part of the model, a bar a phase."""
    if table.empty:
        return theme.note("This run has no FLOPs by part of the model: an older or another server recorded it.")
    rows = [theme.row_label(name, f"{count:,.0f} tokens") for name, count in table.tokens.items()]
    fig = theme.stacked_bars(rows, "work per token (MFLOPs)", "steps", rangemode="tozero")
    per_token = table[list(PARTS)].div(table.tokens, axis=0) / 1e6
    whole = table[list(PARTS)].sum(axis=1)
    for part in PARTS:
        share = table[part] / whole
        theme.add_share_bars(
            fig, part, rows, per_token[part], share, PART_COLOURS[part],
            f"<b>{part}</b>: %{{x:,.2f}} MFLOPs per token, %{{customdata:.1f}}%", customdata=100 * share,
        )  # fmt: skip
    return fig


def kernels_by_class(times_ns: pd.Series) -> go.Figure:
    """Where the device's time in profile bursts went; the classes sum to the bursts' wall time."""
    if times_ns.empty:
        return theme.note("No profile burst was taken in this run: POST /debug/profile takes one.")
    labels = [f"{number(ns / 1e6, 'ms')} · {percent(ns / times_ns.sum())}" for ns in times_ns]
    return theme.labelled_bars(
        110 + 30 * len(times_ns), times_ns / 1e6, labels,
        [KERNEL_COLOURS.get(name, KERNEL_COLOURS["other"]) for name in times_ns.index],
        "<b>%{y}</b>: %{x:,.2f} ms of the bursts", "time in profile bursts (ms)", "class of kernel",
    )  # fmt: skip


def machine(system: pd.DataFrame, begin_ns: float) -> go.Figure:
    """Power, clocks and processor time, once a second, as far as this machine has sensors."""
    known = sensors(system)
    if not known:
        return theme.note("No sensor of the machine was recorded.")
    panels = list(dict.fromkeys(panel for *_, panel in known))
    fig = theme.panels(panels, 90 + 170 * len(panels), 0.08)
    at_s = (system.ns.astype("float64") - begin_ns) / 1e9
    colours = dict(zip((name for name, *_ in known), theme.COHORT_COLOURS, strict=False))
    for column, name, unit, factor, panel in known:
        fig.add_scatter(
            name=name, x=at_s, y=system[column].astype("float64") * factor, mode="lines", row=panels.index(panel) + 1,
            col=1, line=dict(color=colours.get(column, theme.INK), width=1.5),
            hovertemplate=f"{name}: %{{y:,.1f}} {unit}<extra></extra>",
        )  # fmt: skip
    return fig
