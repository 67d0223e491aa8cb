"""`sojourn capacity`: the largest rate that keeps the objectives."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from commands.frame import RUNS, ProcessesOption, ScenarioArgument, SeedOption, need, out
from commands.searching import (
    BaseUrlOption,
    JsonOption,
    ModelOption,
    SetOption,
    SloOption,
    TokenizerOption,
    chosen_target,
    kept_when_interrupted,
    with_slo,
)
from metrics.errors import InputError
from metrics.search.bisection import Goal, Judgement, Outcome, Proposal, bracket_sentence

UNRESOLVED = 3


def capacity(
    scenario: ScenarioArgument,
    slo: SloOption = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="share of the sent requests that must keep the objectives")
    ] = 0.9,
    start: Annotated[float, typer.Option(min=0.001, help="requests per second to begin with")] = 1.0,
    highest: Annotated[float, typer.Option(min=0.001, help="no rate above it is tried")] = 10_000.0,
    tolerance: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="resolved when the bracket is at most this share wide")
    ] = 0.15,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="that the bracket holds the true rate")] = 0.95,
    trial_s: Annotated[float, typer.Option(min=1, max=86_400, help="seconds that a trial counts, at least")] = 20.0,
    trial_requests: Annotated[
        int, typer.Option(min=20, max=1_000_000, help="requests that a trial counts, at least")
    ] = 100,
    most_trials: Annotated[int, typer.Option(min=2, max=1_000, help="give up after so many")] = 40,
    most_trials_a_rate: Annotated[int, typer.Option(min=1, max=100, help="while a rate is too near to tell")] = 10,
    base_url: BaseUrlOption = None,
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    set_: SetOption = None,
    processes: ProcessesOption = 1,
    search_dir: Annotated[
        Path | None, typer.Option(help="where the search goes, or goes on; by default runs/capacity-SCENARIO")
    ] = None,
    seed: SeedOption = None,
    json: JsonOption = False,
) -> None:
    """Find the largest rate that keeps the objectives, by open-loop trials: doubling, then bisection. A trial is judged
    by the interval of its attainment; exit code 0 if the bracket is narrow enough, 3 if the search could not resolve
    it. Interrupted, the same command goes on where it was."""
    need("loadgen", "locust", "gevent", "httptools")
    from loadgen.run.progress_bar import ProgressBar
    from loadgen.scenario.scenario import load_scenario
    from loadgen.sweeps.capacity import CapacityPlan, find_capacity

    if start > highest:
        raise InputError(f"--start {start:g} is above --highest {highest:g}; lower the one or raise the other")
    loaded = with_slo(load_scenario(scenario), slo)
    goal = Goal(
        attainment=attainment, confidence=confidence, start_rps=start, lowest_rps=min(0.01, start / 100),
        highest_rps=highest, tolerance=tolerance, most_trials=most_trials, most_trials_a_rate=most_trials_a_rate,
    )  # fmt: skip
    plan = CapacityPlan(
        loaded, goal, trial_s, trial_requests, loaded.measure.seed if seed is None else seed,
        chosen_target(loaded, base_url, model, tokenizer, set_, processes),
    )  # fmt: skip
    folder = search_dir or RUNS / f"capacity-{loaded.name}"
    shown = Console(file=sys.stderr) if json else out

    def tell(number: int, proposal: Proposal, known: list[Judgement]) -> None:
        verdicts = ", ".join(f"{each.rate_rps:g} {each.verdict}" for each in known)
        told = f"   [{verdicts}]" if known else ""
        line = f"trial {number}: {proposal.rate_rps:g} requests/s, {proposal.why}{told}"
        shown.print(line, highlight=False, markup=False)

    def note(sentence: str) -> None:
        shown.print(sentence, highlight=False, markup=False)

    for doubt in plan.doubts():
        note(doubt)
    with kept_when_interrupted(folder), ProgressBar(shown) as progress:
        outcome = find_capacity(plan, folder, on_trial=tell, progress=progress, on_note=note)
    if json:
        print(msgspec.json.format(msgspec.json.encode(outcome), indent=2).decode())
    else:
        _print(outcome, goal, folder)
    if not outcome.resolved:
        sys.exit(UNRESOLVED)


def _print(outcome: Outcome, goal: Goal, folder: Path) -> None:
    table = Table(box=None, padding=(0, 2))
    for name in ("requests/s", "trials", "sent", "kept", "interval", "verdict"):
        table.add_column(name, justify="left" if name == "verdict" else "right")
    for each in outcome.judgements:
        verdict = each.verdict
        if each.died or each.growing:
            verdict += f", {each.died}" if each.died else ", latencies grow"
        cells = (f"{each.rate_rps:g}", f"{each.trials}", f"{each.sent:,}", f"{each.attainment:.1%}")
        table.add_row(*cells, f"{each.low:.1%}–{each.high:.1%}", verdict)
    out.print(table)
    out.print(f"\nlargest rate   {bracket_sentence(outcome, goal)}", highlight=False)
    out.print(f"resolved       {'yes' if outcome.resolved else 'no'}: {outcome.reason}", highlight=False)
    out.print(f"search         {folder}", highlight=False)
