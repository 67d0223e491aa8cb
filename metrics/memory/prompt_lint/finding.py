"""One finding of a lint: what is wrong, what it costs, and what mends it."""

from typing import Literal

import msgspec

Severity = Literal["high", "medium", "low"]
HIGH, MEDIUM, LOW = 0.2, 0.05, 0.01  # share of the prompt tokens that it costs


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` and `share` are of the prompts that were read; `share` alone where no prompt was."""

    severity: Severity
    key: str  # prompt_order, sub_block, dense_text, json_blanks, or template_…
    subject: str  # the class, or the chat template
    says: str
    fix: str
    tokens: int | None = None  # that it costs in these prompts
    share: float | None = None  # of all tokens of these prompts, what it costs
    prefill_ms: float | None = None  # time of the server that it costs, where a run shows it


def severity_of(share: float) -> Severity | None:
    """None where it costs too little to be told."""
    return "high" if share >= HIGH else "medium" if share >= MEDIUM else "low" if share >= LOW else None
