"""Causes in what the model itself costs on a sound server: its decode step, and a request's own prompt."""

from typing import Any

from sojourn.diagnosis.capacity import batch_within_tpot
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts, tightest
from sojourn.diagnosis.rules.cause import Proposal, all_of, cause
from sojourn.diagnosis.rules.formats import Smaller, smaller_weights
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, missing_share, residual_evidence
from sojourn.diagnosis.verdict import evidence
from sojourn.metrics.prediction import Change

DECODE, PREFILL = ("compute.decode",), ("compute.prefill",)
HEADROOM = 1.25  # above the speed at which the mean request is just in time
NEARLY_ALL = 0.75  # of what a token may take: a mean step leaves no room for the prompts of others
LARGEST_STEP = 2048  # tokens: a longer step gains nothing on any device


@cause(lifecycles=("compute",), object="decode step", kind="capacity", accounts=DECODE,
       needs=("excess", "step model", "work"), rival="a fault of the device", rival_key="slow_device")  # fmt: skip
def slow_decode(facts: Facts, excess: Excess) -> Proposal | None:
    """A step of the normal length is longer than the objective even for a single request: the model is too large."""
    bound = tightest(facts, "tpot_ms")
    if excess.objective == "ttft_ms":
        return None
    if bound is None:  # from end to end: what is left for a token
        bound = excess.bound_ms / max(float(facts.rows.loc[excess.missing].output_tokens.astype("float64").median()), 1)
    steps, model, context = facts.steps, facts.steps.model, facts.work.context_tokens
    alone_ms = model.predict(1, context) / 1e6
    now_ms = max(alone_ms, model.predict(steps.mean_batch, steps.mean_batch * context) / 1e6)
    if now_ms <= NEARLY_ALL * bound:
        return None
    fits = int(batch_within_tpot(facts))
    alone = alone_ms > bound
    slow_ms = excess.mean_ms if excess.objective == "tpot_ms" else now_ms  # with the prompts of others in its steps
    smaller = smaller_weights(facts)
    batch = 1 if alone else max(1, min(fits, int(steps.mean_batch)))
    probe = _with_fewer_bits(smaller, now_ms, bound) or {
        "measurement": "one request at a time on an idle server",
        "settings": {"max_num_seqs": batch},
        "if_cause": f"a token still takes {alone_ms:.1f} ms",
        "if_rival": f"a token takes clearly less than {alone_ms:.1f} ms",
        "fixes": tuple(Change(device_speed=max(HEADROOM, HEADROOM * each / bound)) for each in (now_ms, slow_ms)),
    }
    return Proposal(
        cause=f"a decode step takes {alone_ms:.1f} ms for a single request, above the {bound:.1f} ms that a token may "
        "take" if alone else
        f"a decode step of {steps.mean_batch:.0f} requests takes {now_ms:.1f} of the {bound:.1f} ms that a token may "
        "take, and a smaller batch cannot serve all",
        evidence=[
            *excess_evidence(excess, DECODE),
            evidence(f"a step takes {alone_ms:.1f} ms for one request with {context:,.0f} tokens of context, and "
                     f"{now_ms:.1f} ms for the {steps.mean_batch:.0f} that it holds on average", alone_ms, "ms",
                     "steps: fit", supports=alone_ms > NEARLY_ALL * bound, weight=2),
            evidence(f"step model: {model.step_ns / 1e6:.2f} ms + {model.token_ns / 1e3:.1f} µs a token + "
                     f"{model.context_ns:.0f} ns a token of context", model.step_ns / 1e6, "ms", "steps: fit",
                     weight=0),
            *smaller.evidence,
            *residual_evidence(facts),
        ],
        **probe,
        change=f"{smaller.words}a faster device or a smaller model; or an objective that this device can meet",
        claims=all_of(DECODE),
    )  # fmt: skip


def _with_fewer_bits(smaller: Smaller, now_ms: float, bound_ms: float) -> dict[str, Any]:
    """The measurement and the fix of a model that another format of its weights makes fast enough; {} of others."""
    if not smaller.fixes or now_ms / smaller.fixes[0].device_speed > bound_ms:
        return {}
    fix = smaller.fixes[0]
    then_ms = now_ms / fix.device_speed
    return {
        "measurement": "the same scenario with the other format of the weights",
        "settings": dict(fix.settings),
        "if_cause": f"a decode step falls from {now_ms:.1f} to about {then_ms:.1f} ms of the {bound_ms:.1f} ms",
        "if_rival": f"a decode step stays near {now_ms:.1f} ms",
        "fixes": smaller.fixes,
    }


@cause(lifecycles=("compute", "token"), object="prompt", kind="capacity", accounts=PREFILL,
       needs=("excess", "work"), rival="prompts in small chunks: what is slow is the number of steps",
       rival_key="token_budget")  # fmt: skip
def own_prefill(facts: Facts, excess: Excess) -> Proposal | None:
    """The request's own prompt takes longer than the objective allows."""
    late = facts.rows.loc[excess.missing]
    prompt = float(late.server_prompt_tokens.astype("float64").median())
    own_ms = float((late.ttft_compute_prefill_ns.astype("float64") / 1e6).mean())
    model = facts.steps.model if facts.steps is not None else None
    best_ms, part = own_ms, 1.0
    if model is not None and own_ms > 0:  # in whole steps, nobody else in them
        best_ms = (prompt * model.token_ns + max(1.0, prompt / LARGEST_STEP) * model.step_ns) / 1e6
        part = min(1.0, best_ms / own_ms)
    return Proposal(
        cause=f"a prompt of {prompt:,.0f} tokens costs {own_ms:,.0f} ms of its own, with nobody in its way",
        evidence=[
            *excess_evidence(excess, PREFILL),
            evidence(f"computed alone in steps of up to {LARGEST_STEP} tokens it would take {best_ms:,.0f} ms of the "
                     f"{excess.bound_ms:,.0f} ms", best_ms, "ms", "steps: fit; requests: prompt_tokens",
                     supports=best_ms >= 0.5 * excess.bound_ms, weight=2),
            *residual_evidence(facts),
        ],
        measurement="one of the late requests alone on an idle server",
        settings={"max_num_seqs": 1},
        if_cause=f"its own prefill stays near {own_ms:,.0f} ms",
        if_rival=f"{missing_share(excess)} falls to none",
        change="a faster prefill, a shared prefix, or an objective that grows with the prompt",
        claims=all_of(PREFILL, part),
        fixes=(Change(device_speed=max(2.0, HEADROOM * own_ms / max(excess.bound_ms, 1.0))),),
    )  # fmt: skip
