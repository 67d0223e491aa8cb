"""The draw of the next tokens takes a large part of each step."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import declared_classes
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.device import PER_STEP, WAITS
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.symptom_tree.reading import account

SAMPLE = "token.sample"
CONTENTION = (*WAITS, "request.interference")
SLOW_DRAWS = 1.8  # draws cost more with penalties and truncation, but seldom twice as much
SAMPLES_MUCH = 0.1  # of a step
SAMPLES_MOST = 0.3  # of a step: no model samples for longer, as far as no reference says what is normal
# Parameters of a request that make its draws dearer.
DEAR = ("logprobs", "top_logprobs", "prompt_logprobs", "repetition_penalty", "frequency_penalty", "presence_penalty",
        "lz_penalty", "logit_bias", "bad_words", "regex", "structured_outputs", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "response_format", "min_p", "top_p")  # fmt: skip
WITHOUT_EFFECT_AT_ONE = ("repetition_penalty", "top_p")  # the others are without effect where they are null, 0 or empty


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    speed, steps = facts.speed(), facts.steps
    share = steps.stage_share.get("sample", 0.0)
    pace = speed.sampling if speed is not None else None
    is_reference = pace is not None and speed.source == "reference"
    if share < (SAMPLES_MUCH if is_reference else SAMPLES_MOST) or (is_reference and pace.slowdown < SLOW_DRAWS):
        return None
    lost = pace.lost_share if is_reference else 1.0
    dear = dear_parameters(facts)
    each_ms = share * steps.wall_ns / steps.count / 1e6
    return Proposal(
        kind="workload" if dear and not (is_reference and pace.slowdown >= 3 * SLOW_DRAWS) else "fault",
        cause=f"sampling takes {each_ms:.1f} ms of each step, {share:.0%} of its time"
        + (f"; the requests ask for {', '.join(dear)}" if dear else ""),
        evidence=[
            evidence(f"the stage `sample` takes {share:.0%} of the steps' time", share, "share",
                     "steps: stage_sample_ns", weight=2),
            *([evidence(f"draws take {pace.slowdown:.1f} times as long as normal for as many rows", pace.slowdown,
                        "ratio", PER_STEP, supports=pace.slowdown >= SLOW_DRAWS, weight=2)] if is_reference else []),
            *excess_evidence(excess, (SAMPLE,)),
        ],
        measurement="the same scenario with greedy decoding: temperature 0, no penalties, no log-probabilities",
        if_cause=f"the stage `sample` falls from {each_ms:.1f} ms a step to a fraction",
        if_rival="the stage stays, as it waits for the logits",
        change=f"leave out {', '.join(dear)}, or sample with fused kernels" if dear else
        "find what slows the sampler: its kernels, or Python code in the path of each draw",
        claims={SAMPLE: lost} | dict.fromkeys(CONTENTION, share * lost),
        fixes=(Change(removed={SAMPLE: min(1.0, lost)}),),
    )  # fmt: skip


def dear_parameters(facts: Client) -> list[str]:
    """Parameters of the scenario's requests that make draws dearer than a plain one."""
    classes = declared_classes(facts.meta)
    asked = [*classes, *(variant for klass in classes for variant in klass.get("variants") or [])]
    bodies = [each | (each.get("extra_body") or {}) for each in asked]
    return sorted({name for body in bodies for name in DEAR
                   if body.get(name) and not (name in WITHOUT_EFFECT_AT_ONE and body[name] == 1)})  # fmt: skip


CAUSE = Cause(
    key="slow_sampler",
    lifecycles=("token", "compute"),
    object="sampler",
    kind="fault",
    rival="a slow matrix product behind the last layer",
    rival_key="slow_device",
    asks="Does the draw of a token take long?",
    measurement="the same scenario with temperature=0 and no penalties",
    figures=(account("token.sample"),),
    booked=("token.sample",),
    complaints={"high_ttft": 3, "high_itl": 2, "low_device_utilisation": 3, "devices_do_not_help": 3},
    reads={
        Records: Rule(read_records, needs=("excess", "steps")),
        Accounts: hold_time(
            accounts=("token.sample",),
            words="logits are ready and wait to become ids",
            change="cheaper sampling parameters, or a faster sampler",
            lifecycles=("token",),
            rival="a large vocabulary",
            rival_key="",
        ),
    },
)
