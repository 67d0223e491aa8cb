"""Figures of a sweep: goodput and attainment against the rate, the frontier against the objectives, latencies."""

from collections.abc import Sequence

import plotly.graph_objects as go

from sojourn.loadgen.search.bisection import REQUESTS_PER_S
from sojourn.loadgen.search.points import Frontier, Rate
from sojourn.metrics.request.objectives import OBJECTIVE_NAMES
from sojourn.ui import theme
from sojourn.ui.text import number

OFFERED, GOOD, ATTAINMENT = "#A9B6C6", theme.COHORT_COLOURS[0], theme.COHORT_COLOURS[1]


def goodput_against_rate(rates: Sequence[Rate]) -> go.Figure:
    """Good requests per second beside what came: by chance not quite the rate that was asked for. Where the two part,
    users pay for the load."""
    known = [rate for rate in rates if rate.goodput_rps is not None]
    if not known:
        return theme.note("No point of this sweep is valid.")
    fig = theme.figure(360)
    offered = [rate.rate_rps for rate in known]
    if known[0].unit == REQUESTS_PER_S:
        fig.add_scatter(
            name="requests due", x=offered, y=[rate.due_rps or rate.rate_rps for rate in known], mode="lines",
            line=dict(color=OFFERED, width=1.5, dash="dash"), hoverinfo="skip",
        )  # fmt: skip
    fig.add_scatter(
        name="good", x=offered, y=[rate.goodput_rps for rate in known], mode="lines+markers",
        line=dict(color=GOOD, width=2), marker=dict(size=9),
        customdata=[[rate.sent, number(rate.goodput_tokens_per_s)] for rate in known],
        hovertemplate="%{y:.2f} good requests/s at %{x:g} "
        f"{known[0].unit}<br>%{{customdata[1]}} good tokens/s"
        "<br>n = %{customdata[0]:,}<extra></extra>",
    )  # fmt: skip
    _over_the_rates(fig, rates)
    fig.update_yaxes(title_text="good requests per second", rangemode="tozero")
    return fig


def attainment_against_rate(rates: Sequence[Rate], wanted: float) -> go.Figure:
    """Share of the sent requests that met every objective, with its 95% interval."""
    known = [rate for rate in rates if rate.attainment is not None]
    if not known:
        return theme.note("No point of this sweep is valid.")
    fig = theme.figure(360)
    shares = [100 * rate.attainment for rate in known]
    fig.add_scatter(
        name="met every objective", x=[rate.rate_rps for rate in known], y=shares, mode="lines+markers",
        line=dict(color=ATTAINMENT, width=2), marker=dict(size=9),
        error_y=dict(
            type="data", symmetric=False, thickness=1.2, width=4,
            array=[100 * rate.attainment_high - share for rate, share in zip(known, shares, strict=True)],
            arrayminus=[share - 100 * rate.attainment_low for rate, share in zip(known, shares, strict=True)],
        ),
        customdata=[[rate.sent] for rate in known],
        hovertemplate="%{y:.1f}% met the objectives at %{x:g} requests/s<br>n = %{customdata[0]:,}<extra></extra>",
    )  # fmt: skip
    _objective_line(fig, rates, f"{wanted:.0%}", 100 * wanted)
    _over_the_rates(fig, rates)
    fig.update_yaxes(title_text="requests that met the objectives (% of sent)", range=[0, 104])
    return fig


def frontier_against_objectives(best: Sequence[Frontier]) -> go.Figure:
    """The most goodput of any rate, had the objectives been stricter or looser. An open point is of the largest rate
    with a valid run: a larger one might give more."""
    if not best:
        return theme.note("No point of this sweep is valid.")
    fig = theme.figure(380)
    fig.add_scatter(
        name="best of the rates", x=[each.scale for each in best], y=[each.goodput_rps for each in best],
        mode="lines+markers", line=dict(color=GOOD, width=2), showlegend=False,
        marker=dict(
            size=10, color=GOOD, line=dict(color=GOOD, width=2),
            symbol=["circle-open" if each.at_edge else "circle" for each in best],
        ),
        customdata=[[each.rate_rps, _bounds(each)] for each in best],
        hovertemplate="%{y:.2f} good requests/s at %{customdata[0]:g} offered<br>%{customdata[1]}<extra></extra>",
    )  # fmt: skip
    ticks = [f"{each.scale:g}×<br>{_bounds(each)}" if each.objectives_ms else f"{each.scale:g}×" for each in best]
    fig.update_xaxes(
        title_text="objectives, in ms: stricter to the left", type="log", tickvals=[each.scale for each in best],
        ticktext=[tick.replace(" · ", "<br>") for tick in ticks],
    )  # fmt: skip
    fig.update_yaxes(title_text="good requests per second", rangemode="tozero")
    return fig


def latency_against_rate(rates: Sequence[Rate], latency: str, bound: float | None) -> go.Figure:
    """p50 and p90 of a latency against the rate, on a log axis; a point is missing where there are too few requests."""
    fig, values = theme.figure(320), [] if bound is None else [bound]
    for name, dash, colour in (("p50", "solid", theme.COHORT_COLOURS[0]), ("p90", "dot", theme.COHORT_COLOURS[1])):
        points = [(rate.rate_rps, rate.quantiles_ms.get(latency, {}).get(name)) for rate in rates]
        known = [(rate, value) for rate, value in points if value is not None and value > 0]  # of a log axis
        values += [value for _, value in known]
        fig.add_scatter(
            name=name, x=[rate for rate, _ in known], y=[value for _, value in known], mode="lines+markers",
            line=dict(color=colour, width=2, dash=dash), marker=dict(size=8),
            hovertemplate=f"{name} %{{y:,.1f}} ms at %{{x:g}} requests/s<extra></extra>",
        )  # fmt: skip
    if len(values) == (bound is not None):
        return theme.note(f"Too few requests for a quantile of the {OBJECTIVE_NAMES[latency]}.")
    if bound is not None:
        _objective_line(fig, rates, f"objective ≤ {number(bound, 'ms')}", bound)
    _over_the_rates(fig, rates)
    fig.update_yaxes(title_text=f"{OBJECTIVE_NAMES[latency]} (ms, log scale)", **theme.log_axis(values))
    return fig


def _over_the_rates(fig: go.Figure, rates: Sequence[Rate]) -> None:
    """The same axis in every figure of a sweep; a rate without a valid run has a line in place of a point."""
    fig.update_xaxes(
        title_text="offered (requests per second)" if rates[-1].unit == REQUESTS_PER_S else rates[-1].unit,
        range=[0, 1.05 * rates[-1].rate_rps],
    )
    for rate in rates:
        if rate.points == rate.invalid:
            fig.add_vline(
                x=rate.rate_rps, line=dict(color=OFFERED, width=1.5, dash="dot"), annotation_text="not valid",
                annotation_position="top left", annotation_font=dict(size=11, color=theme.MUTED),
            )  # fmt: skip


def _objective_line(fig: go.Figure, rates: Sequence[Rate], name: str, level: float) -> None:
    fig.add_scatter(
        name=name, x=[rates[0].rate_rps, rates[-1].rate_rps], y=[level, level], mode="lines", hoverinfo="skip",
        line=dict(color=theme.OBJECTIVE_COLOUR, width=1.5, dash="dash"),
    )  # fmt: skip


def _bounds(each: Frontier) -> str:
    return " · ".join(f"{name.removesuffix('_ms')} {number(bound)}" for name, bound in each.objectives_ms.items())
