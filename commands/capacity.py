"""`sojourn capacity`: the largest rate that meets the objectives, or goodput at given rates."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sojourn.commands import sweep_options as options
from sojourn.commands.cli import (
    RUNS,
    JsonOption,
    ProcessesOption,
    SeedOption,
    SetOption,
    need,
    open_run,
    out,
    output_option,
    print_json,
    table,
)
from sojourn.commands.load_options import (
    OtherArgument,
    TargetArgument,
    load_options,
    scenario_and_server,
    stated_scenario,
)
from sojourn.commands.sweep import chosen_rates, measure_rates
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.loadgen.scenario.options import LoadOptions
    from sojourn.loadgen.scenario.scenario import Scenario
    from sojourn.loadgen.search.bisection import Goal, Judgement, Outcome, Proposal
    from sojourn.loadgen.sweeps.capacity import CapacityPlan


GRID = ("rates", "rate_from", "rate_to", "points", "scale", "repeats")
SEARCH = ("attainment", "highest", "tolerance", "confidence", "most_trials", "most_trials_a_rate")  # fmt: skip
OF_REPLAY = ("scenario", "server", "sessions", "attainment", "highest", "slo", "json")  # of a recorded run
_of_rates = partial(typer.Option, rich_help_panel="With rates")
_of_search = partial(typer.Option, rich_help_panel="Without rates")


@load_options
def capacity(
    context: typer.Context,
    scenario: TargetArgument = None,
    server: OtherArgument = None,
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
    highest: Annotated[float, _of_search(min=0.001, help="highest rate to try")] = 10_000.0,
    tolerance: Annotated[
        float, _of_search(min=0.01, max=1.0, help="the search ends when the bracket is at most this wide, as a share")
    ] = 0.15,
    confidence: Annotated[
        float, _of_search(min=0.5, max=0.999, help="confidence that the bracket holds the true rate")
    ] = 0.95,
    most_trials: Annotated[int, _of_search(min=2, max=1_000, help="trials before the search gives up")] = 40,
    most_trials_a_rate: Annotated[
        int, _of_search(min=1, max=100, help="trials at one rate that is too close to decide")
    ] = 10,
    sessions: Annotated[
        bool,
        typer.Option("--sessions", help="the most users or agents of a closed loop, of a scenario or of a recorded run "
                     "(by replay); --highest and --tolerance are of their number"),
    ] = False,
    base_url: options.BaseUrlOption = None,
    model: options.ModelOption = None,
    tokenizer: options.TokenizerOption = None,
    set_: SetOption = None,
    processes: ProcessesOption = 1,
    output: Annotated[
        Path | None,
        output_option("folder to write, or to continue; by default runs/capacity-SCENARIO, with rates "
                      "runs/sweep-SCENARIO"),
    ] = None,
    seed: SeedOption = None,
    json: JsonOption = False,
    *,
    asked: "LoadOptions",
) -> None:  # fmt: skip
    """Find the largest rate that meets the objectives, by open-loop trials: doubling, then bisection. With --sessions:
    the most sessions of a closed loop, whose trials last --duration.

    The load is a scenario, or what the options say. --rate is the first rate (by default 1 per second); a trial
    measures at least --duration (by default 20 s) and --requests (by default 100).

    A trial is judged by the confidence interval of its attainment. With rates: goodput and latency at each of them,
    each in a run of its own, and the frontier of goodput by objectives. After an interruption the same command
    continues, and repeats runs that were not valid.
    """
    need("loadgen")
    from sojourn.loadgen.search.bisection import Goal
    from sojourn.loadgen.sweeps.capacity import CapacityPlan
    from sojourn.loadgen.sweeps.sweep import SweepPlan

    given = [name for name in (*GRID, *SEARCH) if context.get_parameter_source(name).name == "COMMANDLINE"]
    is_grid = bool({*given} & {*GRID})
    _check_words(given, asked, is_grid, sessions, highest)
    if sessions and (run := _recorded(scenario, server, base_url)) is not None:
        _check_replay(context)
        _simulate(run, asked, attainment, int(highest), json)
        return
    loaded, base_url = _stated((scenario, server), base_url, asked, is_grid)
    seed = loaded.measure.seed if seed is None else seed
    chosen = chosen_rates(rates, rate_from, rate_to, points, scale) if is_grid else ()
    target = options.chosen_target(loaded, base_url, model, tokenizer, set_, processes)
    if is_grid:
        measure_rates(SweepPlan(loaded, chosen, repeats, seed, target), output, json)
        return
    goal = Goal(
        attainment=attainment, confidence=confidence, start_rps=asked.rate or 1.0,
        lowest_rps=1.0 if sessions else min(0.01, (asked.rate or 1.0) / 100),
        unit="sessions" if sessions else "requests/s",
        highest_rps=highest, tolerance=tolerance, most_trials=most_trials, most_trials_a_rate=most_trials_a_rate,
    )  # fmt: skip
    trial_s, trial_requests = asked.duration_s or 20.0, asked.requests or 100
    _search(CapacityPlan(loaded, goal, trial_s, trial_requests, seed, target), output, json)


def _check_words(given: list[str], asked: "LoadOptions", is_grid: bool, sessions: bool, highest: float) -> None:
    """Raises InputError for words of one search beside those of another."""
    if strange := [name for name in given if name in (SEARCH if is_grid else GRID)]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise InputError(f"{names}: of a search for the largest rate, and rates are given; leave one of the two out")
    if sessions and highest < 1:
        raise InputError(f"--highest {highest:g} is below one session; give a whole number above 0")
    if sessions and (is_grid or asked.rate is not None):
        raise InputError("--sessions searches for a number of sessions, which has no rate; leave the rates out")
    if is_grid and asked.rate is not None:
        raise InputError(f"--rate {asked.rate:g} is the first rate of a search, and --rates names all; drop one")
    if (asked.rate or 1.0) > highest:
        raise InputError(f"--rate {asked.rate or 1:g} is above --highest {highest:g}; lower the one or raise the other")


def _check_replay(context: typer.Context) -> None:
    """Raises InputError for options that a replay of a recorded run has no use for."""
    given = [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]
    if strange := [name for name in given if name not in OF_REPLAY]:
        names = ", ".join(f"--{name.strip('_').replace('_', '-')}" for name in strange)
        raise InputError(f"{names}: of trials, and a recorded run is replayed; leave it out, or name a scenario")


def _recorded(named: str | None, server: str | None, base_url: str | None) -> Path | None:
    """The folder of a recorded run, where the first word names one."""
    if named is None or server is not None or base_url is not None or not (Path(named) / "run.json").is_file():
        return None
    return Path(named)


def _simulate(run: Path, asked: "LoadOptions", attainment: float, highest: int, json: bool) -> None:
    from sojourn.loadgen.sweeps.simulated_sessions import simulate_sessions

    bounds = [{"klass": "all", **asked.slo, "source": asked.slo_source}] if asked.slo else None
    found = simulate_sessions(open_run(run, bounds), attainment, highest)
    if json:
        print_json(found)
        return
    rows = table("sessions", "kept", "8 of 10 outcomes")
    for number, (low, median, high) in found.tried.items():
        rows.add_row(f"{number}", f"{median:.0%}", f"{low:.0%}–{high:.0%}")
    out.print(rows)
    most = "not even one" if found.sessions is None else f"{found.sessions}"
    more = " or more (--highest)" if found.sessions == found.highest else ""
    spread = f", {found.at_least or 0} to {found.at_most or 0} with 8 of 10 outcomes"
    out.print(f"\nmost sessions  {most}{more} keep {attainment:.0%}{spread} (replay of {found.run})")
    for doubt in found.doubts:
        out.print(f"! {doubt}", markup=False)


def _stated(
    words: Sequence[str | None], base_url: str | None, asked: "LoadOptions", is_grid: bool
) -> "tuple[Scenario, str | None]":
    """The load, and the server's address. A search itself decides the rate, duration and number of its trials."""
    named, base_url = scenario_and_server(words, base_url)
    if named is None and base_url is None and not (is_grid or asked.changes_anything):
        raise InputError(
            "nothing says what to send; name a scenario or a server, or give options such as --prompt-tokens"
        )
    if not is_grid:
        if (asked.duration_s or 20.0) < 1 or (asked.requests or 100) < 20:
            raise InputError("a trial measures at least 1 s and 20 requests; raise --duration or --requests")
        asked = replace(asked, rate=None, duration_s=None, requests=None)
    return stated_scenario(named, asked, None if base_url else {"model": "tiny-model"}), base_url


