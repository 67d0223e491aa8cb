"""`sojourn report`: a run, or sweeps side by side, as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import (
    RunArgument,
    SloOption,
    bounds_of,
    find_run,
    need,
    open_run,
    out,
    output_option,
    slo_objectives,
    working,
    writing,
)
from sojourn.commands.curve_file import write_points
from sojourn.commands.summary import diagnose_and_keep
from sojourn.metrics.errors import InputError


def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        output_option(
            "file to write; by default report.html in the run, sweep.html in the sweep, of another name with --slo or "
            "--against. Of sweeps also .csv or .json: the curves"
        ),
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="a second run to compare with; of a sweep another one, repeatable")
    ] = None,
    slo: SloOption = None,
    dollars_per_hour: Annotated[
        float | None, typer.Option(min=0.0001, help="of a sweep: price of its machine, for tokens per dollar")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="of a sweep: devices of a server that does not report them")
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="a short list of audits as Markdown instead, for a pull request")
    ] = False,
    budget: Annotated[
        Path | None, typer.Option(help="with --audit: a YAML file of bounds; exit code 1 where one is broken")
    ] = None,
) -> None:
    """Write a run's diagnosis and figures as one self-contained HTML file.

    Of a sweep: its curve of throughput against time per output token, and those of other sweeps over it; also published
    rows of InferenceX, or Benchmark Reports of llm-d, given as files with --against.
    """
    from sojourn.loadgen.search.points import search_file

    others = against or []
    if audit or budget is not None:
        from sojourn.commands.audit import write_audit

        if search_file(find_run(run)).is_file() or len(others) > 1:
            raise InputError("--audit is of one run, and --against of the one before")
        raise typer.Exit(write_audit(run, others[0] if others else None, slo_objectives(slo), budget, output))
    if search_file(find_run(run)).is_file():
        _report_sweeps([run, *others], output, slo, dollars_per_hour, devices)
        return
    if dollars_per_hour is not None or devices is not None:
        raise InputError(f"{run} is not a sweep; --dollars-per-hour and --devices are of a sweep")
    if output is not None and output.suffix in (".csv", ".json"):
        raise InputError(f"{run} is a run, whose report is an HTML file; {output.suffix} files are of a sweep")
    if len(others) > 1:
        raise InputError(f"{run} is a run, which is compared with one other; give --against once")
    need("plotly")
    from sojourn.ui.markup.run_report import write_report

    objectives = slo_objectives(slo)
    opened = open_run(run, objectives)
    other = open_run(others[0], objectives) if others else None
    path = output or opened.path / _own_name("report", [] if other is None else [other.name], slo)
    with writing(path), working(f"diagnosing and drawing {opened.name}"):
        kept = diagnose_and_keep(opened, other)
        stays = kept.note and output is None and path.exists()
        written = path if stays else write_report(opened, kept.diagnosis, path, other)
    out.print(f"{written} stays with it" if stays else f"wrote {written}", markup=False)


def _own_name(kind: str, others: list[str], slo: str | None) -> str:
    """report.html and sweep.html are of the run and the sweep in which they lie: by its own objectives, and alone."""
    parts = [kind, *([f"against-{'-'.join(others)}"] if others else []), *(["slo"] if slo else [])]
    return f"{'-'.join(parts)}.html"


def _report_sweeps(
    named: list[Path],
    output: Path | None,
    slo: str | None,
    usd_per_hour: float | None,
    devices: int | None,
) -> None:
    """The file's ending chooses what is written: the page, or the points of the curves."""
    from rich.markup import escape

    from sojourn.loadgen.search.curve import LESSER_QUANTILE, differences, read_curves
    from sojourn.loadgen.search.points import read_search, search_file
    from sojourn.loadgen.search.published import published_curve
    from sojourn.metrics.results.tradeoff import crossing_sentence

    published = [each for each in named[1:] if each.is_file()]
    folders = [find_run(each) for each in named if each not in published]
    bounds = bounds_of(slo)
    if slo is not None and set(bounds) != {"tpot_ms"}:
        raise InputError(f"--slo {slo}: only the TPOT of a finished sweep can be judged anew; give --slo tpot:50")
    options = {"slo_ms": bounds.get("tpot_ms"), "usd_per_hour": usd_per_hour, "devices": devices}
    beside = [*(each.resolve().name for each in folders[1:]), *(each.stem for each in published)]
    path = output or folders[0] / _own_name("sweep", beside, slo)
    curves = read_curves(folders, **options)
    others = [published_curve(file, curves[0].quantile, devices) for file in published]
    if any(other.quantile != curves[0].quantile for other in others):  # published medians beside ours
        curves = read_curves(folders, LESSER_QUANTILE, **options)
        others = [published_curve(file, LESSER_QUANTILE, devices) for file in published]
    curves += others
    with writing(path):
        if path.suffix in (".csv", ".json"):
            write_points(curves, path)
        else:
            need("plotly")
            from sojourn.ui.markup.sweep_report import write_sweep_report

            write_sweep_report(folders, path, curves)
    for curve in curves:
        out.print(f"[bold]{escape(curve.label)}[/bold]\n  {curve.goodput.sentence}")
        if curve.crossing is not None and curve.points:
            out.print(f"  {crossing_sentence(curve.crossing, curve.quantile)}")
    if unlike := differences([read_search(search_file(folder)) for folder in folders]):
        out.print(f"! the sweeps also differ in {', '.join(unlike)}: not only the settings move the curves")
    out.print(f"wrote {path}")
