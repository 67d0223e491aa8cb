"""What drafts cost and spare."""

from dataclasses import dataclass

from sojourn.diagnosis.evidence import Client, Records

COSTS = 0.1  # of the time of decoding and drafting: what drafts must cost more than they save
RECORDS = "requests: drafted_tokens, accepted_tokens, rejected_ns, ledger_compute_draft_ns"


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the drafts of a run gave, and what they took."""

    drafted: float
    accepted: float
    rejected_share: float  # of the decoding, 0 to 1
    proposing_share: float  # of decoding and proposing
    lost_share: float  # of decoding and proposing, what drafts took more than they saved; below 0 they saved more


def drafts_of(facts: Records) -> Drafts | None:
    """None of a run without any draft."""
    known = facts.rows[facts.rows.drafted_tokens.fillna(0) > 0] if "drafted_tokens" in facts.rows else facts.rows[:0]
    if not len(known):
        return None
    accepted = float(known.accepted_tokens.sum())
    decode_ns, draft_ns = (float(known[f"ledger_compute_{name}_ns"].fillna(0).sum()) for name in ("decode", "draft"))
    rejected_ns, output = float(known.rejected_ns.fillna(0).sum()), float(known.server_output_tokens.sum())
    whole_ns = max(decode_ns + draft_ns, 1.0)
    lost_ns = rejected_ns - accepted * (decode_ns - rejected_ns) / max(output, 1.0)
    if facts.steps is not None and facts.steps.model is not None:
        # A row may cost far less than its FLOPs say, where a step is bound by the weights that it reads. An accepted
        # draft spares its request a step; a rejected one costs a row to all that run in the step.
        batch, model = max(facts.steps.mean_batch, 1.0), facts.steps.model
        rejected = float(known.drafted_tokens.sum()) - accepted
        lost_ns = batch * (rejected * model.token_ns - accepted * model.step_ns / batch)
    return Drafts(
        float(known.drafted_tokens.sum()), accepted, rejected_ns / max(decode_ns, 1.0), draft_ns / whole_ns,
        (draft_ns + lost_ns) / whole_ns,
    )  # fmt: skip


def load_without(facts: Client, drafts: Drafts, load: float) -> float:
    """Load / capacity had there been no drafts."""
    busy = facts.rows[[f"ledger_compute_{name}_ns" for name in ("prefill", "decode", "draft")]].fillna(0).sum()
    return load * (1 - drafts.lost_share * float(busy.iloc[1:].sum() / max(busy.sum(), 1.0)))
