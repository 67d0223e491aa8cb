"""Where the time of the ranks of a parallel group went, and which experts their tokens chose."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from sojourn.metrics.cells import sums_by_place
from sojourn.metrics.compute.group_facts import GroupFacts
from sojourn.ui import theme
from sojourn.ui.text import percent

ACTIVITIES = {
    "computes": ("busy_ns", 0.0, "kernels of its part of the model"),
    "exchanges": ("communication_ns", 0.45, "with the ranks of its stage, waits for slower ones included"),
    "waits": ("bubble_ns", 0.8, "for another pipeline stage: the bubble"),
}


def ranks(group: GroupFacts) -> go.Figure:
    """A bar for each rank: the time of its steps, by what it did."""
    places = range(group.shape.num_ranks)
    totals = [sum(getattr(group, field)[rank] for field, *_ in ACTIVITIES.values()) for rank in places]
    rows = [theme.row_label(f"rank {rank}", _detail(group, rank)) for rank in places]
    fig = theme.stacked_bars(rows, "time in steps (s)", "rank", rangemode="tozero")
    for name, (field, shade, meaning) in ACTIVITIES.items():
        lengths = [ns / 1e9 for ns in getattr(group, field)]
        shares = [length * 1e9 / max(total, 1.0) for length, total in zip(lengths, totals, strict=True)]
        theme.add_share_bars(
            fig, name, rows, lengths, shares, theme.shade(theme.COLOURS["compute"], shade),
            f"<b>{name}</b>: %{{x:,.2f}} s<br>{meaning}",
        )  # fmt: skip
    return fig


def _detail(group: GroupFacts, rank: int) -> str:
    whole = sum(getattr(group, field)[rank] for field, *_ in ACTIVITIES.values())
    stage = f"stage {rank // group.shape.ranks_per_stage}, " if group.shape.pipeline_parallel > 1 else ""
    return f"{stage}computes {percent(group.busy_ns[rank] / max(whole, 1.0))} of its time"


def experts(steps: pd.DataFrame) -> go.Figure | None:
    """Tokens of each routed expert over those of the mean expert; None of a model without. Of counted steps."""
    tokens = sums_by_place(steps.expert_tokens) if "expert_tokens" in steps else np.zeros(0)
    if not len(tokens):
        return None
    fig = theme.figure(260)
    fig.add_bar(
        x=np.arange(len(tokens)), y=tokens / max(tokens.mean(), 1e-9), marker_color=theme.COLOURS["compute"],
        customdata=tokens, hovertemplate="expert %{x}: %{y:.2f} times the mean, %{customdata:,} tokens<extra></extra>",
    )  # fmt: skip
    fig.add_hline(y=1, line=dict(color=theme.INK, width=1, dash="dot"))
    fig.update_xaxes(title_text="expert")
    return fig.update_yaxes(title_text="tokens over the mean", rangemode="tozero")
