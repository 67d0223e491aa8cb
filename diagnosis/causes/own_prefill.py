"""The request's own prompt takes longer than the objective allows."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Client, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.client_signs import signs_of
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.client_only import TTFT, goes_with_prompt, hint
from sojourn.diagnosis.statements.device import HEADROOM
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share, residual_evidence
from sojourn.diagnosis.statements.means import time_gained
from sojourn.diagnosis.statements.prefixes import fallen_hits
from sojourn.diagnosis.statements.refutations import RATE_THAT_STAYS, SIGNS_OF_EVICTIONS
from sojourn.diagnosis.symptom_tree.reading import account

PREFILL = ("compute.prefill",)
LARGEST_STEP = 2048  # tokens: a longer step gains nothing on any device


def read_records(facts: Records, excess: Excess) -> Proposal | None:
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


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """First tokens come the later the longer the prompt is."""
    signs = signs_of(facts)
    if excess.objective == "tpot_ms" or not goes_with_prompt(signs):
        return None
    grows = evidence(f"the time to first token goes with the length of the prompt: rank correlation "
                     f"{signs.with_prompt:.2f}", signs.with_prompt, "correlation", TTFT, weight=2)  # fmt: skip
    return hint(excess, "first tokens come the later the longer the prompt is", [grows], 0.5, "shorter prompts")


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """The prefix cache hit, and hardly does since a moment, without a sign of evictions: prompts share less."""
    view, fall = facts.server, fallen_hits(facts.server, excess)
    if fall is None:
        return None
    return Proposal(
        cause=f"{fall.words}; the cache had room, so prompts share less since and are computed",
        evidence=fall.evidence,
        measurement="one prompt of two blocks or more, sent twice in a row: whether the second one hits",
        settings={},
        if_cause="the second one hits: the cache works, and prompts share less since that moment",
        if_rival="the second one misses: the cache lost what it had, or was cleared",
        change="what prompts begin with since that moment (a time, an id, other instructions, another client), or more "
        "devices",
        explained=fall.explained,
        gain=time_gained(view, fall.work),
    )  # fmt: skip


CAUSE = Cause(
    key="own_prefill",
    lifecycles=("compute", "token"),
    object="prompt",
    kind="capacity",
    rival="prompts in small chunks: what is slow is the number of steps",
    rival_key="token_budget",
    name="the request's own prompt",
    asks="Does its own prompt take that long?",
    measurement="one of these prompts alone",
    figures=(account("compute.prefill"),),
    booked=("compute.prefill",),
    complaints={"high_ttft": 1},
    reads={
        Records: Rule(read_records, accounts=PREFILL, needs=("excess", "work")),
        Accounts: hold_time(
            accounts=("compute.prefill",),
            words="the request's own prompt takes the time",
            change="shorter prompts, or a faster device",
            rival="other requests' prompts in the same steps",
            rival_key="",
        ),
        Means: Rule(
            read_means,
            kind="workload",
            rival="a prefix cache that was cleared",
            rival_key="cache_thrash",
            refuted_by=(RATE_THAT_STAYS, SIGNS_OF_EVICTIONS),
        ),
        Client: Rule(read_client, rival="a slow tokeniser", rival_key="slow_tokeniser"),
    },
)
