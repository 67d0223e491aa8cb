"""Figures of what replays predict: attainment now, with the fix and with its rival's fix, each with its interval."""

from math import isnan

import plotly.graph_objects as go

from sojourn.diagnosis.verdict import Diagnosis, Finding
from sojourn.metrics.ledger import COLOURS
from sojourn.metrics.prediction import Change, Interval, Prediction, attainment_text, shown_setting
from sojourn.ui import theme
from sojourn.ui.text import label, percent

NOW_COLOUR, RIVAL_COLOUR = "#334155", "#94A3B8"
LABEL_CHARACTERS = 27  # more would leave no room for the figure in a narrow window


def now_fix_rival(diagnosis: Diagnosis, found: Finding) -> go.Figure:
    """One row each: measured, replayed unchanged, the fix, the fix of the rival; the lines are 80% intervals."""
    rows = _rows(diagnosis, found)
    fig = theme.figure(88 + 30 * len(rows), showlegend=False, margin=dict(l=8, r=56, t=26, b=8))
    for name, interval, said, colour in rows:
        fig.add_scatter(
            name=name, y=[name], x=[100 * interval.median], mode="markers+text", marker=dict(size=11, color=colour),
            text=[said],
            textposition="top center", textfont=dict(size=12), cliponaxis=False,
            error_x=dict(
                type="data", symmetric=False, array=[100 * (interval.high - interval.median)],
                arrayminus=[100 * (interval.median - interval.low)], thickness=3, width=0, color=colour,
            ),
            hovertemplate=f"<b>{name}</b><br>{percent(interval.median)}, {percent(interval.low)} to "
            f"{percent(interval.high)}<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text="attainment (% of sent requests)", range=[-3, 103])
    return fig.update_yaxes(
        autorange="reversed", ticks="", showgrid=False, categoryorder="array",
        categoryarray=[name for name, *_ in rows],
    )  # fmt: skip


def _rows(diagnosis: Diagnosis, found: Finding) -> list[tuple[str, Interval, str, str]]:
    now = diagnosis.goodput[0].attainment
    rows = [("now, measured", Interval(low=now, median=now, high=now), percent(now), NOW_COLOUR)]
    if diagnosis.predicted is not None:
        rows.append(("now, replayed", diagnosis.predicted.attainment, _said(diagnosis.predicted), NOW_COLOUR))
    first = found.lifecycles[0] if found.lifecycles else "client"
    if found.prediction is not None:
        fix = found.prediction
        rows.append((_named("fix", fix), fix.attainment, _said(fix), COLOURS.get(first, NOW_COLOUR)))
    if found.rival_prediction is not None:
        name = _named("rival", found.rival_prediction)
        rows.append((name, found.rival_prediction.attainment, _said(found.rival_prediction), RIVAL_COLOUR))
    return rows


def _said(prediction: Prediction) -> str:
    """The median alone: the line beside it shows the bounds."""
    known = not prediction.is_open and not isnan(prediction.attainment.median)
    return percent(prediction.attainment.median) if known else attainment_text(prediction).partition(" (")[0]


def _named(role: str, prediction: Prediction) -> str:
    change = prediction.change
    parts = [shown_setting(*each) for each in change.settings.items()]
    parts += [f"device ×{change.device_speed:.3g}"] if change.device_speed != 1 else []
    if change.removed:
        first, more = next(iter(change.removed)), len(change.removed) - 1
        parts.append(f"no {first}" + (f" +{more}" if more else ""))
    parts += [f"KV ×{change.kv_scale:.3g}"] if change.kv_scale != 1 else []
    parts += [f"rate ×{change.arrival_rate:.3g}"] if change.arrival_rate != 1 else []
    parts += ["even arrivals"] if change.arrivals == "even" else []
    parts += [f"{change.sessions} sessions"] if change.sessions is not None else []
    parts += [f"{change.replicas} replicas"] if change.replicas != 1 else []
    parts += [change.routing] if change.routing != Change().routing else []
    parts += ["equal servers"] if change.servers == "equal" else []
    return label(f"{role}: {', '.join(parts) or 'as now'}", LABEL_CHARACTERS)
