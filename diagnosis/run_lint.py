"""The lint of the prompts of a run, from its records: what was shared, what could have been, and what it cost."""

from collections.abc import Iterator

import pandas as pd

from sojourn.diagnosis.kv_facts import USUAL_BLOCK_SIZE
from sojourn.diagnosis.memory_facts import prefix_use, prompt_order, select_lookups, shared_lengths
from sojourn.diagnosis.step_facts import step_facts
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.memory.prompt_lint.finding import Finding
from sojourn.metrics.memory.prompt_lint.lint import ClassReport, LintReport, TextCost, share_findings
from sojourn.metrics.run.directory import RunDirectory, engine_settings

OLDER = "this run is older than the records of what prompts share to the token; only whole blocks are known"


def lint_run(run: RunDirectory) -> LintReport:
    """Raises RunDataError for a run whose server recorded no prompts."""
    requests, steps = run.table("requests"), run.table("steps")
    rows = select_lookups(requests)
    if not len(rows):
        raise RunDataError(
            f"{run.path}: no server recorded what its prompts share; record a run with our engine and full telemetry, "
            "or lint its scenario"
        )
    block_size = int(engine_settings(run.meta()).get("block_size") or USUAL_BLOCK_SIZE)
    facts = step_facts(steps)
    ns_per_token = facts.model.token_ns if facts is not None and facts.model is not None else None
    classes = list(_classes(rows, block_size))
    findings = [finding for report in classes for finding in share_findings(report, block_size, ns_per_token)]
    notes = ["characters per token are of whole prompts: a run records neither their text nor its bytes"]
    if shared_lengths(rows, block_size) is None:
        notes.append(OLDER)
    return LintReport(
        target=str(run.path), block_size=block_size, classes=classes, findings=by_cost(findings), notes=notes
    )


def by_cost(findings: list[Finding]) -> list[Finding]:
    """Worst first."""
    return sorted(findings, key=lambda each: (("high", "medium", "low").index(each.severity), -(each.share or 0.0)))


def _classes(rows: pd.DataFrame, block_size: int) -> Iterator[ClassReport]:
    for klass, group in rows.groupby("klass", sort=False):
        use, lengths, order = prefix_use(group), shared_lengths(group, block_size), prompt_order(group)
        with_text = group[group.prompt_characters.astype("float64") > 0]
        characters, tokens = (int(with_text[name].sum()) for name in ("prompt_characters", "prompt_tokens"))
        yield ClassReport(
            klass=str(klass), requests=len(group), prompt_tokens=use.prompt_tokens, common_prefix_tokens=None,
            shared_share=lengths and lengths.shared_share, infinite_share=use.infinite_share,
            movable_share=order and order.movable_share, caught=lengths.caught if lengths else {},
            texts=[TextCost("prompts", characters, tokens, None)] if tokens else [],
        )  # fmt: skip
