"""Figures of usage records."""

import itertools

import pandas as pd
import plotly.graph_objects as go

from sojourn.ui import theme
from sojourn.ui.text import label

NO_TOKENS = "No call of this usage computed a token."


def tokens_by_tenant(tokens: pd.DataFrame, span_seconds: int) -> go.Figure:
    """Stacked bars over the time of day: a row of `tokens` a bar, a column a tenant."""
    if tokens.empty:
        return theme.note(NO_TOKENS)
    fig = theme.figure(340, barmode="stack", bargap=0.1)
    for tenant, colour in zip(tokens.columns, itertools.cycle(theme.COHORT_COLOURS), strict=False):
        fig.add_bar(
            name=label(tenant, 24), x=tokens.index, y=tokens[tenant], marker_color=colour, width=900 * span_seconds,
            offset=0, hovertemplate=f"{label(tenant)}: %{{y:,.0f}} tokens from %{{x|%Y-%m-%d %H:%M:%S}}<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text="arrival of the call (UTC)", tickformat="")
    return fig.update_yaxes(title_text=f"tokens in {span_text(span_seconds)}", rangemode="tozero")


def span_text(seconds: int) -> str:
    """As "15 minutes"."""
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size:
            count = seconds // size
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "0 seconds"
