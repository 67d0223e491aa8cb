"""Figures of a server that does not exist: its memory, and its latencies by rate."""

from collections.abc import Sequence

import plotly.graph_objects as go

from sojourn.replay.sizing.answer import Sized
from sojourn.replay.sizing.limit import Trial
from sojourn.ui import theme
from sojourn.ui.text import label

GIB = 2**30
# Of memory: weights, what a step needs beside them, and keys and values.
PARTS = (("weights", "#4A6FA5"), ("activations", "#8A6D3B"), ("reserve", "#94A3B8"), ("KV pool", "#7C5CBF"))
ROW_PX, HEIGHT_PX = 44, 380


def name_of(answer: Sized) -> str:
    deployment = answer.deployment
    return f"{deployment.num_devices} × {deployment.device}"


def memory(answers: Sequence[Sized]) -> go.Figure:
    """Of one device of each deployment."""
    planned = [answer for answer in answers if answer.plan is not None]
    if not planned:
        return theme.note("No deployment has a memory plan.")
    rows = [label(name_of(answer), 24) for answer in planned]
    fig = theme.figure(110 + ROW_PX * len(rows), barmode="stack")
    for part, colour in PARTS:
        sizes = [
            max(0.0, next((line.value for line in answer.plan.lines if line.name == part), 0.0)) / GIB
            for answer in planned if answer.plan is not None
        ]  # fmt: skip
        fig.add_bar(
            name=part, y=rows, x=sizes, orientation="h", marker_color=colour,
            hovertemplate=f"<b>%{{y}}</b><br>{part}: %{{x:.2f}} GiB<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text="memory of one device (GiB)", rangemode="tozero")
    fig.update_yaxes(title_text="", autorange="reversed")
    return fig


def latency_by_rate(answers: Sequence[Sized], latency: str, quantile: str, bound_ms: float | None) -> go.Figure:
    """A point is a trial of the search; a filled one keeps the objectives."""
    fig = theme.figure(HEIGHT_PX)
    top = 0.0
    for answer, colour in zip(answers, theme.COHORT_COLOURS * 4, strict=False):
        trials = _trials(answer)
        if not trials:
            continue
        values = [getattr(trial, latency)[quantile] for trial in trials]
        top = max(top, *values)
        kept = [bool(answer.best) and _load(trial) <= _load(answer.best) for trial in trials]
        fig.add_scatter(
            name=name_of(answer), x=[_load(trial) for trial in trials], y=values, mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 9, "symbol": ["circle" if each else "circle-open" for each in kept]},
            hovertemplate="%{x:.3g}: %{y:.3g} ms<extra>" + name_of(answer) + "</extra>",
        )  # fmt: skip
    if not fig.data:
        return theme.note("No load was simulated.")
    fig.update_xaxes(title_text="requests per second", rangemode="tozero")
    fig.update_yaxes(
        title_text=f"{latency.removesuffix('_ms').upper()} {quantile} (ms)",
        range=[0, 1.15 * max(min(top, 3 * bound_ms) if bound_ms else top, bound_ms or 0.0)],
    )
    if bound_ms:
        fig.add_hline(y=bound_ms, line={"color": theme.OBJECTIVE_COLOUR, "dash": "dash", "width": 1.5})
    return fig


def _trials(answer: Sized) -> list[Trial]:
    found = [] if answer.limit is None else list(answer.limit.trials)
    return sorted((trial for trial in found if trial.rate_rps is not None), key=_load)


def _load(trial: Trial) -> float:
    return float(trial.rate_rps if trial.rate_rps is not None else trial.slots or 0)
