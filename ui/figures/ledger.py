"""Figures of where the time went: shares by account, and the waterfall of many requests and of one."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sojourn.metrics.ledger import ACCOUNTS, COLOURS, LIFECYCLES, UNACCOUNTED
from sojourn.ui import theme
from sojourn.ui.tables.request import CLIENT_SPANS, account_shares, accounts_ms, client_spans_ms, steps_of
from sojourn.ui.text import distinct, duration, label, number, percent

NAMES = (*(info.name for info in ACCOUNTS), UNACCOUNTED)
NO_LEDGER = "The server recorded no request, so there is no ledger. Start it with a run directory to record one."
MOST_OUTLINED = 40  # steps of a request, each with a line around it
_CLIENT_COLOURS = dict(zip(CLIENT_SPANS, (theme.ACCOUNT_COLOURS["client.lag"], "#66758A", "#CBD5E1"), strict=True))
MEANING = {info.name: info.booked_when for info in ACCOUNTS} | {UNACCOUNTED: "what no account explains"}


def lifecycle_bar(lifecycle_share: dict[str, float]) -> go.Figure:
    """One bar: the share of all requests' time by lifecycle."""
    shares = {name: lifecycle_share.get(name, 0.0) for name in ("client", *LIFECYCLES)}
    if not any(shares.values()):
        return theme.note(NO_LEDGER)
    rest = 1 - sum(shares.values())
    if rest > 0.0005:
        shares[UNACCOUNTED] = rest
    fig = theme.figure(142 + 22 * (len(shares) > 5), barmode="stack")  # six names take a second line of a narrow page
    for name, share in shares.items():
        colour = COLOURS.get(name, theme.UNACCOUNTED_COLOUR)
        fig.add_bar(
            name=f"{name} {percent(share)}", y=["all requests"], x=[100 * share], orientation="h", marker_color=colour,
            text=[f"{name} {percent(share)}" if share >= 0.08 else ""], textposition="inside", textangle=0,
            insidetextanchor="middle", textfont=dict(color=theme.ink_on(colour), size=12),
            hovertemplate=f"<b>{name}</b>: %{{x:.1f}}% of all requests' time<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text="share of all requests' time, intended send to last byte (%)", range=[0, 100])
    fig.update_yaxes(title_text="", showticklabels=False, ticks="")
    return fig


def where_the_time_went(requests: pd.DataFrame, prefix: str = "ledger") -> go.Figure:
    """Stacked bars of the time by account: all requests, each class, the slowest tenth. `prefix` as in accounts_ms."""
    shares = account_shares(requests, prefix)
    if shares.empty:
        return theme.note(NO_LEDGER)
    rows = [
        theme.row_label(label(cohort, 22), f"n = {row.requests:,.0f}, mean {duration(row.mean_ms * 1e6)}")
        for cohort, row in zip(shares.index, shares.itertuples(), strict=True)
    ]
    until = "last byte" if prefix == "ledger" else "first token"
    x_title = f"share of the time from the intended send to the {until} (%)"
    fig = theme.stacked_bars(rows, x_title, "cohort", range=[0, 100])
    for name in NAMES:
        share = shares[name].clip(lower=0)
        if (share < 0.0005).all():
            continue
        theme.add_share_bars(
            fig, name, rows, 100 * share, share, theme.ACCOUNT_COLOURS[name],
            f"<b>{name}</b>: %{{x:.1f}}%, %{{customdata:,.1f}} ms per request<br>{MEANING[name]}",
            marker_line=dict(color="#FFFFFF", width=0.5), customdata=share * shares.mean_ms,
        )  # fmt: skip
    return fig


def waterfall(requests: pd.DataFrame, prefix: str = "ledger") -> go.Figure:
    """One row per request, in the order given: its accounts end to end in the order in which a request meets them."""
    booked = accounts_ms(requests, prefix)
    colours, meaning = theme.ACCOUNT_COLOURS, MEANING
    if booked.empty:
        booked, colours = client_spans_ms(requests), _CLIENT_COLOURS
        meaning = dict.fromkeys(CLIENT_SPANS, "as the client saw it: no server recorded these requests")
    if booked.empty:
        return theme.note("No request of this choice was read to its end.")
    shown = requests.loc[booked.index]
    positions = list(range(len(shown)))
    fig = theme.figure(150 + 19 * len(shown), barmode="stack", bargap=0.18)
    who = [f"{label(row.request_id, 44)} · {label(row.klass, 20)}" for row in shown.itertuples()]
    for name in booked.columns:
        if (booked[name] < 0.0005).all():
            continue
        fig.add_bar(
            name=name, y=positions, x=booked[name].clip(lower=0), orientation="h", marker_color=colours[name],
            customdata=who,
            hovertemplate=f"<b>{name}</b>: %{{x:,.2f}} ms<br>{meaning[name]}<br>%{{customdata}}<extra></extra>",
        )  # fmt: skip
    if prefix == "ledger":
        fig.add_scatter(
            name="first token read", y=positions, x=shown.ttft_ms, mode="markers", customdata=who,
            marker=dict(symbol="line-ns", size=11, line=dict(color=theme.INK, width=2)),
            hovertemplate="first token read after %{x:,.1f} ms<br>%{customdata}<extra></extra>",
        )  # fmt: skip
    until = "last byte" if prefix == "ledger" else "first token"
    fig.update_xaxes(title_text=f"time since the intended send, until the {until} (ms)", rangemode="tozero")
    fig.update_yaxes(
        title_text="request", tickvals=positions, ticktext=distinct(shown.request_id.tolist()),
        range=[len(shown) - 0.4, -0.6], ticks="", showgrid=False,
    )  # fmt: skip
    return fig.update_layout(hovermode="closest")


def one_request(request: pd.Series, steps: pd.DataFrame) -> go.Figure:
    """One request: its accounts as a waterfall, and below, on the clock, its steps and the tokens sent and read."""
    alone = request.to_frame().T
    booked = accounts_ms(alone)
    if booked.empty:
        booked = client_spans_ms(alone)
    if booked.empty:
        return theme.note("This request was not read to its end.")
    parts = booked.iloc[0].astype(float)
    parts = parts[(parts.abs() >= 0.005) | (parts.index == UNACCOUNTED)]
    height = 24 * len(parts) + 60
    fig = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[height, 130], vertical_spacing=58 / (height + 190)
    )
    fig.update_layout(template=theme.TEMPLATE, height=height + 240, barmode="overlay", bargap=0.25)
    _accounts_rows(fig, parts)
    _clock_rows(fig, request, steps)
    fig.update_xaxes(title_text="ledger, cumulative (ms)", showticklabels=True, row=1, col=1)
    fig.update_xaxes(title_text="time since the intended send (ms)", rangemode="tozero", row=2, col=1)
    return fig.update_layout(hovermode="closest")


