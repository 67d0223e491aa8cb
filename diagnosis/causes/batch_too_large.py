"""So many requests decode together that each step is longer than the time per output token allows."""

from sojourn.diagnosis.capacity import FULL, batch_within_tpot, load
from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import tightest
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.statements.excess import excess_evidence, load_evidence, residual_evidence
from sojourn.diagnosis.symptom_tree.reading import Reading, show_batch, show_decode_step

DECODE = ("compute.decode",)
NARROWER = (1.0, 0.75, 0.5, 0.25)  # of the batch that fits the time per token
LARGER_STEP = 1.25  # a batch that makes steps a quarter longer than the objective is a measured effect, not noise


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    bound = tightest(facts, "tpot_ms")
    if bound is None or excess.objective == "ttft_ms":
        return None
    steps, model, context = facts.steps, facts.steps.model, facts.work.context_tokens
    fits = int(batch_within_tpot(facts))
    alone_ms = model.predict(1, context) / 1e6
    now_ms = model.predict(steps.mean_batch, steps.mean_batch * context) / 1e6
    if alone_ms > bound or steps.mean_batch <= fits or now_ms < LARGER_STEP * alone_ms:
        return None
    then = load(facts, batch=fits)
    values = list(dict.fromkeys(max(1, int(part * fits)) for part in NARROWER))
    return Proposal(
        cause=f"a decode step of {steps.mean_batch:.0f} requests takes {now_ms:.1f} ms; {fits} would meet the "
        f"{bound:g} ms",
        evidence=[
            *excess_evidence(excess, DECODE),
            evidence(f"a step takes {alone_ms:.1f} ms for one request and {now_ms:.1f} ms for the "
                     f"{steps.mean_batch:.0f} that it holds", now_ms / alone_ms, "ratio", "steps: fit", weight=2),
            load_evidence(f"with {fits} at a time load / capacity is {then:.2f}", then, supports=then < FULL, weight=2),
            *residual_evidence(facts),
        ],
        measurement="the same scenario with a smaller batch",
        settings={"max_num_seqs": values[0]},
        if_cause=f"decode steps fall to about {model.predict(fits, fits * context) / 1e6:.1f} ms",
        if_rival=f"decode steps stay near {now_ms:.1f} ms",
        claims=all_of(DECODE, 1 - alone_ms / now_ms),
        fixes=tuple(Change(settings={"max_num_seqs": value}) for value in values),
    )  # fmt: skip


def show_large_batch(facts: Records) -> Reading | None:
    found, step = show_batch(facts), show_decode_step(facts)
    if found is None or step is None:
        return found
    return Reading(f"{found.statement}; {step.statement}", step.rules_out, f"{found.source}; {step.source}", step.share)


CAUSE = Cause(
    key="batch_too_large",
    lifecycles=("compute", "request"),
    object="batch cap (max_num_seqs)",
    kind="policy",
    rival="a slow device: steps that are long for what they hold",
    rival_key="slow_device",
    name="batch size",
    asks="Is the batch so large that each step is late?",
    measurement="the same scenario with half the max_num_seqs",
    figures=(show_large_batch,),
    booked=("compute.decode",),
    complaints={"high_ttft": 6, "high_itl": 8},
    reads={Records: Rule(read_records, accounts=DECODE, needs=("excess", "step model", "work"))},
)
