"""`sojourn dev ladder`: what each technique of a serving engine gives on this machine, one setting at a time."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sojourn.commands.cli import (
    RUNS,
    JsonOption,
    SeedOption,
    SetOption,
    SloOption,
    bounds_of,
    need,
    out,
    output_option,
    print_json,
    rounded,
    table,
    writing,
)
from sojourn.commands.sweep_options import search_progress
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import Ended
from sojourn.metrics.installed import is_installed

if TYPE_CHECKING:
    from sojourn.metrics.compare.ladder import Ladder, Step


def ladder(
    scenario: Annotated[str, typer.Argument(help="name of a bundled scenario, or a scenario file")] = "ladder",
    rungs: Annotated[
        str | None, typer.Option(metavar="'paged KV cache,prefix cache'", help="rungs to measure; by default all")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="runs of each rung, interleaved")] = 2,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="whose rungs; auto takes CUDA where there is one")
    ] = "auto",
    slo: SloOption = None,
    set_: SetOption = None,
    ladder_dir: Annotated[
        Path | None, output_option("folder to write, or to continue; by default runs/ladder-SCENARIO")
    ] = None,
    docs: Annotated[Path | None, typer.Option(help="also write the ladder as a page in Markdown")] = None,
    seed: SeedOption = None,
    json: JsonOption = False,
) -> None:
    """Measure static batching, then one technique more on each rung: throughput, goodput, latency, and which account
    of the ledger shrank.

    Each rung changes one setting of the rung below, and each run starts a server of its own. All rungs are measured
    once, then again, so that a drift of the machine does not look like an effect. The same command continues after an
    interruption. With the bundled scenario two repeats take about twelve minutes on two cores.
    """
    need("engine", "loadgen")
    from sojourn.engine.options import assignments, check_settings
    from sojourn.loadgen.scenario.options import LoadOptions, with_options
    from sojourn.loadgen.scenario.scenario import load_scenario
    from sojourn.loadgen.sweeps.ladder import LadderPlan, chosen_rungs, run_ladder
    from sojourn.loadgen.sweeps.ladder import rungs as rungs_of
    from sojourn.metrics.compare.ladder import steps

    loaded = with_options(load_scenario(scenario), LoadOptions(slo=bounds_of(slo)))
    overrides = assignments(set_ or [], "--set")
    kind = _device(str(overrides.get("device", loaded.engine.get("device", "auto"))), device)
    every = rungs_of(kind)
    if clash := sorted({name for rung in every for name in rung.on} & {*overrides, *loaded.engine}):
        raise InputError(f"a rung of the ladder sets {clash[0]}; leave it out of the scenario and of --set")
    plan = LadderPlan(
        loaded, every, chosen_rungs(every, rungs), repeats, loaded.measure.seed if seed is None else seed, kind,
        shlex.join(["sojourn", *sys.argv[1:]]), overrides,
    )  # fmt: skip
    for rung in plan.rungs:
        check_settings(loaded.engine, plan.settings(rung))
    folder = ladder_dir or RUNS / f"ladder-{loaded.name}"
    with search_progress(folder, (), json) as (show_note, progress):
        measured = run_ladder(
            plan, folder, progress=progress, on_note=show_note,
            on_run=lambda number, of, rung: show_note(f"run {number} of {of}: {rung}"),
        )  # fmt: skip
    found = steps(measured)
    if json:
        print_json({"ladder": measured, "steps": found})
    else:
        _print(measured, found)
        if is_installed("plotly"):
            from sojourn.ui.markup.ladder_report import write_ladder_report

            out.print(f"HTML report    {write_ladder_report(folder)}", markup=False)
        out.print(f"ladder         {folder}", markup=False)
    if docs is not None:
        from sojourn.metrics.compare.ladder_page import page

        with writing(docs, "choose another with --docs"):
            docs.write_text(page(measured, found), encoding="utf-8")
    if len(found) < len(plan.rungs):
        raise typer.Exit(Ended.NOT_VALID)


def _device(of_engine: str, asked: str) -> str:
    """`cpu` or `cuda`. Raises InputError where the engine's setting is the other one."""
    if "auto" not in (of_engine, asked) and of_engine != asked:
        raise InputError(f"--device is {asked}, and the engine's device is {of_engine}; leave one of the two out")
    if (named := asked if asked != "auto" else of_engine) != "auto":
        return named
    from sojourn.metrics.machine.host import hardware

    return "cuda" if hardware()["gpus"] else "cpu"


def _print(measured: "Ladder", found: "list[Step]") -> None:
    from sojourn.metrics.compare.ladder import sentence

    out.print(f"[bold]The ladder of {measured.plan['scenario']['name']}[/bold], on {_machine(measured)}")
    rows = table("rung", "tok/s", "×", "spread", "article", "kept", "TTFT", "TPOT")
    rows.columns[0].justify = "left"
    for step in found:
        spread = "–" if step.lowest is None or step.repeats < 2 else f"{step.lowest:.2f}–{step.highest:.2f}"
        kept = "–" if step.attainment is None else f"{step.attainment:.0%}"
        rows.add_row(
            step.rung.name, rounded(step.tokens_per_s), rounded(step.multiplier), spread,
            rounded(step.rung.published), kept, rounded(step.ttft_p50_ms), rounded(step.tpot_p50_ms),
        )  # fmt: skip
    out.print(rows)
    for step in found[1:]:
        out.print(f"\n[bold]{step.rung.name}[/bold]: {sentence(step)}")
    out.print("\n×: tokens per second over the rung below, by repeat; latencies: p50 in ms, from the intended send")


def _machine(measured: "Ladder") -> str:
    gpus = [str(gpu.get("name", gpu) if isinstance(gpu, dict) else gpu) for gpu in measured.hardware.get("gpus") or []]
    return gpus[0] if measured.device == "cuda" and gpus else f"{measured.hardware['cores']} cores"
