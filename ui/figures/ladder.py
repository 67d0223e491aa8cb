"""Figures of a ladder: the throughput of each rung, and the accounts that a token's time went to."""

from collections.abc import Sequence

import plotly.graph_objects as go

from sojourn.metrics.compare.ladder import Step
from sojourn.metrics.ledger import ACCOUNTS, UNACCOUNTED
from sojourn.ui import theme
from sojourn.ui.text import number

NAMES = (*(info.name for info in ACCOUNTS), UNACCOUNTED)


def throughput_by_rung(found: Sequence[Step]) -> go.Figure:
    """Tokens per second of each rung, with the multiplier against the rung below."""
    fig = theme.figure(130 + 40 * len(found), showlegend=False)
    labels = [
        f"{number(step.tokens_per_s)} tokens/s" + ("" if step.multiplier is None else f"  × {step.multiplier:.2f}")
        for step in found
    ]
    rates = [step.tokens_per_s or 0.0 for step in found]
    fig.add_bar(
        y=[step.rung.name for step in found], x=rates, text=labels, orientation="h", textposition="outside",
        cliponaxis=False, marker_color=theme.COHORT_COLOURS[0],
        hovertemplate="%{y}: %{x:,.0f} tokens/s<extra></extra>",
    )  # fmt: skip
    fig.update_xaxes(title_text="output tokens per second", range=[0, 1.35 * max(rates, default=1.0)])
    return fig.update_yaxes(title_text="", autorange="reversed", ticks="")


def accounts_by_rung(found: Sequence[Step]) -> go.Figure:
    """Milliseconds of each account by output token: stacked, one bar a rung."""
    rows = [step.rung.name for step in found]
    fig = theme.stacked_bars(rows, "time by output token (ms)", "")
    wholes = [sum(step.accounts_ms.values()) or 1.0 for step in found]
    for name in NAMES:
        spent = [max(0.0, step.accounts_ms.get(name, 0.0)) for step in found]
        if all(ms < 0.005 * whole for ms, whole in zip(spent, wholes, strict=True)):
            continue
        shares = [ms / whole for ms, whole in zip(spent, wholes, strict=True)]
        widest = [ms / max(wholes) for ms in spent]  # a label must fit the bar, not its share of the bar
        theme.add_share_bars(
            fig, name, rows, spent, shares, theme.ACCOUNT_COLOURS[name],
            f"<b>{name}</b>: %{{x:.2f}} ms per token", marker_line=dict(color="#FFFFFF", width=0.5),
            text=[f"{ms:.1f}" if wide >= 0.04 else "" for ms, wide in zip(spent, widest, strict=True)],
        )  # fmt: skip
    return fig
