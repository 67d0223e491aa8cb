"""`sojourn capacity`: the largest rate that keeps the objectives."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands import sweep_options as options
from sojourn.commands.cli import RUNS, ProcessesOption, ScenarioArgument, SeedOption, need, out, print_json, table
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.loadgen.search.bisection import Goal, Judgement, Outcome, Proposal

UNRESOLVED = 3


def capacity(
    scenario: ScenarioArgument,
    slo: options.SloOption = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="share of the sent requests that must meet the objectives")
    ] = 0.9,
    start: Annotated[float, typer.Option(min=0.001, help="first rate, in requests per second")] = 1.0,
    highest: Annotated[float, typer.Option(min=0.001, help="highest rate to try")] = 10_000.0,
    tolerance: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="the search ends when the bracket is at most this wide, as a share")
    ] = 0.15,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="confidence that the bracket holds the true rate")
    ] = 0.95,
    trial_s: Annotated[float, typer.Option(min=1, max=86_400, help="least seconds that a trial measures")] = 20.0,
    trial_requests: Annotated[
        int, typer.Option(min=20, max=1_000_000, help="least requests that a trial measures")
    ] = 100,
    most_trials: Annotated[int, typer.Option(min=2, max=1_000, help="trials before the search gives up")] = 40,
    most_trials_a_rate: Annotated[
        int, typer.Option(min=1, max=100, help="trials at one rate that is too close to decide")
    ] = 10,
    base_url: options.BaseUrlOption = None,
    model: options.ModelOption = None,
    tokenizer: options.TokenizerOption = None,
    set_: options.SetOption = None,
    processes: ProcessesOption = 1,
    search_dir: Annotated[
        Path | None, typer.Option(help="folder to write, or to continue; by default runs/capacity-SCENARIO")
    ] = None,
    seed: SeedOption = None,
    json: options.JsonOption = False,
) -> None:
    """Find the largest rate that meets the objectives, by open-loop trials: doubling, then bisection.

    A trial is judged by the confidence interval of its attainment. Exit code 0 if the bracket is narrow enough, 3 if
    the search could not resolve it. After an interruption the same command continues.
    """
    need("loadgen")
    from sojourn.loadgen.scenario.scenario import load_scenario
    from sojourn.loadgen.search.bisection import Goal
    from sojourn.loadgen.sweeps.capacity import CapacityPlan, find_capacity

    if start > highest:
        raise InputError(f"--start {start:g} is above --highest {highest:g}; lower the one or raise the other")
    loaded = options.with_slo(load_scenario(scenario), slo)
    goal = Goal(
        attainment=attainment, confidence=confidence, start_rps=start, lowest_rps=min(0.01, start / 100),
        highest_rps=highest, tolerance=tolerance, most_trials=most_trials, most_trials_a_rate=most_trials_a_rate,
    )  # fmt: skip
    plan = CapacityPlan(
        loaded, goal, trial_s, trial_requests, loaded.measure.seed if seed is None else seed,
        options.chosen_target(loaded, base_url, model, tokenizer, set_, processes),
    )  # fmt: skip
    folder = search_dir or RUNS / f"capacity-{loaded.name}"
    with options.search_progress(folder, plan.doubts(), json) as (show_note, progress):
        outcome = find_capacity(
            plan, folder, progress=progress, on_note=show_note, on_trial=lambda *trial: show_note(_trial_line(*trial))
        )
    if json:
        print_json(outcome)
    else:
        _print(outcome, goal, folder)
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
