"""Speculation: drafts that cost more than they save, and output that prompt lookup would have guessed."""

from dataclasses import dataclass

from sojourn.diagnosis.capacity import FULL, best_load
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import Proposal, cause
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, missing_share
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change

DECODE, DRAFT = "compute.decode", "compute.draft"
WAITS = ("request.queue", "memory.blocked")  # that longer steps make longer
COSTS = 0.1  # of the time of decoding and drafting: what drafts must cost more than they save
WORTH = 1.15  # times as fast: below it two runs may differ as much
LOOKUP_DRAFTS = 4  # tokens that `lookup_steps` verifies in a step
FEWEST_SAMPLED = 4  # requests whose lookup was measured
RECORDS = "requests: drafted_tokens, accepted_tokens, rejected_ns, ledger_compute_draft_ns"


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the drafts of a run gave, and what they took."""

    drafted: float
    accepted: float
    rejected_share: float  # of the decoding, 0 to 1
    proposing_share: float  # of decoding and proposing
    lost_share: float  # ... that drafts took more than they saved; below 0 they saved more


def drafts_of(facts: Facts) -> Drafts | None:
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


def avoidable_drafts(facts: Facts, load: float) -> list[Evidence]:
    """Against a load that is called too high: drafts that cost more than they save. `load` is load / capacity."""
    drafts = drafts_of(facts)
    if drafts is None or drafts.lost_share < COSTS or facts.work is None:
        return []
    then = _load_without(facts, drafts, load)
    return [evidence(f"drafts cost {drafts.lost_share:.0%} of the decoding more than they save: without them load / "
                     f"capacity would be {then:.2f}", then, "ratio", RECORDS, supports=then >= FULL,
                     weight=4 if then < FULL else 0.5)]  # fmt: skip


def _load_without(facts: Facts, drafts: Drafts, load: float) -> float:
    """Load / capacity had there been no drafts."""
    busy = facts.rows[[f"ledger_compute_{name}_ns" for name in ("prefill", "decode", "draft")]].fillna(0).sum()
    return load * (1 - drafts.lost_share * float(busy.iloc[1:].sum() / max(busy.sum(), 1.0)))


@cause(lifecycles=("compute", "token"), object="speculation", kind="policy", accounts=(DECODE, DRAFT, *WAITS),
       rival="a model that is too large for its objective", rival_key="slow_decode")  # fmt: skip
def rejected_drafts(facts: Facts, excess: Excess) -> Proposal | None:
    """Drafts are not accepted often enough: proposing and verifying them costs more than they save."""
    drafts = drafts_of(facts)
    if drafts is None or drafts.lost_share < COSTS:
        return None
    share, lost = drafts.accepted / drafts.drafted, drafts.lost_share
    fixed = facts.engine.get("speculation_adaptive") == "off"
    settings = {"speculation_adaptive": "on"} if fixed else {"speculation": "none"}
    now = best_load(facts)
    tips = now >= FULL > _load_without(facts, drafts, now)  # then nobody would wait
    return Proposal(
        cause=f"{share:.0%} of the drafts of speculation={facts.engine.get('speculation')} were accepted; drafts cost "
        f"{lost:.0%} of the decoding more than they saved",
        evidence=[
            evidence(f"{drafts.accepted:,.0f} of {drafts.drafted:,.0f} drafts were accepted", share, "share", RECORDS,
                     weight=2),
            evidence(f"{drafts.rejected_share:.0%} of the decoding went to rejected drafts, and proposing took "
                     f"{drafts.proposing_share:.0%} more", lost, "share", RECORDS, weight=6),
            *excess_evidence(excess, (DECODE, DRAFT, *WAITS)),
        ],
        measurement="the same scenario with fewer drafts, or none",
        settings=settings,
        if_cause=f"a token takes about {lost:.0%} less",
        if_rival=f"{missing_share(excess)} stays",
        claims={DRAFT: 1.0, DECODE: max(lost, drafts.rejected_share),
                **dict.fromkeys(WAITS, 1.0 if tips else min(1.0, lost))},
    )  # fmt: skip


@cause(lifecycles=("compute", "token"), object="speculation", kind="policy", accounts=(DECODE,),
       needs=("excess", "step model", "work"), rival="a model that is too large for its objective",
       rival_key="slow_decode")  # fmt: skip
def no_drafts(facts: Facts, excess: Excess) -> Proposal | None:
    """The output repeats what stands before it, and each of its tokens costs a step of its own."""
    if (facts.engine.get("speculation") or "none") != "none" or excess.objective == "ttft_ms":
        return None
    sampled = facts.rows[facts.rows.lookup_steps.notna()] if "lookup_steps" in facts.rows else facts.rows[:0]
    if len(sampled) < FEWEST_SAMPLED:
        return None
    steps, output = float(sampled.lookup_steps.sum()), float(sampled.server_output_tokens.sum())
    batch, context = facts.steps.mean_batch, facts.steps.mean_batch * facts.work.context_tokens
    now, then = (facts.steps.model.predict(rows * batch, context) for rows in (1, 1 + LOOKUP_DRAFTS))
    times = output / steps * now / then
    if times < WORTH:
        return None
    settings, spared = {"speculation": "ngram"}, 1 - 1 / times
    return Proposal(
        cause=f"the output repeats what stands before it: prompt lookup would give {output / steps:.1f} tokens a step, "
        "and now each costs a step of its own",
        evidence=[
            evidence(f"{LOOKUP_DRAFTS} tokens of prompt lookup a step would have given {output:,.0f} tokens of "
                     f"{len(sampled)} requests in {steps:,.0f} steps", output / steps, "tokens a step",
                     "requests: lookup_steps", weight=3),
            evidence(f"a step that verifies them takes {then / now:.2f} times as long, for {batch:.1f} requests",
                     then / now, "ratio", "steps: fit", weight=0),
            *excess_evidence(excess, (DECODE,)),
        ],
        measurement="the same scenario with drafts from the text itself",
        settings=settings,
        if_cause=f"a token takes about {1 / times:.0%} of the time; outputs stay the same",
        if_rival=f"few drafts are accepted, and {missing_share(excess)} stays",
        claims={DECODE: spared},
        fixes=(Change(settings=settings, removed={DECODE: spared}),),
    )  # fmt: skip
