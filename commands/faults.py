"""`sojourn dev faults`: cases with a planted fault of known truth, to score the diagnosis with."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import RUNS, need, out, output_option, table
from sojourn.commands.faults_prove import prove
from sojourn.commands.faults_score import score
from sojourn.commands.help_page import HelpPage
from sojourn.metrics.errors import ExperimentError, InputError

if TYPE_CHECKING:
    from sojourn.loadgen.faults.run_cases import FailedRun, FinishedRun

FOLDER = RUNS / "faults"

faults = HelpPage(
    help="Plant faults of known truth, and score the diagnosis of their runs.", no_args_is_help=True,
)  # fmt: skip


faults.command("score")(score)
faults.command("prove")(prove)


@faults.command("list")
def list_cases() -> None:
    """Show the bundled cases: their workloads, their severities and what the diagnosis should say."""
    from sojourn.loadgen.faults.case import case_names, load_case

    text = ("case", "workload", "truth", "kind", "what is planted")
    rows = table("case", "workload", "severities", "truth", "kind", "what is planted", text=text)
    for column in (0, 3):  # names of a case and of causes are for copying
        rows.columns[column].no_wrap = True
    num_faults = num_controls = 0
    for name in case_names():
        case = load_case(name)
        truths = case.variants[0].truths
        num_faults, num_controls = num_faults + bool(truths), num_controls + (not truths)
        said = " and ".join(truth.keys[0] for truth in truths) or f"control: {case.control}"
        kinds = " and ".join(truth.kinds[0] for truth in truths)
        rows.add_row(case.name, case.base, str(len(case.variants)), said, kinds, case.description)
    out.print(rows)
    out.print(f"\n{num_faults} faults, {num_controls} controls")


@faults.command("run")
def run_cases(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE]...", help="bundled cases or case files; by default all")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="runs of each case, each with another seed")] = 3,
    first_repeat: Annotated[int, typer.Option(min=1, max=100, help="number of the first of them")] = 1,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="profile 30 steps in the middle of each run, which slows it for seconds")
    ] = False,
    out_dir: Annotated[Path, output_option("folder of the runs, to write or to continue")] = FOLDER,
) -> None:
    """Run cases one after another, each with a server of its own. The same command goes on after an interruption.

    A base workload runs before the cases on it: a case counts where it keeps its objectives 10 points less often.
    """
    need("engine", "loadgen")
    from sojourn.engine.options import check_settings
    from sojourn.loadgen.faults.case import case_names, load_case
    from sojourn.loadgen.faults.run_cases import Campaign, FailedRun, plan_runs, run_planned
    from sojourn.loadgen.run.progress_bar import ProgressBar

    chosen = [load_case(name) for name in cases or case_names()]
    wanted = {case.name for case in chosen}
    bases = {case.base_file for case in chosen if case.base not in wanted}
    chosen += [load_case(file) for file in sorted(bases)]
    names = Counter(case.name for case in chosen)
    if several := [name for name, count in names.items() if count > 1]:
        raise InputError(f"{names[several[0]]} cases are named {several[0]}, and each names its runs; rename one")
    for case in chosen:
        for variant in case.variants:
            check_settings(variant.scenario.engine)
    planned = plan_runs(chosen, repeats, first_repeat)
    campaign, made, failed = Campaign(out_dir, partial(run_planned, profiles=kernels)), 0, 0
    with ProgressBar(out, prints_stages=False) as progress:
        for each in campaign.run(planned, progress):
            made += 1
            failed += isinstance(each, FailedRun)
            out.print(_line(each), markup=False, soft_wrap=True)
    out.print(f"{len(planned) - failed} runs in {out_dir}, {len(planned) - made} of them from earlier")
    if failed:
        raise ExperimentError(f"{failed} runs could not be made; the same command tries them again")


def _line(run: "FinishedRun | FailedRun") -> str:
    from sojourn.loadgen.faults.run_cases import FailedRun

    if isinstance(run, FailedRun):
        return f"{run.planned.name}: {run.error}"
    base = "" if run.base is None or run.planned.case.name == run.planned.case.base else f", base {run.base:.0%}"
    doubt = "   does not hurt" if run.hurts is False else ""
    left = f"   {run.seconds_left / 60:.0f} min left" if run.seconds_left else ""
    return f"{run.number:>3} of {run.of}  {run.planned.name:<44} kept {run.attainment:.0%}{base}{doubt}{left}"
