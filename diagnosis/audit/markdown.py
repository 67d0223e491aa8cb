"""The audits as a short page of Markdown, for a pull request."""

from collections.abc import Sequence

from sojourn.diagnosis.audit.audits import Audited
from sojourn.diagnosis.audit.budget import Line
from sojourn.diagnosis.verdict import Diagnosis

MARKS = {"fail": "✗", "pass": "✓", "not measurable": "–"}
KEPT = {True: "✓", False: "✗", None: "–"}


def render(diagnosis: Diagnosis, audits: Sequence[Audited], lines: Sequence[Line], changes: Sequence[str] = ()) -> str:
    """`changes`: sentences on what differs from a run before."""
    failed = [each for each in audits if each.status == "fail"]
    passed = [each for each in audits if each.status == "pass"]
    unseen = [each for each in audits if each.status == "not measurable"]
    text = [
        f"## {diagnosis.run}: {len(failed)} of {len(audits)} audits fail, {len(unseen)} cannot be measured", "",
        f"{diagnosis.headline[:1].upper()}{diagnosis.headline[1:]}", "",
    ]  # fmt: skip
    if changes:
        text += ["### Since the run before", "", *(f"- {each}" for each in changes), ""]
    if lines:
        text += ["| budget | bound | measured | |", "|---|---|---|---|"]
        text += [f"| {line.name} | {line.bound} | {_cell(line.measured)} | {KEPT[line.kept]} |" for line in lines]
        text.append("")
    if failed:
        text += ["| | audit | worth | what was found | what to do |", "|---|---|---|---|---|"]
        text += [f"| ✗ | {each.key} | {worth(each)} | {_cell(each.says)} | {_cell(each.fix)} |" for each in failed]
        text.append("")
    text += [f"- ✓ {each.title}: {each.says}" for each in passed]
    text += [f"- – {each.title}: not measurable, {each.says}" for each in unseen]
    return "\n".join(text).rstrip() + "\n"


def worth(audit: Audited) -> str:
    """`+12 points`: of attainment."""
    if not audit.worth:
        return "–"
    return f"+{100 * audit.worth:.0f} points{' (estimate)' if audit.is_estimate else ''}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def changes_of(
    before: Diagnosis, now: Diagnosis, audits_before: Sequence[Audited], audits: Sequence[Audited]
) -> list[str]:
    """Sentences: attainment, and each audit that ends otherwise than before."""
    shares = [next((each.attainment for each in found.goodput if each.klass == "all"), None) for found in (before, now)]
    found = [] if None in shares else [f"attainment {shares[0]:.1%} → {shares[1]:.1%}"]
    then = {each.key: each.status for each in audits_before}
    found += [
        f"{each.key}: {then[each.key]} → {each.status} ({each.says})"
        for each in audits if then.get(each.key, each.status) != each.status
    ]  # fmt: skip
    return found
