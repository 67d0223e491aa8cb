"""Figures of verified predictions: all of them against the diagonal, and one pair of runs before and after."""

from collections.abc import Sequence

import plotly.graph_objects as go

from sojourn.replay.verdict.ledger import LedgerEntry
from sojourn.ui import theme
from sojourn.ui.tables.predictions import figure_name, is_share, pair_name
from sojourn.ui.text import label, percent

HIT, MISS, NOW, UNKNOWN = "#1A7F4B", "#D55E00", "#334155", "#64748B"


def predicted_against_measured(entries: Sequence[LedgerEntry]) -> go.Figure:
    """Attainment in percent. A point on the diagonal is a prediction that came true."""
    fig = theme.figure(380)
    fig.add_scatter(
        name="as predicted", x=[0, 100], y=[0, 100], mode="lines", line=dict(color=theme.LINE, dash="dash"),
        hoverinfo="skip",
    )  # fmt: skip
    for name, colour in (("hit", HIT), ("miss", MISS), ("not predicted", UNKNOWN)):
        judged = [(entry, entry.figures[0]) for entry in entries
                  if entry.outcome == name and entry.figures and is_share(entry.figures[0])]  # fmt: skip
        if not judged:
            continue
        fig.add_scatter(
            name=f"{name} ({len(judged)})", mode="markers", marker=dict(size=10, color=colour),
            x=[100 * figure.median for _, figure in judged], y=[100 * figure.measured for _, figure in judged],
            error_x=dict(
                type="data", symmetric=False, thickness=1.5, width=0, color=colour,
                array=[100 * (figure.high - figure.median) for _, figure in judged],
                arrayminus=[100 * (figure.median - figure.low) for _, figure in judged],
            ),
            customdata=[label(pair_name(entry), 90) for entry, _ in judged],
            hovertemplate="%{customdata}<br>predicted %{x:.0f}%, measured %{y:.0f}%<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text="predicted attainment (%)", range=[-2, 102])
    return fig.update_yaxes(title_text="measured attainment (%)", range=[-2, 102])


def before_and_after(entry: LedgerEntry) -> go.Figure:
    """Each figure relative to its value before the change: predicted interval and measured point."""
    figures = [figure for figure in entry.figures if figure.before]
    if not figures:
        return theme.note("The first run has no figure to compare with.")
    rows = [figure_name(figure) for figure in figures]
    fig = theme.figure(110 + 30 * len(rows))

    def times(values: list[float]) -> list[float]:
        return [value / figure.before for value, figure in zip(values, figures, strict=True)]

    median = times([figure.median for figure in figures])
    fig.add_scatter(
        name="predicted, with its 80% interval", x=median, y=rows, mode="markers",
        marker=dict(size=10, color=theme.COHORT_COLOURS[2]),
        error_x=dict(
            type="data", symmetric=False, thickness=6, width=0, color=theme.COHORT_COLOURS[2],
            array=[high - at for high, at in zip(times([f.high for f in figures]), median, strict=True)],
            arrayminus=[at - low for low, at in zip(times([f.low for f in figures]), median, strict=True)],
        ),
        hovertemplate="%{y}: predicted %{x:.2f} times the value before<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        name="measured", x=times([figure.measured for figure in figures]), y=rows, mode="markers+text",
        marker=dict(size=11, symbol="diamond", color=[HIT if figure.hit else MISS for figure in figures]),
        text=[percent(f.measured) if is_share(f) else f"{f.measured:,.1f}" for f in figures],
        textposition="top center", cliponaxis=False,
        hovertemplate="%{y}: measured %{x:.2f} times the value before<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        name="before", x=[1.0] * len(rows), y=rows, mode="markers", marker=dict(size=9, symbol="line-ns-open",
        color=NOW, line_width=3), hoverinfo="skip",
    )  # fmt: skip
    # Left of 0 there is room for a marker at 0 and its text, which would cover the names of the rows.
    most = max(1.0, *times([max(figure.high, figure.measured) for figure in figures]))
    fig.update_xaxes(title_text="times the value before the change", range=[-0.06 * most, 1.06 * most])
    return fig.update_yaxes(autorange="reversed", ticks="", showgrid=False)
