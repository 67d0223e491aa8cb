"""`sojourn replay`: what a recorded run would have been with something changed."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from sojourn.commands.cli import RunArgument, SloOption, open_run, out, print_json, rounded, slo_objectives
from sojourn.metrics.request.objectives import A_REPLAY
from sojourn.scripting.changes import grid, label

if TYPE_CHECKING:
    from sojourn.metrics.prediction import Interval, Prediction
    from sojourn.replay.predictor import ReplayPredictor

COLUMNS = (("TTFT p50", "ttft_ms", "p50"), ("TTFT p99", "ttft_ms", "p99"), ("TPOT p50", "tpot_ms", "p50"),
           ("E2E p50", "e2e_ms", "p50"))  # fmt: skip
GAP = 1  # between columns, at least


def replay(
    run: RunArgument,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="a setting of the scheduler or the memory; device (a GPU such as h200_sxm, or another run), "
            "tensor_parallel or weight_format, with recorded_device where run.json names none; device_speed, kv_scale, "
            "arrival_rate, arrivals, sessions, replicas, routing, servers, objective_ttft_ms or removed.ACCOUNT; "
            "values with commas make a grid; repeatable",
        ),
    ] = None,
    slo: SloOption = None,
    json: Annotated[bool, typer.Option("--json", help="print the predictions as JSON")] = False,
    processes: Annotated[
        int, typer.Option(min=0, max=256, help="processes for a long grid; 0 is one for each core")
    ] = 0,
) -> None:
    """Replay a recorded run with something changed, through the real scheduler on a virtual clock.

    Prints the recorded run, the run replayed unchanged as its own check, and each change, with the interval in which 8
    of 10 outcomes are expected. Starts no server and computes nothing with the model.
    """
    from sojourn.diagnosis.expectation import with_expectation
    from sojourn.metrics.machine.host import usable_cores
    from sojourn.replay.predictor import predictor_of
    from sojourn.scripting.answers import replayed

    changes = grid(set_ or [])
    judged = with_expectation(open_run(run, slo_objectives(slo, A_REPLAY)))
    predictor = predictor_of(judged, processes=processes or usable_cores())
    found = replayed(predictor, changes)
    if json:
        print_json(found)  # null for what is no number
    else:
        _print(predictor, found.unchanged, found.predictions)


class _Line(NamedTuple):
    """A row of cells, or the label above it."""

    label: str = ""
    cells: Sequence[str] = ()
    style: str | None = None


def _print(predictor: "ReplayPredictor", unchanged: "Prediction", predictions: "list[Prediction]") -> None:
    from sojourn.diagnosis.expectation import is_expectation
    from sojourn.diagnosis.limits import NO_OBJECTIVE

    recorded = predictor.recorded
    lines: list[_Line] = [
        _Line(cells=[*(name for name, _, _ in COLUMNS), "goodput", "kept", "preempted"]),
        _Line(label="recorded"),
        _Line(cells=[
            *(rounded(recorded.get(f"{latency}:{quantile}", math.nan)) for _, latency, quantile in COLUMNS),
            _rate(recorded["goodput_rps"]),
            _share(recorded["attainment"]),
            f"{predictor.recorded_preemptions:,}",
        ]),
    ]  # fmt: skip
    for name, prediction in [("replayed unchanged", unchanged), *((label(p.change), p) for p in predictions)]:
        lines.append(_Line(label=name if prediction.is_trusted else f"{name} !"))
        cells = [_interval(getattr(prediction, latency)[quantile], rounded) for _, latency, quantile in COLUMNS]
        kept = ("–", "unpredicted") if prediction.is_open else _interval(prediction.attainment, _share)
        cells += [_interval(prediction.goodput_rps, _rate), kept]
        lines.append(_Line(cells=[*(median for median, _ in cells), f"{prediction.preemptions:,}"]))
        lines.append(_Line(cells=[*(bounds for _, bounds in cells), ""], style="dim"))
    _print_lines(lines)
    if is_expectation(predictor.run.meta().get("objectives") or []):
        out.print(f"! {NO_OBJECTIVE}", markup=False)
    out.print(f"latencies in ms, goodput in requests/s; {predictor.sentence()}", markup=False)
    for prediction in predictions:
        if not prediction.is_refused and (why := predictor.hardware_sentence(prediction.change)) is not None:
            out.print(f"{label(prediction.change)}: {why}", markup=False)
    shown: list[str] = []
    for prediction in (unchanged, *predictions):
        for doubt in prediction.doubts:
            if doubt not in shown:
                shown.append(doubt)
                which = "" if doubt in unchanged.doubts else f"{label(prediction.change)}: "
                out.print(f"! {which}{doubt}", markup=False)


def _print_lines(lines: list[_Line]) -> None:
    """Each column is as wide as its widest cell. What a row is of stands in a line of its own: it may be long."""
    rows = [line.cells for line in lines if line.cells]
    widths = [GAP + max(map(len, column)) for column in zip(*rows, strict=True)]
    for line in lines:
        cells = "".join(f"{cell:>{width}}" for cell, width in zip(line.cells, widths, strict=bool(line.cells)))
        out.print(line.label or cells.rstrip(), style=line.style, markup=False)


def _interval(interval: "Interval", shown: Callable[[float], str]) -> tuple[str, str]:
    """The median, and the bounds where they read differently."""
    low, median, high = (shown(math.nan if bound is None else bound) for bound in msgspec.structs.astuple(interval))
    return median, "" if low == median == high else f"{low}–{high}"


def _rate(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"