def _search(plan: "CapacityPlan", folder: Path | None, json: bool) -> None:
    from sojourn.loadgen.sweeps.capacity import find_capacity

    folder = folder or RUNS / f"capacity-{plan.scenario.name}"
    with options.search_progress(folder, plan.doubts(), json) as (show_note, progress):
        outcome = find_capacity(
            plan,
            folder,
            progress=progress,
            on_note=show_note,
            on_trial=lambda *trial: show_note(_trial_line(plan.goal.unit, *trial)),
        )
    if json:
        print_json(outcome)
    else:
        _print(outcome, plan.goal, folder)
    if not outcome.resolved:
        sys.exit(Ended.CANNOT_TELL)


def _trial_line(unit: str, number: int, proposal: "Proposal", known: "list[Judgement]") -> str:
    verdicts = ", ".join(f"{each.rate_rps:g} {each.verdict}" for each in known)
    line = f"trial {number}: {proposal.rate_rps:g} {unit}, {proposal.why}"
    return f"{line}   [{verdicts}]" if known else line


def _print(outcome: "Outcome", goal: "Goal", folder: Path) -> None:
    from sojourn.loadgen.search.bisection import bracket_sentence

    rows = table(goal.unit, "trials", "sent", "kept", "interval", "verdict", text=["verdict"])
    for each in outcome.judgements:
        doubt = each.died or ("latencies grow" if each.growing else "")
        cells = (f"{each.rate_rps:g}", f"{each.trials}", f"{each.sent:,}", f"{each.attainment:.1%}")
        rows.add_row(*cells, f"{each.low:.1%}–{each.high:.1%}", f"{each.verdict}, {doubt}" if doubt else each.verdict)
    out.print(rows)
    name = "most sessions" if goal.unit == "sessions" else "largest rate"
    out.print(f"\n{name:<14} {bracket_sentence(outcome, goal)}")
    out.print(f"resolved       {'yes' if outcome.resolved else 'no'}: {outcome.reason}")
    out.print(f"search         {folder}")
