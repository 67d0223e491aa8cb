"""`sojourn dev faults prove`: whether the fixes that the diagnosis names do what it predicts."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import out
from sojourn.commands.repeat_run import check_repeatable, repeat_run
from sojourn.metrics.errors import InputError, SojournError

if TYPE_CHECKING:
    from sojourn.loadgen.run.experiment import OnProgress
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.verdict.ledger import LedgerEntry

PROOFS = "proofs"


def prove(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder with recorded runs of `sojourn dev faults run`")
    ],
    cases: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CASE]...", help="names of cases; by default all that a setting mends"),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, max=100, help="which repeat of each case")] = 1,
) -> None:
    """Repeat each run whose planted fault a setting mends with the fix that its diagnosis names, and verify the
    prediction.

    The new runs lie in DIR/proofs, and their verdicts in DIR/predictions.jsonl, which `sojourn dev faults score` reads.
    The same command goes on after an interruption.
    """
    from sojourn.loadgen.run.progress_bar import ProgressBar
    from sojourn.replay.verdict.ledger import FILE_NAME

    runs = list(_mendable_runs(folder, cases or (), repeat))
    if not runs:
        raise InputError(
            f"{folder} holds no run of repeat {repeat} that hurt and that a setting mends; "
            "record some: sojourn dev faults run"
        )
    check_repeatable(runs[0])
    found: list[LedgerEntry] = []
    with ProgressBar(out, prints_stages=False) as progress:
        for number, run in enumerate(runs, 1):
            try:
                entry = _proved(run, folder, progress)
            except SojournError as error:
                out.print(f"{number:>2} of {len(runs)}  {run.name}: {error}", markup=False, soft_wrap=True)
                continue
            said = "its diagnosis names no fix that is a setting" if entry is None else _sentence(entry)
            out.print(f"{number:>2} of {len(runs)}  {run.name:<32} {said}", markup=False, soft_wrap=True)
            found += [] if entry is None else [entry]
    told = [entry for entry in found if not entry.is_open]
    hits = sum(entry.hit for entry in told)
    out.print(f"{hits} of {len(told)} fixes ended within the predicted interval of 80%; {folder / FILE_NAME}")


def _mendable_runs(folder: Path, cases: Sequence[str], repeat: int) -> Iterator["RunDirectory"]:
    """Those whose one fault a setting mends, and which hurt."""
    from sojourn.diagnosis.score.judgement import hurts
    from sojourn.diagnosis.score.scoring import attainment, base_attainment, recorded_runs
    from sojourn.diagnosis.score.truth import read_fault
    from sojourn.metrics.run.directory import RunDirectory

    recorded = {path: read_fault(path) for path in recorded_runs(folder)}
    known = {fault.case for fault in recorded.values()}
    if unknown := sorted(set(cases) - known):
        raise InputError(f"{folder} holds no run of the case {unknown[0]!r}; it has {', '.join(sorted(known))}")
    controls = [
        (fault, attainment(RunDirectory.open(path)))
        for path, fault in recorded.items() if fault.control is not None and fault.repeat == repeat
    ]  # fmt: skip
    for path, fault in recorded.items():
        is_mended = len(fault.truths) == 1 and bool(fault.truths[0].remedies)
        if fault.repeat != repeat or not is_mended or (cases and fault.case not in cases):
            continue
        run = RunDirectory.open(path)
        if hurts(attainment(run), base_attainment(fault, controls)):
            yield run


def _proved(run: "RunDirectory", folder: Path, progress: "OnProgress") -> "LedgerEntry | None":
    """None where the first finding has no fix that is a setting."""
    from sojourn.commands.summary import diagnose_run
    from sojourn.commands.verify import verify_pair, written_diagnosis
    from sojourn.loadgen.run.run_files import is_whole
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.verdict.ledger import FILE_NAME
    from sojourn.replay.verdict.verify import claims

    proof = folder / PROOFS / run.path.name
    proved = is_whole(proof)
    if not proved:  # the diagnosis before its proof, and of this version
        shutil.rmtree(proof, ignore_errors=True)
        diagnose_run(run)
    first = claims({"findings": (written_diagnosis(run.path) or {}).get("findings", [])[:1]})
    if not first or first[0].predicted_by != "diagnosis" or not first[0].prediction.change.settings:
        return None
    change = first[0].prediction.change
    done = RunDirectory.open(proof) if proved else repeat_run(run, change.settings, proof, progress)
    return verify_pair(run, done, folder / FILE_NAME).entry


def _sentence(entry: "LedgerEntry") -> str:
    from sojourn.commands.verify import verdict_sentence
    from sojourn.metrics.prediction import change_text

    before = entry.figures[0].before
    was = "" if before is None else f", from {before:.1%}"
    result = entry.outcome
    return f"{entry.cause}: {change_text(entry.change)}{was}: {verdict_sentence(entry)}   {result}"
