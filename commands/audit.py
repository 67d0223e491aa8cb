"""`sojourn report RUN --audit`: the audits of a run as Markdown, and an exit code that CI can hold."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.commands.cli import open_run, working, writing
from sojourn.commands.summary import diagnose_run
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.diagnosis.audit.audits import Audited
    from sojourn.diagnosis.audit.budget import Budget
    from sojourn.diagnosis.verdict import Diagnosis


def write_audit(
    run: Path, before: Path | None, objectives: list[dict[str, Any]] | None, budget_file: Path | None,
    output: Path | None,
) -> Ended:  # fmt: skip
    """Prints the page, or writes it to `output`. FAILED where a bound of the budget is broken, CANNOT_TELL where one
    was not measured. Without a budget DONE."""
    from sojourn.diagnosis.audit.budget import Budget, judge, read_budget
    from sojourn.diagnosis.audit.markdown import changes_of, render
    from sojourn.metrics.whole_file import write_whole

    budget = Budget() if budget_file is None else read_budget(budget_file)
    diagnosis, audits = _audited(run, objectives, budget)
    changes: list[str] = []
    if before is not None:
        diagnosis_before, audits_before = _audited(before, objectives, budget)
        changes = changes_of(diagnosis_before, diagnosis, audits_before, audits)
    lines = [] if budget_file is None else judge(budget, diagnosis, audits)
    page = render(diagnosis, audits, lines, changes)
    if output is None:
        print(page, end="")
    else:
        with writing(output):
            write_whole(output, page)
    if any(line.kept is False for line in lines):
        return Ended.FAILED
    return Ended.CANNOT_TELL if any(line.kept is None for line in lines) else Ended.DONE


def _audited(run: Path, objectives: list[dict[str, Any]] | None, budget: "Budget") -> "tuple[Diagnosis, list[Audited]]":
    from sojourn.diagnosis.audit.audits import audited
    from sojourn.diagnosis.evidence import read_evidence
    from sojourn.diagnosis.expectation import with_expectation

    opened = open_run(run, objectives)
    with working(f"diagnosing {opened.name}"):
        diagnosis = diagnose_run(opened)
        facts = read_evidence(with_expectation(opened))
    return diagnosis, audited(diagnosis, facts, budget.attainment, budget.failed)
