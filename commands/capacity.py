"""`sojourn capacity`: the largest rate that meets the objectives, or goodput at given rates."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sojourn.commands import sweep_options as options
from sojourn.commands.cli import RUNS, ProcessesOption, ScenarioArgument, SeedOption, need, out, print_json, table
from sojourn.commands.sweep import chosen_rates, measure_rates
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.loadgen.search.bisection import Goal, Judgement, Outcome, Proposal
    from sojourn.loadgen.sweeps.capacity import CapacityPlan

UNRESOLVED = 3

GRID = ("rates", "rate_from", "rate_to", "points", "scale", "repeats")
SEARCH = ("attainment", "start", "highest", "tolerance", "confidence", "trial_s", "trial_requests", "most_trials",
          "most_trials_a_rate")  # fmt: skip
_of_rates = partial(typer.Option, rich_help_panel="With rates")
_of_search = partial(typer.Option, rich_help_panel="Without rates")


def capacity(
    context: typer.Context,
    scenario: ScenarioArgument,
    rates: Annotated[str | None, _of_rates(metavar="1,2,4,8", help="rates in requests per second")] = None,
    rate_from: Annotated[float | None, _of_rates(help="lowest rate of a grid; with --rate-to")] = None,
    rate_to: Annotated[float | None, _of_rates(help="highest rate of a grid")] = None,
    points: Annotated[int | None, _of_rates(help="number of rates in the grid; by default 6")] = None,
    scale: Annotated[
        Literal["linear", "log"] | None, _of_rates(help="equal differences, or equal ratios (log, the default)")
    ] = None,
    repeats: Annotated[int, _of_rates(min=1, max=100, help="runs at each rate")] = 1,
    attainment: Annotated[
        float, _of_search(min=0.01, max=0.999, help="share of the sent requests that must meet the objectives")
    ] = 0.9,
    start: Annotated[float, _of_search(min=0.001, help="first rate, in requests per second")] = 1.0,
    highest: Annotated[float, _of_search(min=0.001, help="highest rate to try")] = 10_000.0,
    tolerance: Annotated[
        float, _of_search(min=0.01, max=1.0, help="the search ends when the bracket is at most this wide, as a share")
    ] = 0.15,
    confidence: Annotated[
        float, _of_search(min=0.5, max=0.999, help="confidence that the bracket holds the true rate")
    ] = 0.95,
    trial_s: Annotated[float, _of_search(min=1, max=86_400, help="least seconds that a trial measures")] = 20.0,
    trial_requests: Annotated[
        int, _of_search(min=20, max=1_000_000, help="least requests that a trial measures")
    ] = 100,
    most_trials: Annotated[int, _of_search(min=2, max=1_000, help="trials before the search gives up")] = 40,
    most_trials_a_rate: Annotated[
        int, _of_search(min=1, max=100, help="trials at one rate that is too close to decide")
    ] = 10,
    slo: options.SloOption = None,
    base_url: options.BaseUrlOption = None,
    model: options.ModelOption = None,
    tokenizer: options.TokenizerOption = None,
    set_: options.SetOption = None,
    processes: ProcessesOption = 1,
    search_dir: Annotated[
        Path | None,
        typer.Option(help="folder to write, or to continue; by default runs/capacity-SCENARIO, with rates "
                     "runs/sweep-SCENARIO"),
    ] = None,
    seed: SeedOption = None,
    json: options.JsonOption = False,
) -> None:  # fmt: skip
    """Find the largest rate that meets the objectives, by open-loop trials: doubling, then bisection.

    A trial is judged by the confidence interval of its attainment. Exit code 0 if the bracket is narrow enough, 3 if
    the search could not resolve it. With rates: goodput and latency at each of them, each in a run of its own, and the
    frontier of goodput by objectives; exit code 4 while a rate has no valid run. After an interruption the same
    command continues, and repeats runs that were not valid.
    """
    need("loadgen")
    from sojourn.loadgen.scenario.scenario import load_scenario
    from sojourn.loadgen.search.bisection import Goal
    from sojourn.loadgen.sweeps.capacity import CapacityPlan
    from sojourn.loadgen.sweeps.sweep import SweepPlan

    given = [name for name in (*GRID, *SEARCH) if context.get_parameter_source(name).name == "COMMANDLINE"]
    is_grid = bool({*given} & {*GRID})
    if strange := [name for name in given if name in (SEARCH if is_grid else GRID)]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise InputError(f"{names}: of a search for the largest rate, and rates are given; leave one of the two out")
    if start > highest:
        raise InputError(f"--start {start:g} is above --highest {highest:g}; lower the one or raise the other")
    loaded = options.with_slo(load_scenario(scenario), slo)
    seed = loaded.measure.seed if seed is None else seed
    chosen = chosen_rates(rates, rate_from, rate_to, points, scale) if is_grid else ()
    target = options.chosen_target(loaded, base_url, model, tokenizer, set_, processes)
    if is_grid:
        measure_rates(SweepPlan(loaded, chosen, repeats, seed, target), search_dir, json)
        return
    goal = Goal(
        attainment=attainment, confidence=confidence, start_rps=start, lowest_rps=min(0.01, start / 100),
        highest_rps=highest, tolerance=tolerance, most_trials=most_trials, most_trials_a_rate=most_trials_a_rate,
    )  # fmt: skip
    _search(CapacityPlan(loaded, goal, trial_s, trial_requests, seed, target), search_dir, json)


def _search(plan: "CapacityPlan", folder: Path | None, json: bool) -> None:
    from sojourn.loadgen.sweeps.capacity import find_capacity

    folder = folder or RUNS / f"capacity-{plan.scenario.name}"
    with options.search_progress(folder, plan.doubts(), json) as (show_note, progress):
        outcome = find_capacity(
            plan, folder, progress=progress, on_note=show_note, on_trial=lambda *trial: show_note(_trial_line(*trial))
        )
    if json:
        print_json(outcome)
    else:
        _print(outcome, plan.goal, folder)
    if not outcome.resolved:
        sys.exit(UNRESOLVED)


def _trial_line(number: int, proposal: "Proposal", known: "list[Judgement]") -> str:
    verdicts = ", ".join(f"{each.rate_rps:g} {each.verdict}" for each in known)
    line = f"trial {number}: {proposal.rate_rps:g} requests/s, {proposal.why}"
    return f"{line}   [{verdicts}]" if known else line


def _print(outcome: "Outcome", goal: "Goal", folder: Path) -> None:
    from sojourn.loadgen.search.bisection import bracket_sentence

    rows = table("requests/s", "trials", "sent", "kept", "interval", "verdict", text=["verdict"])
    for each in outcome.judgements:
        doubt = each.died or ("latencies grow" if each.growing else "")
        cells = (f"{each.rate_rps:g}", f"{each.trials}", f"{each.sent:,}", f"{each.attainment:.1%}")
        rows.add_row(*cells, f"{each.low:.1%}–{each.high:.1%}", f"{each.verdict}, {doubt}" if doubt else each.verdict)
    out.print(rows)
    out.print(f"\nlargest rate   {bracket_sentence(outcome, goal)}")
    out.print(f"resolved       {'yes' if outcome.resolved else 'no'}: {outcome.reason}")
    out.print(f"search         {folder}")
