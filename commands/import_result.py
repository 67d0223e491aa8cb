"""`sojourn import`: a result file of another load generator, as a run."""

from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import RunDirOption, new_run, out, slo_objectives, slo_option
from sojourn.commands.summary import summarise
from sojourn.metrics.errors import InputError


def import_result(
    file: Annotated[
        Path,
        typer.Argument(
            help="of vllm bench serve (--save-result --save-detailed), GuideLLM (JSON), AIPerf (profile_export.jsonl) "
            "or inference-perf (per_request_lifecycle_metrics.json)"
        ),
    ],
    run_dir: RunDirOption = None,
    benchmark: Annotated[
        int | None, typer.Option(min=0, help="which of several benchmarks of the file; 0 is the first")
    ] = None,
    slo: Annotated[str | None, slo_option("objectives in ms; by default those of the file")] = None,
) -> None:
    """Open a result file of another load generator as a run, and diagnose it as far as the file tells.

    Nothing is made up: what the file lacks is listed, and the diagnosis abstains from it.
    """
    import msgspec

    from sojourn.interop.imported.read import read_result, write_run

    found = read_result(file)
    if benchmark is None and len(found) > 1:
        names = ", ".join(f"{number} {each.name}" for number, each in enumerate(found))
        raise InputError(f"{file} holds {len(found)} benchmarks: {names}; choose one with --benchmark")
    if benchmark is not None and benchmark >= len(found):
        raise InputError(f"--benchmark {benchmark}: the file holds {len(found)}, counted from 0")
    chosen = found[benchmark or 0]
    if slo is not None:
        chosen = msgspec.structs.replace(chosen, objectives=slo_objectives(slo))
    run = write_run(chosen, run_dir or new_run(chosen.name), file.name)
    out.print(f"{len(chosen.rows):,} requests of {chosen.tool} are in {run.path}", markup=False)
    for sentence in chosen.notes:
        out.print(f"note: {sentence}", markup=False)
    for sentence in chosen.unseen:
        out.print(f"not in the file: {sentence}", markup=False)
    raise typer.Exit(summarise(run))
