"""`sojourn demo`: the main job in one command."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import new_run, out, program_name, run_progress
from sojourn.commands.repeat_run import repeat_run
from sojourn.commands.run import run
from sojourn.loadgen.exit_code import NOT_VALID

if TYPE_CHECKING:
    from sojourn.replay.verdict.verify import Claim

SCENARIO = "demo"
MISSED = 1


def demo(
    prove: Annotated[
        bool, typer.Option("--prove", help="then repeat the load with the fix, and verify the prediction")
    ] = False,
) -> None:
    """Serve the bundled model, replay one minute of a real trace against it, diagnose the run, and predict the fix.

    On a machine that is too busy for the load the run is not valid. The demo says so and still ends with 0. With
    --prove it ends with 1 where the prediction missed.
    """
    folder = new_run(SCENARIO)
    try:
        run(SCENARIO, run_dir=folder)
    except typer.Exit as ended:
        if ended.exit_code not in (0, NOT_VALID):
            raise
    claim = _claim(folder)
    if claim is None:
        out.print("\nThis diagnosis names no fix whose effect a replay can predict, so there is nothing to prove.")
        return
    _print_claim(claim)
    if not prove:
        out.print(f"prove it       {program_name()} demo --prove   (this demo, then the same load with the fix)")
        return
    if not _proved(folder, claim):
        sys.exit(MISSED)


def _claim(folder: Path) -> "Claim | None":
    """What the first finding that can be proved by settings says of its fix."""
    from sojourn.commands.verify import written_diagnosis
    from sojourn.replay.verdict.verify import claims

    stated = [each for each in claims(written_diagnosis(folder)) if each.predicted_by == "diagnosis"]
    return next((each for each in stated if each.prediction.change.settings), None)


def _print_claim(claim: "Claim") -> None:
    from sojourn.metrics.prediction import change_text

    kept = claim.prediction.attainment
    out.print(
        f"\n[bold]prediction[/bold]     with {change_text(claim.prediction.change)}, {kept.median:.0%} of the requests "
        f"would keep their objectives (80 % interval {kept.low:.0%} – {kept.high:.0%})"
    )
    for doubt in claim.prediction.doubts:
        out.print(f"! the replay behind it is not trusted: {doubt}", markup=False)


def _proved(folder: Path, claim: "Claim") -> bool:
    """Makes the run with the fix, and says whether the prediction held."""
    from sojourn.commands.summary import diagnose_run
    from sojourn.commands.verify import print_verified, verify_pair
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.verdict.ledger import ledger_beside

    recorded = RunDirectory.open(folder)
    proof = new_run(f"{SCENARIO}-proof")
    out.print("\nThe same minute again, with the fix:")
    with run_progress(proof) as progress:
        done = repeat_run(recorded, claim.prediction.change.settings, proof, progress)
    diagnose_run(done)  # for the app
    ledger = ledger_beside(folder)
    found = verify_pair(recorded, done, ledger)
    print_verified(found, ledger)
    return found.entry.hit
