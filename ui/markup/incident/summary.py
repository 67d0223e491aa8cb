"""A diagnosis as Markdown, for tickets and language models."""

from sojourn.diagnosis.foreign_server import span_names
from sojourn.diagnosis.verdict import Diagnosis, Finding, label_fix
from sojourn.ui.text import number, percent


def markdown_summary(name: str, diagnosis: Diagnosis) -> str:
    """Verdict, goodput, where the time went, and each finding with evidence, proof and fix."""
    lines = [f"# Run {name}: {diagnosis.state}", "", diagnosis.headline, ""]
    if diagnosis.goodput:
        lines += ["| class | objectives | good / sent | share | good req/s |", "|---|---|---|---|---|"]
        for row in diagnosis.goodput:
            bounds = ", ".join(f"{key.removesuffix('_ms')} ≤ {bound:g} ms" for key, bound in row.objectives.items())
            cells = (row.klass, bounds or "–", f"{row.good} / {row.sent}", percent(row.attainment),
                     number(row.goodput_rps))  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
    spent = sorted(diagnosis.ledger_share.items(), key=lambda item: -item[1])[:6]
    if spent:
        spans = {} if diagnosis.server is None else span_names(diagnosis.server)
        lines += [
            "Time of all requests: "
            + ", ".join(f"{spans.get(account, account)} {percent(share)}" for account, share in spent),
            "",
        ]
    for place, found in enumerate(diagnosis.findings, start=1):
        lines += [*_finding(place, found), ""]
    lines += [f"- {warning}" for warning in diagnosis.warnings]
    return "\n".join(lines).strip() + "\n"


def _finding(place: int, found: Finding) -> list[str]:
    lines = [f"## {place}. {found.cause}", "", f"- object: {found.object} ({', '.join(found.lifecycles)})"]
    for each in found.evidence:
        lines.append(f"- {'for' if each.supports else 'against'}: {each.statement} ({each.source})")
    command = f" (`{found.probe.command}`)" if found.probe.command else ""
    proof = f"{found.probe.measurement}{command}"
    lines.append(f"- proof: {proof}; if so: {found.probe.if_cause}; else: {found.probe.if_rival}")
    lines.append(f"- {label_fix(found.fix)}: {found.fix.change} ({found.fix.gain})")
    return lines
