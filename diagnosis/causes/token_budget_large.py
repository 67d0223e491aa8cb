"""Steps hold so many prompt tokens that everybody who decodes in them waits."""

import pandas as pd

from sojourn.diagnosis.cause import Cause, Change, Evidence, Excess, Proposal, Rule, evidence
from sojourn.diagnosis.client_signs import signs_of
from sojourn.diagnosis.evidence import Accounts, Client, Means, Records, tightest
from sojourn.diagnosis.proposal import CONTENTION
from sojourn.diagnosis.statements import means
from sojourn.diagnosis.statements.accounts import DEFINING, hold_time
from sojourn.diagnosis.statements.blame import late_ids
from sojourn.diagnosis.statements.client_only import IN_ONE_READ, ROOM, STALLS, hint, stall_evidence
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share, residual_evidence
from sojourn.diagnosis.statements.refutations import ALIKE_PROMPTS, CACHED_PROMPTS, PREEMPTED, SHORT_PROMPTS
from sojourn.diagnosis.statements.token_budget import LARGEST_BUDGET, SMALLEST_BUDGET, tokens_within
from sojourn.diagnosis.symptom_tree.reading import Reading, account
from sojourn.metrics.request.blame import matrix, offenders
from sojourn.metrics.request.offenders import described

INTERFERENCE = "request.interference"
STALLED_TIME = 0.2  # of the time between tokens, at least: less is no great part of what a request waits
LONG_PROMPT = 4.0  # times the median prompt of the late requests: it fills steps that they would share
LONGER_STEPS = 1.25  # a mixed step that is a quarter longer than one of decodes only is a measured effect


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    steps, bound = facts.steps, tightest(facts, "tpot_ms")
    budget = facts.token_budget
    if steps.prefill_step_p95_ns is None or steps.prefill_tokens_p95 is None:
        return None
    mixed_ms, plain_ms = steps.prefill_step_p95_ns / 1e6, (steps.decode_step_p50_ns or 0) / 1e6
    if mixed_ms < LONGER_STEPS * plain_ms:
        return None
    target_ms = bound if bound is not None and bound < mixed_ms else mixed_ms / 2
    value = tokens_within(facts, target_ms)
    largest = min(budget or LARGEST_BUDGET, int(steps.prefill_tokens_p95))
    removed = max(0.0, 1 - value / largest)
    if removed <= 0:
        return None
    values = [value, *(part for part in (largest // 2, largest // 4, largest // 8) if part >= SMALLEST_BUDGET)]
    who, blamed = _long_prompts(facts, excess)
    over = bound is not None and mixed_ms > bound
    return Proposal(
        cause=f"{who} fill whole steps, and everybody in them waits" if who
        else "others' prompt chunks make the steps longer than the objective",
        evidence=[
            *excess_evidence(excess, CONTENTION),
            *blamed,
            evidence(f"a step with prompt tokens beside decodes takes {mixed_ms:,.0f} ms (p95), one with decodes only "
                     f"{plain_ms:,.0f} ms (p50)", mixed_ms, "ms", "steps: begin_ns, end_ns, kinds",
                     supports=over or bound is None, weight=2),
            *residual_evidence(facts),
        ],
        measurement="the same scenario with a smaller token budget",
        settings={"max_num_batched_tokens": value},
        if_cause=f"mixed steps fall from {mixed_ms:,.0f} to about {target_ms:,.0f} ms; long prompts take more of them",
        if_rival=f"steps stay long beside decodes alone, and {missing_share(excess)} stays",
        change=f"max_num_batched_tokens={value}" + (f" (now {budget})" if budget else "")
        + ", or send long prompts to a server of their own",
        claims={INTERFERENCE: removed},
        fixes=tuple(Change(settings={"max_num_batched_tokens": each}) for each in dict.fromkeys(values)),
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Most tokens come quickly and some very late, and prompts are most of what steps compute: steps with long prompts
    stall the tokens of the others."""
    view = facts.server
    stalls, work = view.stalls, means.prompt_work(view)
    if excess.objective != "tpot_ms" or stalls is None or work is None or work < means.PROMPT_WORK:
        return None
    if stalls.share < STALLED_TIME:
        return None
    budget = view.settings.get("token budget", "the token budget of a step")
    return Proposal(
        cause=f"steps with long prompts stall the others' tokens: half of the tokens come within "
        f"{1e3 * stalls.usual_s:,.0f} ms, and others take more than {1e3 * stalls.above_s:,.0f} ms",
        evidence=[
            evidence(f"at least {stalls.share:.0%} of the time between tokens is in gaps above "
                     f"{1e3 * stalls.above_s:,.0f} ms", stalls.share, "share", means.HISTOGRAMS, weight=DEFINING),
            evidence(f"{work:.0%} of the tokens that steps compute are of prompts", work, "share", means.COUNTERS),
        ],
        measurement=f"the same load with half of {budget}",
        settings={},
        if_cause=f"the longest gaps halve, and {missing_share(excess)} falls",
        if_rival=f"the gaps stay, and {missing_share(excess)} with them",
        change=f"a smaller token budget: {budget}",
        gain=means.time_gained(view, f"{stalls.share:.0%} of the time between tokens"),
    )  # fmt: skip


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """Text stops, and goes on at its usual pace: a long step came between."""
    signs = signs_of(facts)
    fast = signs.gap_ms is not None and signs.gap_ms <= ROOM * (tightest(facts, "tpot_ms") or 0.0)
    if excess.objective == "ttft_ms" or signs.stalled < STALLS or signs.clumped >= IN_ONE_READ or not fast:
        return None
    words = "text stops and goes on at its usual pace: long steps come between"
    return hint(excess, words, [stall_evidence(signs)], 0.4, "a smaller token budget")


def long_prompt_share(facts: Records, excess: Excess, longer_than: float) -> tuple[float, pd.DataFrame]:
    """The share of the late requests' delay by others that prompts of at least so many tokens caused, and the requests
    with such prompts, as a table of `offenders`."""
    book = facts.book()
    if book is None:
        return 0.0, pd.DataFrame()
    tokens = described(book.requests).prompt_tokens
    late = late_ids(facts, excess, book)
    caused = matrix(book, (tokens >= longer_than).map({True: "long", False: "other"})).loc[late].sum()
    total = float(caused.clip(lower=0).sum())
    table = offenders(book)
    return float(caused.get("long", 0.0)) / total if total > 0 else 0.0, table[table.prompt_tokens >= longer_than]


def _long_prompts(facts: Records, excess: Excess) -> tuple[str, list[Evidence]]:
    """Who they are if long prompts caused most of the delay by others, and that as evidence."""
    prompts = facts.rows.set_index("request_id").server_prompt_tokens.astype("float64")
    typical = float(prompts.loc[facts.rows.request_id[excess.missing]].median())
    share, offenders = long_prompt_share(facts, excess, LONG_PROMPT * typical)
    if share < 0.5 or not len(offenders):  # of all delay by prompts: who causes more than half of it is the offender
        return "", []
    classes = ", ".join(sorted(set(offenders.klass.dropna()) - {""}))
    who = f"{len(offenders)} requests{f' of {classes}' if classes else ''} with "
    who += f"{offenders.prompt_tokens.median():,.0f} prompt tokens"
    blamed = f"{share:.0%} of the delay that others cost late requests is caused by {who}; late requests have "
    source = "steps: new_tokens, kinds, request_ids; requests"
    return who, [evidence(f"{blamed}{typical:,.0f}", share, "share", source)]


def show_mixed_step(facts: Records) -> Reading | None:
    if facts.steps is None:
        return None
    if facts.steps.prefill_step_p95_ns is None:
        return Reading("no step held prompts beside decodes", True, "steps: kinds")
    ms, plain = facts.steps.prefill_step_p95_ns / 1e6, (facts.steps.decode_step_p50_ns or 0) / 1e6
    bound = tightest(facts, "tpot_ms")
    within = ms < bound if bound is not None else ms < 2 * plain
    return Reading(
        f"a step with prompts beside decodes takes {ms:,.0f} ms (p95), one with decodes only {plain:,.0f} ms",
        within,
        "steps: begin_ns, end_ns, kinds",
    )


CAUSE = Cause(
    key="token_budget_large",
    lifecycles=("request", "compute"),
    object="token budget of a step (max_num_batched_tokens)",
    kind="policy",
    rival="a slow device: steps that are long for what they hold",
    rival_key="slow_device",
    name="token budget of a step, too large",
    asks="Do long prompts of others fill the steps?",
    measurement="the same scenario with half the max_num_batched_tokens",
    figures=(account("request.interference"), show_mixed_step),
    booked=CONTENTION,
    complaints={"high_ttft": 5, "high_itl": 1, "product_latency_poor": 2},
    reads={
        Records: Rule(read_records, accounts=(INTERFERENCE,), needs=("excess", "step model")),
        Accounts: hold_time(
            accounts=("request.interference",),
            words="prompts of other requests fill the steps",
            change="a smaller max_num_batched_tokens",
            scaled=("max_num_batched_tokens", 0.5),
            object="token budget of a step",
            rival="a slow device",
            rival_key="",
        ),
        Means: Rule(
            read_means,
            object="token budget of a step",
            rival="a batch that is too large",
            rival_key="slow_decode",
            refuted_by=(SHORT_PROMPTS, CACHED_PROMPTS, PREEMPTED, ALIKE_PROMPTS),
        ),
        Client: Rule(read_client, object="token budget of a step", rival="a slow device"),
    },
)
