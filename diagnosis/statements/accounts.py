"""What accounts of time show where no step was recorded: of late requests, or as means of /metrics.

Without steps nobody knows what the device could serve. So these rules rest on three things: the account that holds the
time, the reason for which requests waited, and what became of the prompt tokens.
"""

from collections.abc import Callable
from typing import Any

from sojourn.diagnosis.cause import Rule
from sojourn.diagnosis.evidence import Accounts, Client, Means, tightest
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.proposal import CONTENTION, Proposal, all_of
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.interop.sources.translate import key
from sojourn.metrics.prediction import Change

PROMPT_ACCOUNTS = ("compute.prefill", *CONTENTION)
LOST_SHARE = 0.2  # of the prompt tokens: what a prefix policy costs has to be a good part of the work
DEFINING = 2.0  # weight of the measurement that defines a cause
ROOM = 0.5  # of the tightest time per output token: below it a batch twice as large would keep the objective
STALLED_LOOP_S = 0.05  # mean lateness of the front's timer: many times the millisecond of an idle loop
GAINS, SATURATED = 1.5, 1.2  # tokens/s of twice the batch: 2 on an empty device, 1 on a full one
READS_ONLY = 4.0  # FLOPs a byte: every device computes more than that while it reads one
TPOT_SOURCE, GAIN_SOURCE = "client: chunk_ns; scrapes: tpot_seconds", "scrapes: running, tokens, steps"
INTENSITY_SOURCE = "scrapes: phase_flops, phase_moved_bytes"
ROOM_SOURCES = (TPOT_SOURCE, GAIN_SOURCE, INTENSITY_SOURCE)  # of evidence whether a larger batch would help
TPOT = "sojourn_request_tpot_seconds"
PHASE_FLOPS, PHASE_BYTES = "sojourn_compute_phase_flops_total", "sojourn_compute_phase_moved_bytes_total"
PREDICTION, LOOP_LAG = "sojourn_compute_prediction_ratio", "sojourn_request_loop_lag_seconds"


def propose(
    excess: Excess, words: str, found: list[Evidence], change: str,
    claims: dict[str, float] | None = None, settings: dict[str, object] | None = None,
) -> Proposal:  # fmt: skip
    return Proposal(
        cause=words,
        evidence=found,
        measurement="",
        needs_records=True,
        if_cause=f"with {change} {missing_share(excess)} falls",
        if_rival=f"with {change} {missing_share(excess)} stays",
        change=change,
        claims=claims,
        fixes=(Change(settings=settings),) if settings else (),
    )


def scale_setting(facts: Client, name: str, factor: float) -> dict[str, object]:
    """A setting times a factor; {} where its value is not known. Without steps nobody knows how much is enough."""
    value = facts.engine.get(name)
    return {name: max(1, round(value * factor))} if isinstance(value, int) else {}


def waited_for(facts: Accounts, reason: str) -> list[Evidence]:
    share = facts.waits.get(reason, 0.0)
    if not facts.waits:
        return []
    return [evidence(f"{share:.0%} of the waiting has the reason {reason}", share, "share", "requests: waits",
                     supports=share >= 0.5, weight=DEFINING)]  # fmt: skip


def room_evidence(facts: Means | Accounts, *, wanted: bool) -> list[Evidence]:
    """Whether a larger batch would keep the time per output token: the tokens come in half of the time, or sooner; a
    larger batch gave more tokens before; or a step reads far more than it computes."""
    found = batch_gain_evidence(facts, wanted=wanted)
    bound = tightest(facts, "tpot_ms")
    per_token = facts.rows.tpot_ms.astype("float64").median()
    if not per_token > 0:
        per_token = 1e3 * (mean_of(facts, TPOT) or 0.0)
    if bound is not None and per_token > 0:
        used = per_token / bound
        found.append(evidence(f"the time per output token is {used:.0%} of its objective", used, "share",
                              TPOT_SOURCE, supports=(used <= ROOM) == wanted))  # fmt: skip
    intensity = _decode_intensity(facts)
    if intensity is not None and intensity <= READS_ONLY:
        found.append(evidence(f"a decode step computes {intensity:.1f} FLOPs for each byte that it reads, so that a "
                              "larger batch costs it little", intensity, "FLOP/byte",
                              INTENSITY_SOURCE, supports=wanted))  # fmt: skip
    return found


def batch_gain_evidence(facts: Means | Accounts, *, wanted: bool) -> list[Evidence]:
    """What more requests in a batch gave until now."""
    gain = facts.batch_gain
    if gain is None or SATURATED < gain < GAINS:
        return []
    return [evidence(f"twice the requests in a batch give {gain:.1f} times the tokens", gain, "ratio",
                     GAIN_SOURCE, supports=(gain >= GAINS) == wanted, weight=DEFINING)]  # fmt: skip


def gains(facts: Means | Accounts) -> bool:
    """Whether twice the requests in a batch gave clearly more tokens."""
    return facts.batch_gain is not None and facts.batch_gain >= GAINS


def is_saturated(facts: Means | Accounts) -> bool:
    """Whether twice the requests in a batch gave hardly more tokens: the device is full."""
    return facts.batch_gain is not None and facts.batch_gain <= SATURATED


def _decode_intensity(facts: Means | Accounts) -> float | None:
    totals = facts.server.totals if facts.server is not None else {}
    flops, moved = (totals.get(key(name, (("composition", "decode"),)), 0.0) for name in (PHASE_FLOPS, PHASE_BYTES))
    return flops / moved if moved > 0 else None


def mean_of(facts: Means | Accounts, family: str) -> float | None:
    seen = facts.server.latencies.get(family) if facts.server is not None else None
    return seen.mean if seen is not None else None


def hold_time(
    accounts: tuple[str, ...], words: str, change: str, *, scaled: tuple[str, float] | None = None,
    of_the_loop: bool = False, **named: Any,
) -> Rule:  # fmt: skip
    """The rule of a cause that an account of its own names without more ado. `scaled`: the setting that mends it, and
    its factor. `of_the_loop`: where the front's loop was watched its own work tells the cause, the account alone does
    not."""

    def explain(facts: Accounts, excess: Excess) -> Proposal | None:
        if of_the_loop and facts.machine is not None and facts.machine.front is not None:
            return None
        settings = scale_setting(facts, *scaled) if scaled else None
        return propose(excess, words, excess_evidence(excess, accounts), change, None, settings)

    return Rule(explain, accounts=accounts, **named)


def lose_prompts(
    outcome: str, words: str, change: str, settings: Callable[[Accounts], dict[str, object]] | None = None, **named: Any
) -> Rule:
    """The rule of a cause that shows in what a share of the prompt tokens became."""

    def explain(facts: Accounts, excess: Excess) -> Proposal | None:
        lost = facts.prefix.outcomes.get(outcome, 0.0) if facts.prefix is not None else 0.0
        if lost < LOST_SHARE:
            return None
        again = f"{lost:.0%} of the prompt tokens are computed again"
        found = [
            *excess_evidence(excess, PROMPT_ACCOUNTS),
            evidence(f"{again}: {words}", lost, "share", f"prefix outcomes: {outcome}", weight=DEFINING),
        ]
        return propose(excess, f"{words}: {again}", found, change, all_of(PROMPT_ACCOUNTS, lost),
                       settings(facts) if settings else None)  # fmt: skip

    return Rule(explain, accounts=PROMPT_ACCOUNTS, **named)
