"""The output repeats what stands before it, and each of its tokens costs a step of its own."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share

DECODE = "compute.decode"
WORTH = 1.15  # times as fast: below it two runs may differ as much
LOOKUP_DRAFTS = 4  # tokens that `lookup_steps` verifies in a step
FEWEST_SAMPLED = 4  # requests whose lookup was measured


def read_records(facts: Records, excess: Excess) -> Proposal | None:
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
        cause=f"the output repeats what precedes it: prompt lookup would give {output / steps:.1f} tokens per step, "
        "and now each costs a step of its own",
        evidence=[
            evidence(f"{LOOKUP_DRAFTS} tokens of prompt lookup a step would have given {output:,.0f} tokens of "
                     f"{len(sampled)} requests in {steps:,.0f} steps", output / steps, "tokens per step",
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


CAUSE = Cause(
    key="no_drafts",
    lifecycles=("compute", "token"),
    object="speculation",
    kind="policy",
    rival="a model that is too large for its objective",
    rival_key="slow_decode",
    name="steps of one token",
    asks="Does the output repeat what stands before it?",
    measurement="the same scenario with speculation=ngram",
    booked=("compute.decode",),
    missing="the steps that prompt lookup would have taken (requests: lookup_steps)",
    complaints={"high_itl": 3},
    reads={Records: Rule(read_records, accounts=(DECODE,), needs=("excess", "step model", "work"))},
)
