"""`sojourn capacity --rates`: goodput over a grid of rates."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sojourn.commands import sweep_options as options
from sojourn.commands.cli import RUNS, out, print_json, rounded, table
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import of_load
from sojourn.metrics.installed import is_installed

if TYPE_CHECKING:
    from sojourn.loadgen.search.curve import Curve
    from sojourn.loadgen.search.points import Frontier, Point, Rate
    from sojourn.loadgen.sweeps.sweep import SweepPlan


def measure_rates(plan: "SweepPlan", folder: Path | None, json: bool) -> None:
    """Each rate is a run of its own. Ends with 4 while a rate has no valid run."""
    from sojourn.loadgen.search.curve import curve_rows, curves
    from sojourn.loadgen.search.points import by_rate, frontier, largest_rate
    from sojourn.loadgen.sweeps.sweep import run_sweep

    folder = folder or RUNS / f"sweep-{plan.scenario.name}"
    with options.search_progress(folder, plan.target.doubts(plan.scenario), json) as (show_note, progress):
        search = run_sweep(
            plan, folder, progress=progress, on_note=show_note,
            on_point=lambda number, of, rate: show_note(f"run {number} of {of}: {rate:g} requests/s"),
        )  # fmt: skip
    assert len(search.points) == len(plan.rates_rps) * plan.repeats
    found = by_rate(search.points)
    best = frontier(found, search.plan["objectives_ms"])
    if json:
        curve = curves({folder.name: search})[0]
        print_json({
            "rates": found, "frontier": best, "largest_rate": largest_rate(found), "curve": curve_rows([curve]),
            "crossing": curve.crossing,
        })  # fmt: skip
    else:
        _print(search.points, found, best, curves({folder.name: search})[0])
        if is_installed("plotly"):
            from sojourn.ui.markup.sweep_report import write_sweep_report

            out.print(f"HTML report    {write_sweep_report([folder])}")
        out.print(f"sweep          {folder}")
    valid = all(rate.points > rate.invalid for rate in found)
    raise typer.Exit(of_load(valid, sum(point.completed for point in search.points if point.counts)))


def chosen_rates(
    rates: str | None, rate_from: float | None, rate_to: float | None, points: int | None, scale: str | None
) -> tuple[float, ...]:
    from sojourn.loadgen.sweeps.sweep import rate_grid, rate_list

    grid = {"--rate-from": rate_from, "--rate-to": rate_to, "--points": points, "--scale": scale}
    grid_flags = [flag for flag, value in grid.items() if value is not None]
    if rates is not None:
        if grid_flags:
            raise InputError(f"--rates names the rates, and {', '.join(grid_flags)} would make others; drop one")
        return rate_list(rates)
    if rate_from is None or rate_to is None:
        raise InputError("no rates are given; add --rates 1,2,4,8, or --rate-from and --rate-to")
    return rate_grid(rate_from, rate_to, 6 if points is None else points, "linear" if scale == "linear" else "log")


def _print(points: "list[Point]", rates: "list[Rate]", best: "list[Frontier]", curve: "Curve") -> None:
    from sojourn.loadgen.search.points import largest_rate, rate_sentence
    from sojourn.metrics.results.tradeoff import crossing_sentence

    out.print("[bold]Goodput against the rate")
    rows = table("rate/s", "counted", "kept", "95%", "good/s", "tok/s", "TTFT p50", "p90", "TPOT p50", "p90")
    rows.padding = (0, 1, 0, 0)  # ten columns in 80 characters
    for rate in rates:
        attainment, interval = "–", "–"
        if rate.attainment is not None:
            attainment, interval = f"{rate.attainment:.1%}", f"{rate.attainment_low:.0%}–{rate.attainment_high:.0%}"
        cells = [rounded(rate.rate_rps), f"{rate.sent:,}", attainment, interval]
        cells += [rounded(rate.goodput_rps), rounded(rate.goodput_tokens_per_s)]
        for latency in ("ttft_ms", "tpot_ms"):
            cells += [rounded(rate.quantiles_ms.get(latency, {}).get(name)) for name in ("p50", "p90")]
        rows.add_row(*cells)
    out.print(rows)
    for rate in rates:
        if rate.invalid:
            out.print(
                f"{rate.rate_rps:g} requests/s: {rate.invalid} of {rate.points} runs not valid, and their "
                f"{rate.uncounted:,} requests not counted"
            )
        if rate.growing:
            out.print(f"{rate.rate_rps:g} requests/s: latencies grew to the end; a longer run would be worse")
    for note in (note for point in points for note in point.notes):
        out.print(note, markup=False)
    out.print("\n[bold]Frontier: the most goodput with all objectives scaled by a factor")
    rows = table("times", "objectives", "good/s", "rate/s", text=["objectives"])
    for each in best:
        bounds = " ".join(f"{name.removesuffix('_ms')}:{bound:g}" for name, bound in each.objectives_ms.items())
        offered = rounded(each.rate_rps) + (" (largest valid)" if each.at_edge else "")
        rows.add_row(f"{each.scale:g}", bounds or "per class", rounded(each.goodput_rps), offered)
    out.print(rows)
    out.print(f"\nlargest rate   {rate_sentence(largest_rate(rates))}")
    if curve.crossing is not None and curve.points:
        out.print(f"throughput     {crossing_sentence(curve.crossing, curve.quantile)}")
    out.print("latencies in ms, from the intended send; –: not enough samples, or no valid run")
