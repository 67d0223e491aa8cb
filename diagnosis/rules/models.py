"""Causes of a front with several models, or with one that sleeps (docs/cold_start.md)."""

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import Proposal, cause
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, missing_share
from sojourn.diagnosis.verdict import evidence
from sojourn.metrics.memory.residence import residences_of
from sojourn.metrics.prediction import Change

COLD = "request.cold_start"


@cause(lifecycles=("request",), object="model that is not loaded", kind="policy", accounts=(COLD,),
       rival="a prefill server, or a queue, that holds them")  # fmt: skip
def cold_model(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait until their model is loaded or woken."""
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
        settings=None,
        if_cause="request.cold_start goes to 0",
        if_rival=f"{missing_share(excess)} stays, in other accounts",
        change="keep the model loaded: more models_gib, a longer model_idle_seconds",
        fixes=(Change(removed={COLD: 1.0}),),
    )
