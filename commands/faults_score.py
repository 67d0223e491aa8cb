"""`sojourn dev faults score`: how often the diagnosis names what was planted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sojourn.commands.cli import out, print_json, table, writing
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.diagnosis.score.accuracy import Accuracy
    from sojourn.diagnosis.verdict import Diagnosis
    from sojourn.metrics.run.directory import RunDirectory

PAGE = Path("docs/results/diagnosis_accuracy.md")
# Criterion → its column on a terminal, which has less room than the page.
COLUMNS = {"lifecycle": "lifecycle", "first": "first", "among_three": "in 3", "kind": "kind", "remedy": "remedy",
           "both": "both", "false_alarm": "alarms"}  # fmt: skip


def score(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="folder with recorded runs of `sojourn dev faults run`")
    ],
    levels: Annotated[
        list[str] | None, typer.Option("--level", help="an evidence level to score; repeatable; by default all")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help=f"write {PAGE}")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the score as JSON")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="fit the confidence of verdicts to this score and store it")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, max=64, help="runs diagnosed at a time")] = 2,
) -> None:
    """Diagnose recorded runs with planted faults at each evidence level, and show how often that was right.

    A verdict that is known is not made again, unless the run or the program changed.
    """
    from sojourn.diagnosis.score.accuracy import accuracy_of
    from sojourn.diagnosis.score.document import page
    from sojourn.diagnosis.score.scoring import SCORED
    from sojourn.diagnosis.score.scoring import score as score_runs
    from sojourn.diagnosis.score.threshold_rules import BASELINE

    known = (*SCORED, BASELINE)
    if unknown := [level for level in levels or () if level not in known]:
        raise InputError(f"--level {unknown[0]}: give one of {', '.join(known)}")
    with _progress(not json) as progress:
        judgements = score_runs(folder, diagnose_at, levels=levels or known, processes=processes, progress=progress)
    shown = folder if not folder.is_absolute() else folder.name  # the page says nothing of this machine's folders
    accuracy = accuracy_of(folder, judgements, f"sojourn dev faults score {shown} --write")
    if calibrate:
        _store(accuracy)
    if write:
        with writing(PAGE, "run it in Sojourn's folder"):
            PAGE.write_text(page(accuracy), encoding="utf-8")
    if json:
        print_json(accuracy)
    else:
        _show(accuracy)


def diagnose_at(run: "RunDirectory", level: Any) -> "Diagnosis":
    """The diagnosis of a run at a level, with replays where the level has steps and the engine is installed. At the top
    of the module, since other processes call it."""
    from sojourn.diagnosis.diagnose import diagnose
    from sojourn.diagnosis.evidence_level import tables_of, view_at_level
    from sojourn.scripting.predictor import predictor

    replays = predictor(view_at_level(run, level)) if "steps" in tables_of(level) else None
    return diagnose(run, predictor=replays, level=level)


@contextmanager
def _progress(is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar of the diagnosed runs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("diagnosing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=out,
                  transient=True, disable=not is_shown) as bar:  # fmt: skip
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _store(accuracy: "Accuracy") -> None:
    """Writes the coefficients that `diagnosis.confidence` reads."""
    import msgspec

    from sojourn.diagnosis.confidence import COEFFICIENTS, FEATURES
    from sojourn.metrics.whole_file import write_whole

    if accuracy.fit is None:
        raise InputError("--calibrate needs more runs: too few findings carry the features of a confidence")
    fit = accuracy.fit
    note = f"fitted by `sojourn dev faults score --calibrate` to {fit.samples} findings on {accuracy.scored_on}"
    document = {"note": note, "cases": fit.faults, "coefficients": dict.fromkeys(FEATURES, 0.0) | fit.coefficients}
    with writing(COEFFICIENTS, "the program's own folder has to be writable"):
        write_whole(COEFFICIENTS, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _show(accuracy: "Accuracy") -> None:
    from sojourn.diagnosis.score.accuracy import MAIN

    rows = table("level", "faults", *COLUMNS.values(), "none named", "s", text=("level",))
    for each in accuracy.levels:
        shares = [*(each.shares[name] for name in COLUMNS), each.no_cause]
        cells = ["–" if share.share is None else f"{share.share:.0%}" for share in shares]
        rows.add_row(each.level, str(each.faults), *cells, f"{each.median_seconds:.1f}")
    out.print(rows)
    out.print(f"{accuracy.levels[0].controls} controls; s: time to a verdict in seconds, median")
    level = MAIN if accuracy.misses.get(MAIN) is not None else next(iter(accuracy.misses))
    missed = table("miss", "runs", "truth", "said first", "truth stood",
                   text=("miss", "truth", "said first", "truth stood"))  # fmt: skip
    for miss in accuracy.misses[level]:
        missed.add_row(f"{miss.case}/{miss.severity}", str(len(miss.runs)), miss.wanted, miss.said, miss.stood)
    out.print(f"\nmisses at the level {level}: {len(accuracy.misses[level])}")
    if accuracy.misses[level]:
        out.print(missed)
    if accuracy.left_out:
        out.print(f"\nleft out (did not hurt, or disturbed controls): {', '.join(accuracy.left_out)}")
