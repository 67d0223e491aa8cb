"""Requests wait until their model is loaded or woken."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.symptom_tree.reading import account
from sojourn.metrics.memory.residence import residences_of

COLD = "request.cold_start"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    found = excess_evidence(excess, (COLD,))
    waited = [each for each in residences_of(facts.meta) if each.num_waited]
    for each in waited:
        words = f"{each.name}: {each.num_waited} calls waited {each.waited_ns / 1e9:,.1f} s in all; {each.sentence()}"
        found.append(evidence(words, each.waited_ns / 1e9, "s", "run.json: models", weight=0))
    names = ", ".join(each.name for each in waited) or "their model"
    return Proposal(
        cause=f"requests wait until {names} is loaded or woken",
        evidence=found,
        measurement="the same scenario with the model loaded before, and without models_gib and model_idle_seconds",
        if_cause="request.cold_start goes to 0",
        if_rival=f"{missing_share(excess)} stays, in other accounts",
        change="keep the model loaded: more models_gib, a longer model_idle_seconds",
        fixes=(Change(removed={COLD: 1.0}),),
    )


CAUSE = Cause(
    key="cold_model",
    lifecycles=("request",),
    object="model that is not loaded",
    kind="policy",
    rival="a prefill server, or a queue, that holds them",
    asks="Do requests wait for their model?",
    measurement="the same scenario with the model loaded before, and without models_gib and model_idle_seconds",
    figures=(account("request.cold_start"),),
    booked=("request.cold_start",),
    complaints={"high_ttft": 12, "low_device_utilisation": 6, "product_latency_poor": 6},
    reads={
        Records: Rule(read_records, accounts=(COLD,)),
        Accounts: hold_time(
            accounts=("request.cold_start",),
            words="requests wait until their model is loaded or woken",
            change="keep the model loaded: more models_gib, a longer model_idle_seconds",
            rival="overload",
        ),
    },
)
