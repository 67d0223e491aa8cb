"""`sojourn import`: a result file of another load generator, a server's log or saved pages of /metrics, as a run."""

from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import RunDirOption, new_run, out, slo_objectives, slo_option
from sojourn.commands.summary import summarise
from sojourn.metrics.errors import InputError


def import_result(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="of vllm bench serve (--save-result --save-detailed), GuideLLM (JSON), AIPerf (profile_export.jsonl) "
            "or inference-perf (per_request_lifecycle_metrics.json); or the log of vLLM or SGLang; or two or more "
            "saved pages of one server's /metrics, oldest first"
        ),
    ],
    run_dir: RunDirOption = None,
    benchmark: Annotated[
        int | None, typer.Option(min=0, help="which of several benchmarks of the file; 0 is the first")
    ] = None,
    slo: Annotated[str | None, slo_option("objectives in ms; by default those of the file")] = None,
    every: Annotated[
        float | None, typer.Option(min=0.001, help="seconds between two pages that have no date before them")
    ] = None,
) -> None:
    """Open a result file, a server's log or saved pages as a run, and diagnose it as far as the file tells.

    Nothing is made up: what the file lacks is listed, and the diagnosis abstains from it.
    """
    import msgspec

    from sojourn.interop.imported.read import read_result, write_run

    objectives = slo_objectives(slo, "an imported result")
    if _are_series(files):
        if benchmark is not None:
            raise InputError("--benchmark is for a result file; a log and pages of /metrics hold none")
        raise typer.Exit(_import_series(files, run_dir, objectives, every))
    if len(files) > 1:
        raise InputError("several files make one run only where they are pages of /metrics; give one result file")
    if every is not None:
        raise InputError("--every is for pages of /metrics")
    file = files[0]
    try:
        found = read_result(file)
    except InputError as error:
        raise InputError(f"{error}{_hint(file)}") from None
    if benchmark is None and len(found) > 1:
        names = ", ".join(f"{number} {each.name}" for number, each in enumerate(found))
        raise InputError(f"{file} holds {len(found)} benchmarks: {names}; choose one with --benchmark")
    if benchmark is not None and benchmark >= len(found):
        raise InputError(f"--benchmark {benchmark}: the file holds {len(found)}, counted from 0")
    chosen = found[benchmark or 0]
    if objectives is not None:
        chosen = msgspec.structs.replace(chosen, objectives=objectives)
    run = write_run(chosen, run_dir or new_run(chosen.name), file.name)
    out.print(f"{len(chosen.rows):,} requests of {chosen.tool} are in {run.path}", markup=False)
    for sentence in chosen.notes:
        out.print(f"note: {sentence}", markup=False)
    for sentence in chosen.unseen:
        out.print(f"not in the file: {sentence}", markup=False)
    raise typer.Exit(summarise(run))


def _are_series(files: list[Path]) -> bool:
    """Whether a file is a log or a page."""
    from sojourn.interop.held.given import Given
    from sojourn.interop.held.logs.readers import LOG_READERS
    from sojourn.interop.held.registry import readers_of

    def is_series(file: Path) -> bool:
        try:
            return any(reader in LOG_READERS for reader in readers_of(Given(file.read_bytes(), str(file))))
        except OSError:
            return False  # it is said by whoever reads it

    return any(map(is_series, files))


def _import_series(files: list[Path], run_dir: Path | None, objectives: list | None, every: float | None) -> int:
    from sojourn.interop.held.registry import read_file
    from sojourn.live.watch.from_evidence import write_evidence

    found = [held for file in files for held in read_file(file) if held.series] or read_file(files[0])
    bounds = {name: float(value) for each in objectives or () for name, value in each.items() if name.endswith("_ms")}
    run = write_evidence(found, run_dir or new_run(Path(found[0].name).stem), bounds, every)
    moments = run.table("scrapes")["ns"].nunique()
    out.print(f"{moments:,} moments of {found[0].kind} are in {run.path}", markup=False)
    for sentence in (run.meta().get("imported") or {}).get("notes", ()):
        out.print(f"note: {sentence}", markup=False)
    for sentence in (run.meta().get("imported") or {}).get("unseen", ()):
        out.print(f"not in the file: {sentence}", markup=False)
    return summarise(run)


def _hint(file: Path) -> str:
    """For a file that is no run, and still says something."""
    from sojourn.interop.held.registry import read_file

    try:
        kind = read_file(file)[0].kind
    except InputError:
        return ""
    return f". It is a {kind}: `sojourn triage {file.name}` says what it shows"