def _accounts_rows(fig: go.Figure, parts: pd.Series) -> None:
    total, begin, names = parts.sum(), 0.0, list(parts.index)
    for name, value in parts.items():
        colour = theme.ACCOUNT_COLOURS.get(name) or _CLIENT_COLOURS[name]
        fig.add_bar(
            name=name, y=[name], x=[value], base=[begin], orientation="h", showlegend=False, marker_color=colour,
            hovertemplate=f"<b>{name}</b>: {number(value, 'ms')}<br>{MEANING.get(name, '')}<extra></extra>",
            row=1, col=1,
        )  # fmt: skip
        share = percent(value / total) if total else ""
        left, inside = begin + value > 0.8 * total, value > 0.25 * total
        fig.add_annotation(
            x=begin if left and not inside else begin + value, y=name, text=f"{number(value, 'ms')} · {share}",
            showarrow=False, xanchor="right" if left or inside else "left", xshift=-5 if left or inside else 5,
            font=dict(size=12, color=theme.ink_on(colour) if inside else theme.MUTED),
            row=1, col=1,
        )  # fmt: skip
        begin += value
    fig.update_yaxes(
        title_text="account", categoryorder="array", categoryarray=names[::-1], ticks="", showgrid=False, row=1, col=1
    )


def _clock_rows(fig: go.Figure, request: pd.Series, steps: pd.DataFrame) -> None:
    """On the clock: the request's steps by kind, tokens as the loop emitted them, chunks as the client read them."""
    part = steps_of(steps[steps.step.between(request.first_step, request.last_step)], request.request_id)
    rows = ("steps", "tokens emitted", "chunks read")
    for kind, group in part.groupby("kind", sort=False):
        fig.add_bar(
            name=f"step: {kind}", y=["steps"] * len(group), x=(group.end_ns - group.begin_ns) / 1e6,
            base=(group.begin_ns - request.due_ns) / 1e6, orientation="h", marker_color=theme.KIND_COLOURS[kind],
            marker_line=dict(color="#FFFFFF", width=0.5 if len(part) <= MOST_OUTLINED else 0), 
            customdata=group[["step", "new_tokens", "past_tokens", "batch"]],
            hovertemplate="step %{customdata[0]}: " + kind + ", %{x:.1f} ms<br>%{customdata[1]} new tokens on "
            "%{customdata[2]} past, %{customdata[3]} requests in the batch<extra></extra>",
            row=2, col=1,
        )  # fmt: skip
    marks = (("tokens emitted", request.token_ns, theme.COLOURS["token"]), ("chunks read", request.chunk_ns, theme.INK))
    for row, stamps, colour in marks:
        if stamps is None or not hasattr(stamps, "__len__") or not len(stamps):
            continue
        fig.add_scatter(
            name=row, x=[(stamp - request.due_ns) / 1e6 for stamp in stamps], y=[row] * len(stamps), mode="markers",
            marker=dict(symbol="line-ns", size=12, line=dict(color=colour, width=1.5)),
            hovertemplate=f"{row}: %{{x:,.1f}} ms<extra></extra>", row=2, col=1,
        )  # fmt: skip
    fig.update_yaxes(
        title_text="on the clock", categoryorder="array", categoryarray=rows[::-1], range=[-0.5, 2.5], ticks="",
        showgrid=False, row=2, col=1,
    )  # fmt: skip
