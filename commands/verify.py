"""`sojourn verify`: whether the run with the fix did what was predicted."""

import json as json_module
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from sojourn.commands.cli import RUNS, find_run, open_run, out, print_json, table
from sojourn.metrics.errors import InputError, ReplayError, SojournError
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.predictor import ReplayPredictor
    from sojourn.replay.verdict.ledger import Checked, LedgerEntry
    from sojourn.replay.verdict.verify import Verified

PREDICTED_BY = {"diagnosis": "the diagnosis", "rival": "the diagnosis, of its rival", "plan": "the plan",
                "replay": "a replay, after the fact"}  # fmt: skip


def verify(
    run: Annotated[Path | None, typer.Argument(help="the run that the prediction is of")] = None,
    run2: Annotated[Path | None, typer.Argument(help="the same load with the change")] = None,
    list_: Annotated[bool, typer.Option("--list", help="show the ledger: every prediction, hits and errors")] = False,
    ledger: Annotated[
        Path | None, typer.Option(help="ledger to append to or to show; by default predictions.jsonl beside RUN2")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="device_speed=FACTOR", help="what the settings that differ do to the speed of the device"
        ),
    ] = None,
    is_repeat: Annotated[
        bool, typer.Option("--repeat", help="the run was repeated on purpose: its own replay is judged")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compare what was predicted of a change with what the run with that change gave, and keep score.

    The prediction is that of RUN's diagnosis, if the settings that differ are those of a fix that it names; else RUN
    is replayed with the settings that differ. It is judged as it was stated, and for the speed that RUN2 had.
    """
    from sojourn.replay.verdict.ledger import FILE_NAME

    if list_:
        if run2 is not None:
            raise InputError("--list shows a ledger and takes a run or none; leave the second run out")
        _list(_ledger(ledger, run) if run is not None or ledger is not None else RUNS / FILE_NAME, json)
        return
    if run is None or run2 is None:
        raise InputError("give the run that was predicted and the run with the change, or --list")
    path, pair = _ledger(ledger, run2), (open_run(run), open_run(run2))
    _check_change(*pair, is_repeat=is_repeat)
    found = verify_pair(*pair, path, device_speed=_device_speed(set_ or []))
    if json:
        print_json({
            "entry": found.entry, "changed": found.changed, "notes": found.notes, "differences": found.differences,
            "ledger": str(path),
        })  # fmt: skip
    else:
        print_verified(found, path)
    if found.entry.outcome == "miss":
        sys.exit(Ended.FAILED)


def _check_change(run: "RunDirectory", run2: "RunDirectory", *, is_repeat: bool) -> None:
    """Raises InputError where the pair tests no change: nobody knows the settings, or none of them differs."""
    from sojourn.metrics.compare.settings import states_settings
    from sojourn.replay.verdict.changed import changed_settings
    from sojourn.replay.verdict.verify import check_comparable

    check_comparable(run, run2)
    metas = [(each, each.meta()) for each in (run, run2)]
    if blind := [each.name for each, meta in metas if not states_settings(meta)]:
        raise InputError(
            f"{' and '.join(blind)} {'does' if len(blind) == 1 else 'do'} not say with which settings the server ran, "
            "so there is no change whose prediction could be tested; record a vLLM with sojourn-probe. "
            f"{_compared(run, run2)}"
        )
    if not is_repeat and not changed_settings(metas[0][1], metas[1][1]):
        raise InputError(
            f"no setting differs between {run.name} and {run2.name}, so no prediction of a change is tested; if the "
            f"run was repeated on purpose, add --repeat. {_compared(run, run2)}"
        )


def _compared(run: "RunDirectory", run2: "RunDirectory") -> str:
    """What `sojourn compare` says of the pair."""
    from sojourn.commands.compare import surely
    from sojourn.metrics.compare.runs import compare_runs

    command = f"`sojourn compare {shlex.quote(str(run.path))} {shlex.quote(str(run2.path))}`"
    try:
        found = compare_runs([run], [run2])
    except SojournError:
        return f"{command} weighs their latencies"
    return f"{command} says: {found.verdict}{surely(found)}"


def _device_speed(words: list[str]) -> float:
    from sojourn.metrics.prediction import Change
    from sojourn.scripting.changes import grid

    changes = grid(words)
    change = changes[0] if changes else Change()
    if len(changes) > 1 or change != Change(device_speed=change.device_speed):
        raise InputError(
            "verify takes the change from the settings of the two runs; --set gives only device_speed, one value, such "
            "as --set device_speed=1.3"
        )
    return change.device_speed


def verify_pair(
    run: "RunDirectory", run2: "RunDirectory", ledger: Path, predicted_by: str | None = None,
    predictor: "ReplayPredictor | None" = None, device_speed: float = 1.0,
) -> "Verified":  # fmt: skip
    """Judges the pair and appends it to the ledger. `predicted_by` names who asked `predictor`; else the diagnosis of
    the first run is read. `device_speed` is what the settings that differ do to the device. Raises SojournError where
    the pair tests no prediction."""
    from sojourn.replay.verdict.changed import changed_settings
    from sojourn.replay.verdict.ledger import append
    from sojourn.replay.verdict.verify import check_comparable, chosen_claim, claims, verified

    try:
        notes = check_comparable(run, run2)
        changed = changed_settings(run.meta(), run2.meta())
        stated = [] if predictor is not None else claims(written_diagnosis(run.path))
        make = cache(lambda: predictor or _predictor(run))
        claim, others = chosen_claim(changed, stated, make, device_speed)
    except ReplayError as error:
        raise InputError(str(error)) from None
    if predicted_by is not None:
        claim = claim._replace(predicted_by=predicted_by)
    try:
        replays = make()
    except SojournError as error:  # a prediction of a diagnosis is judged all the same
        replays, others = None, [*others, f"not judged for the speed of {run2.name}: {error}"]
    found = verified(run, run2, claim, [*notes, *others], replays)
    try:
        append(ledger, found.entry)
    except OSError as error:
        raise SojournError(f"{ledger} cannot be written: {error.strerror}; choose another with --ledger") from None
    return found


def print_verified(found: "Verified", ledger: Path | None = None) -> None:
    from sojourn.metrics.prediction import change_text, settings_text

    entry = found.entry
    before = settings_text({name: old for name, (old, _) in found.changed.items()})
    after = settings_text({name: new for name, (_, new) in found.changed.items()})
    out.print(f"changed        {before} → {after}" if found.changed else "changed        nothing: the run was repeated",
              markup=False)  # fmt: skip
    said = {"diagnosis": f"the diagnosis of {entry.run} ({entry.cause})", "rival": f"the diagnosis of {entry.run}, as "
            f"what its rival {entry.cause} would give", "plan": f"the plan of {entry.run}"}  # fmt: skip
    who = said.get(entry.predicted_by, f"a replay of {entry.run}, after the fact")
    out.print(f"predicted by   {who}: {change_text(entry.change)}\n", markup=False)
    rows = table("figure", "before", "predicted", "80% interval", "measured", "error", "", text=["figure", ""])
    for each in entry.figures:
        show = _percent if each.name == "attainment" else _number
        error = f"{each.error * 100:+.1f} points" if each.name == "attainment" else f"{each.error:+.1%}"
        cells = ("–" if each.before is None else show(each.before), show(each.median))
        rows.add_row(_named(each.name), *cells, f"{show(each.low)} – {show(each.high)}", show(each.measured), error,
                     "hit" if each.hit else "miss")  # fmt: skip
    out.print(rows)
    out.print()
    lines = Table.grid(padding=(0, 1))
    lines.add_column(width=14)
    for each in sorted(found.differences, key=lambda each: not each.is_different):
        lines.add_row("different" if each.is_different else "alike", Text(f"{each.name}: {each.sentence}"))
    out.print(lines)
    for note in found.notes:
        out.print(f"! {note}", markup=False)
    out.print(f"\n[bold]{entry.outcome}[/bold]: {verdict_sentence(entry)}")
    if entry.at_speed is not None:
        word = "hit" if entry.at_speed.hit else "miss"
        out.print(f"[bold]{word}[/bold] at the speed of {entry.run2}: {_judged_sentence(entry.at_speed)}")
    if ledger is not None:
        out.print(f"ledger         {ledger}", markup=False)


def verdict_sentence(entry: "LedgerEntry") -> str:
    """`attainment 96.1% lies within the predicted 92.0% – 100.0%`."""
    if entry.is_open:
        judged = entry.figures[0]
        show = _percent if judged.name == "attainment" else _number
        return (
            f"{_named(judged.name)} could not be predicted ({show(judged.low)} – {show(judged.high)}); "
            f"{show(judged.measured)} were measured"
        )
    return _judged_sentence(entry.figures[0])


def _judged_sentence(judged: "Checked") -> str:
    show = _percent if judged.name == "attainment" else _number
    lies = "lies within" if judged.hit else "lies outside"
    return (
        f"{_named(judged.name)} {show(judged.measured)} {lies} the predicted {show(judged.low)} – {show(judged.high)}"
    )


def _list(path: Path, json: bool) -> None:
    from sojourn.metrics.prediction import change_text
    from sojourn.replay.verdict.ledger import read, score

    entries = read(path)
    total = score(entries)
    if json:
        print_json({"ledger": str(path), "score": total, "hit_rate": total.hit_rate, "entries": entries})
        return
    if not entries:
        out.print(f"{path} holds no prediction yet; verify one: sojourn verify RUN RUN2", markup=False)
        return
    for entry in entries:
        judged = entry.figures[0]
        error = f"{100 * judged.error:+.1f} points" if judged.name == "attainment" else f"{judged.error:+.1%}"
        word, colour = {"hit": ("hit ", "green"), "miss": ("miss", "yellow")}.get(entry.outcome, ("open", "blue"))
        out.print(
            Text.assemble(
                (word, colour), f"  {change_text(entry.change)}, predicted by {PREDICTED_BY[entry.predicted_by]}"
            )
        )
        out.print(f"      {verdict_sentence(entry)}, error {error}", markup=False)
        when = entry.when[:16].replace("T", " ")
        out.print(f"      {when}  {entry.run} → {entry.run2}", markup=False, style="dim", soft_wrap=True)
    if not total.predictions:
        out.print("\nNone of them could be predicted, so there is no score.")
        return
    out.print(
        f"\n{total.hits} of {total.predictions} predictions hit ({total.hit_rate:.0%}); mean error "
        f"{100 * total.mean_error:.1f} points or percent, worst {100 * total.worst_error:.1f}"
    )


def _ledger(ledger: Path | None, run: Path | None) -> Path:
    from sojourn.replay.verdict.ledger import ledger_beside

    return ledger if ledger is not None else ledger_beside(find_run(run))


def written_diagnosis(run: Path) -> dict | None:
    """What diagnosed the run before the change was tried; None where nobody did."""
    try:
        return json_module.loads((run / "diagnosis.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _predictor(run: "RunDirectory") -> "ReplayPredictor":
    from sojourn.metrics.run.fleet import refuse_fleet
    from sojourn.replay.predictor import predictor_of

    refuse_fleet(run, "a prediction that is verified")
    return predictor_of(run)


def _named(figure: str) -> str:
    name, _, quantile = figure.partition(":")
    words = {"attainment": "attainment", "goodput_rps": "goodput, 1/s"}
    return words.get(name, f"{name.removesuffix('_ms').upper()} {quantile}, ms")


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _number(value: float) -> str:
    return "–" if value != value else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
