"""The curve of throughput against time per output token: the SLO, where each curve meets it, and the frontier."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from sojourn.loadgen.search.bisection import REQUESTS_PER_S
from sojourn.loadgen.search.curve import Curve, Recommended
from sojourn.metrics.results.tradeoff import CurvePoint, Range, frontier
from sojourn.ui import theme
from sojourn.ui.text import label, number, percent

GOODPUT_AREA, BADPUT_AREA = "rgba(26,127,75,0.10)", "rgba(180,35,24,0.10)"
FRONTIER_COLOUR = "rgba(86,180,233,0.35)"
HEIGHT_PX = 470
HEADROOM = 1.18  # of the axis above the largest value: names of the areas stand there
LABELLED = 0.25  # of the axis: an area with room for its name
INTERPOLATED = "interpolated"  # of a trace: its values are no measurements, and the report's table leaves them out
PARTS = 16  # of a straight line over TPOT, which is bent over its inverse
APART = 0.045  # of an axis: labels of points that are nearer to each other would overlap


class Axes:
    """Where a point lies: TPOT and tokens per second, or tokens per second per user and per device."""

    def __init__(self, per_user: bool, quantile: str):
        self.per_user = per_user
        share = "median" if quantile == "p50" else f"{quantile} of the requests"
        self.x_title = f"output tokens per second per user (1 / TPOT, {share})" if per_user else (
            f"time per output token, {share} (ms)"
        )  # fmt: skip
        self.y_title = "output tokens per second per device" if per_user else "output tokens per second"

    def x(self, tpot_ms: float) -> float:
        return 1000.0 / tpot_ms if self.per_user else tpot_ms

    def y(self, tokens_per_s: float, curve: Curve) -> float:
        return tokens_per_s / curve.devices if self.per_user and curve.devices else tokens_per_s

    def line(self, points: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
        """`x` and `y` through points of (TPOT in ms, value): straight over TPOT, as all that is interpolated."""
        tpots_ms, values = zip(*points, strict=True)
        at = np.linspace(0, len(points) - 1, (len(points) - 1) * (PARTS if self.per_user else 1) + 1)
        tpots_ms, values = (np.interp(at, range(len(points)), each) for each in (tpots_ms, values))
        return {"x": [self.x(float(each)) for each in tpots_ms], "y": values.tolist()}

    def can_show(self, curve: Curve) -> bool:
        return bool(curve.points) and (bool(curve.devices) or not self.per_user)


def throughput_against_tpot(curves: Sequence[Curve], *, per_user: bool = False) -> go.Figure:
    """One curve per configuration in the order of its rates. A filled point kept every objective for 90% of its
    requests. The diamond is the goodput, the cross where a curve meets the SLO of TPOT."""
    axes = Axes(per_user, curves[0].quantile if curves else "p90")
    shown = [curve for curve in curves if axes.can_show(curve)]
    if not shown:
        why = "The number of devices is not known." if any(curve.points for curve in curves) else (
            "No rate has a valid run with enough requests for a quantile of TPOT."
        )  # fmt: skip
        return theme.note(why)
    fig = theme.figure(HEIGHT_PX + 20 * len(shown), hovermode="closest")
    xs, ys = _extent(shown, axes)
    right, top = HEADROOM * max(xs), HEADROOM * max(ys)
    bounds = sorted({curve.slo_ms for curve in shown if curve.slo_ms is not None})
    if len(bounds) == 1:
        _areas(fig, axes, bounds[0], right)
    _frontier(fig, shown, axes)
    taken: list[tuple[float, float]] = []
    for place, curve in enumerate(curves):
        if curve in shown:
            _curve(fig, curve, axes, theme.COHORT_COLOURS[place % len(theme.COHORT_COLOURS)], right, top, taken)
    theme.objective_lines(fig, {axes.x(bound): f"SLO: TPOT ≤ {number(bound, 'ms')}" for bound in bounds}, top)
    fig.update_xaxes(title_text=axes.x_title, range=[0, right])
    fig.update_yaxes(title_text=axes.y_title, range=[0, top])
    return fig


def _extent(curves: Sequence[Curve], axes: Axes) -> tuple[list[float], list[float]]:
    xs = [
        axes.x(tpot)
        for curve in curves
        for point in curve.points
        for tpot in (point.tpot_ms, *(point.tpot_range_ms or ()))
    ]  # a predicted point may lie beside its interval
    ys = [axes.y(tokens, curve) for curve in curves for point in curve.points
          for tokens in point.tokens_range_per_s or [point.tokens_per_s]]  # fmt: skip
    xs += [axes.x(curve.slo_ms) for curve in curves if curve.slo_ms is not None]
    for curve in curves:
        xs += [axes.x(each.tpot_ms.median) for each in curve.recommended]
        ys += [axes.y(each.tokens_per_s, curve) for each in curve.recommended]
    return xs, ys


def _areas(fig: go.Figure, axes: Axes, bound_ms: float, right: float) -> None:
    """Where users get their tokens in time, and where they do not."""
    slo = axes.x(bound_ms)
    names = ("goodput", "badput: tokens come too late")
    for name, low, high, is_good in (
        ("left", 0.0, slo, not axes.per_user), ("right", slo, right, axes.per_user)
    ):  # fmt: skip
        fig.add_vrect(
            x0=low, x1=high, fillcolor=GOODPUT_AREA if is_good else BADPUT_AREA, layer="below", line_width=0,
            annotation_text=names[not is_good] if high - low > LABELLED * right else "",
            annotation_position=f"top {'right' if name == 'left' else 'left'}",
            annotation_font=dict(size=12, color=theme.MUTED), annotation_xshift=-6 if name == "left" else 6,
        )  # fmt: skip


def _frontier(fig: go.Figure, curves: Sequence[Curve], axes: Axes) -> None:
    """Over all curves. By device, the throughput of each is divided by its own devices first."""
    points = [
        CurvePoint(rate_rps=point.rate_rps, tpot_ms=point.tpot_ms, tokens_per_s=axes.y(point.tokens_per_s, curve))
        for curve in curves
        for point in curve.points
    ]
    best = frontier(points)
    fig.add_scatter(
        name="frontier of all points (TPOT alone)", **axes.line([(each.tpot_ms, each.tokens_per_s) for each in best]),
        mode="lines", line=dict(color=FRONTIER_COLOUR, width=11), hoverinfo="skip", meta=INTERPOLATED,
    )  # fmt: skip


def _curve(
    fig: go.Figure, curve: Curve, axes: Axes, colour: str, right: float, top: float,
    taken: list[tuple[float, float]],
) -> None:  # fmt: skip
    name = label(curve.label, 48)
    xs = [axes.x(point.tpot_ms) for point in curve.points]
    ys = [axes.y(point.tokens_per_s, curve) for point in curve.points]
    fig.add_scatter(
        name="", legendgroup=curve.name, showlegend=False, mode="lines", line=dict(color=colour, width=2),
        hoverinfo="skip", meta=INTERPOLATED,
        **axes.line([(point.tpot_ms, y) for point, y in zip(curve.points, ys, strict=True)]),
    )  # fmt: skip
    fig.add_scatter(
        name=name, legendgroup=curve.name, x=xs, y=ys, mode="markers+text",
        text=_rate_labels(curve.points, xs, ys, right, top, taken),
        textposition=["top left" if not axes.per_user else "top right"] * len(xs),
        textfont=dict(size=11, color=theme.MUTED), cliponaxis=False,
        marker=dict(
            size=9, color=colour,
            symbol=["circle" if (each.attainment or 0.0) >= curve.required_share else "circle-open"
                    for each in curve.points],
            line=dict(color=colour, width=2),
        ),
        error_x=_bars([point.tpot_range_ms for point in curve.points], xs, axes.x),
        error_y=_bars([point.tokens_range_per_s for point in curve.points], ys, lambda each: axes.y(each, curve)),
        customdata=[[f"{_rate(point)} {point.unit}", percent(point.attainment)] for point in curve.points],
        hovertemplate=f"<b>{name}</b><br>%{{customdata[0]}}<br>%{{y:,.0f}} output tokens/s"
        f"{' per device' if axes.per_user else ''}<br>"
        f"{'%{x:,.3g} tokens/s per user' if axes.per_user else '%{x:,.3g} ms per output token'}<br>"
        "%{customdata[1]} met every objective<extra></extra>",
    )  # fmt: skip
    _marks(fig, curve, axes, colour)
    for each in curve.recommended:
        _recommended(fig, curve, axes, each)


def _marks(fig: go.Figure, curve: Curve, axes: Axes, colour: str) -> None:
    """The goodput, and where the curve meets the SLO."""
    goodput, met = curve.goodput, curve.crossing
    marks = []
    if goodput.tpot_ms is not None and goodput.tokens_per_s is not None:
        marks.append(("goodput", "diamond", goodput.tpot_ms, goodput.tokens_per_s, f"goodput: {goodput.sentence}"))
    if met is not None and met.tokens_per_s is not None and met.beyond is not None:
        marks.append(("meets the SLO of TPOT", "x", met.slo_ms, met.tokens_per_s, "interpolated between two rates"))
    for name, symbol, tpot_ms, tokens_per_s, hover in marks:
        value = axes.y(tokens_per_s, curve)
        more = " or more" if name == "goodput" and goodput.at_edge else ""
        fig.add_scatter(
            name=f"{label(curve.label, 40)} · {name}: {number(value)} tokens/s{more}", legendgroup=curve.name,
            x=[axes.x(tpot_ms)], y=[value], mode="markers",
            marker=dict(symbol=symbol, size=15 if symbol == "diamond" else 12, color=colour,
                        line=dict(color=theme.OBJECTIVE_COLOUR, width=2 if symbol == "diamond" else 0)),
            hovertemplate=f"{label(hover, 110)}<br>%{{y:,.0f}} output tokens/s<extra></extra>",
        )  # fmt: skip


def _recommended(fig: go.Figure, curve: Curve, axes: Axes, found: Recommended) -> None:
    ends = [end for end in (found.tpot_ms.low, found.tpot_ms.high) if end == end]
    x = axes.x(found.tpot_ms.median)
    fig.add_scatter(
        name=f"plan of {label(found.run, 24)} recommends {label(found.label, 40)}", x=[x],
        y=[axes.y(found.tokens_per_s, curve)], mode="markers",
        marker=dict(symbol="star-open", size=16, color=theme.MUTED, line=dict(width=2)),
        error_x=_bars([(min(ends), max(ends))] if len(ends) > 1 else [None], [x], axes.x),
        hovertemplate=f"predicted by replays of {label(found.run, 40)}: {label(found.label, 60)}<br>"
        f"{found.rate_rps:.3g} requests/s, %{{y:,.0f}} output tokens/s<extra></extra>",
    )  # fmt: skip


def _bars(ranges: Sequence[Range | None], middles: Sequence[float], place) -> dict | None:
    """The range of the repeats as plotly's lengths to both sides."""
    if not any(ranges):
        return None
    ends = [(middle, middle) if each is None else sorted(map(place, each))
            for each, middle in zip(ranges, middles, strict=True)]  # fmt: skip
    return dict(
        type="data", symmetric=False, thickness=1.2, width=3,
        array=[max(0.0, high - middle) for (_, high), middle in zip(ends, middles, strict=True)],
        arrayminus=[max(0.0, middle - low) for (low, _), middle in zip(ends, middles, strict=True)],
    )  # fmt: skip


def _rate(point: CurvePoint) -> str:
    return f"{point.rate_rps:.3g}" if point.rate_rps < 1000 else number(point.rate_rps)


def _rate_labels(
    points: Sequence[CurvePoint], xs: Sequence[float], ys: Sequence[float], right: float, top: float,
    taken: list[tuple[float, float]],
) -> list[str]:  # fmt: skip
    """Each point's rate; none where it would cover the label of a point before, of this curve or another. Adds to
    `taken` where its labels stand."""
    labels = []
    for point, x, y in zip(points, xs, ys, strict=True):
        is_free = all(abs(x - other) > APART * right or abs(y - height) > APART * top for other, height in taken)
        unit = "/s" if point.unit == REQUESTS_PER_S else f" {point.unit}"
        labels.append(f"{_rate(point)}{unit}" if is_free else "")
        if is_free:
            taken.append((x, y))
    return labels
