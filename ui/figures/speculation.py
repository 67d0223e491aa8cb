"""Figure of the drafts of speculation."""

import pandas as pd
import plotly.graph_objects as go

from sojourn.ui import theme

NO_DRAFTS = "No step of this run verified drafts."


def acceptance_by_position(found: pd.DataFrame) -> go.Figure:
    """Share of the drafts that were accepted, by position: of all verified ones, and of those behind accepted drafts.
    `found` is ui.tables.speculation.acceptance."""
    if found.empty:
        return theme.note(NO_DRAFTS)
    fig = theme.figure(260)
    colour = theme.COLOURS["compute"]
    fig.add_bar(
        name="of the verified drafts", x=found.position, y=100 * found.share, marker_color=colour, width=0.6,
        customdata=found[["drafted", "accepted"]],
        hovertemplate="position %{x}: %{y:.0f}%, %{customdata[1]:,.0f} of %{customdata[0]:,.0f}<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        name="behind accepted ones, at least", x=found.position, y=100 * found.given,
        mode="lines+markers", line=dict(color=theme.INK, width=1.5, dash="dot"),
        hovertemplate="position %{x}: %{y:.0f}% or more of those behind accepted drafts<extra></extra>",
    )  # fmt: skip
    fig.update_xaxes(title_text="position of the draft behind the last known token", dtick=1)
    return fig.update_yaxes(title_text="accepted (%)", range=[0, 105])
