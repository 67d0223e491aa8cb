"""The end of `sojourn run`: what the diagnosis predicts of its fix, and the run that tests it."""

from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.commands.cli import new_run, out, run_progress
from sojourn.commands.repeat_run import repeat_run

if TYPE_CHECKING:
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.verdict.verify import Claim


def claim_of(folder: Path) -> "Claim | None":
    """What the first finding whose fix regains something, and can be proved by settings, says of it."""
    from sojourn.commands.verify import written_diagnosis
    from sojourn.replay.verdict.verify import claims

    written = written_diagnosis(folder) or {}
    regains = {found.get("key") for found in written.get("findings") or () if found.get("fix", {}).get("regains", True)}
    stated = [each for each in claims(written) if each.predicted_by == "diagnosis" and each.cause in regains]
    return next((each for each in stated if each.prediction.change.settings), None)


def print_claim(claim: "Claim | None") -> None:
    from sojourn.metrics.prediction import change_text

    if claim is None:
        out.print("\nThis diagnosis names no fix whose effect a replay can predict, so there is nothing to prove.")
        return
    kept, change = claim.prediction.attainment, change_text(claim.prediction.change)
    said = f"with {change}, {kept.median:.0%} of the requests would keep their objectives"
    if claim.prediction.is_open:
        said = f"what {change} gives cannot be predicted"
    out.print(f"\n[bold]prediction[/bold]     {said} (80% interval {kept.low:.0%} – {kept.high:.0%})")


def is_proved(recorded: "RunDirectory", claim: "Claim") -> bool:
    """Makes the run with the fix, and says whether the prediction did not miss."""
    from sojourn.commands.summary import diagnose_run
    from sojourn.commands.verify import print_verified, verify_pair
    from sojourn.replay.verdict.ledger import ledger_beside

    proof = new_run(f"{recorded.meta()['scenario']['name']}-proof")
    out.print("\nThe same load again, with the fix:")
    with run_progress(proof) as progress:
        done = repeat_run(recorded, claim.prediction.change.settings, proof, progress)
    diagnose_run(done)  # for the app
    ledger = ledger_beside(recorded.path)
    found = verify_pair(recorded, done, ledger)
    print_verified(found, ledger)
    return found.entry.outcome != "miss"
