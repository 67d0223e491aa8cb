"""Answers are so long that they cannot end in time, though each token comes as fast as those of the others."""

from sojourn.diagnosis.cause import Cause, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import tightest
from sojourn.diagnosis.excess import accounts_of
from sojourn.diagnosis.statements.client_only import hint
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share, residual_evidence
from sojourn.diagnosis.symptom_tree.reading import Reading

NEARLY_ALL = 0.9  # of the objective: what is left is not enough for any first token
LONGER_ANSWERS = 1.5  # times the answers of those in time: below it the speed of a token decides
LONGER = 1.5  # times the output of the requests in time


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    if excess.objective != "e2e_ms":
        return None
    rows = facts.rows[(facts.rows.klass == excess.klass) & (facts.rows.status == "ok")]
    late, good = rows.loc[excess.missing], rows.drop(excess.missing)
    longer, usual = (float(part.output_tokens.astype("float64").mean()) for part in (late, good))
    slower, speed = (float(part.tpot_ms.astype("float64").median()) for part in (late, good))
    if not len(good) or not usual or longer < LONGER_ANSWERS * usual:
        return None
    # What the tokens beyond the usual number take at the usual speed, by account
    each = accounts_of(good, "tpot_ms").mean().fillna(0)
    claims = {
        name: min(1.0, float(each[name]) * (longer - usual) / excess.accounts[name])
        for name in each.index if each[name] > 0 and excess.accounts.get(name, 0.0) > 0
    }  # fmt: skip
    fits = (excess.bound_ms - float(late.ttft_ms.mean())) / max(speed, 1e-9)
    # Answers of all lengths are late where tokens are slow; where only their number is too large, none fits even fast
    fastest = float(rows.tpot_ms.astype("float64").quantile(0.1)) / slowness_of_steps(facts)
    needed_ms = fastest * longer
    return Proposal(
        cause=f"late requests ask for {longer:,.0f} tokens of output, those in time for {usual:,.0f}; at "
        f"{speed:.1f} ms a token {max(0.0, fits):,.0f} would fit the {excess.bound_ms:,.0f} ms",
        evidence=[
            *excess_evidence(excess, tuple(claims)),
            evidence(f"late answers have {longer / usual:.1f} times as many tokens as those in time", longer / usual,
                     "ratio", "requests: output_tokens", weight=2),
            evidence(f"a token of a late answer takes {slower:.1f} ms, one of the others {speed:.1f} ms",
                     slower / max(speed, 1e-9), "ratio", "client: chunk_ns", supports=slower < 1.25 * speed),
            evidence(f"even at {fastest:.1f} ms, the fastest tenth at normal speed, that number of tokens takes "
                     f"{needed_ms:,.0f} ms of the {excess.bound_ms:,.0f} ms", needed_ms / excess.bound_ms, "ratio",
                     "client: chunk_ns; run.json: speed_reference",
                     supports=needed_ms >= NEARLY_ALL * excess.bound_ms, weight=3),
            *residual_evidence(facts),
        ],
        measurement=f"the same scenario with at most {max(1.0, fits):,.0f} tokens of output",
        if_cause=f"{missing_share(excess)} falls to none, at the same time per token",
        if_rival=f"{missing_share(excess)} stays, since each token is slow",
        change=f"a limit of {max(1.0, fits):,.0f} output tokens, or an objective that grows with the answer",
        claims=claims,
    )  # fmt: skip


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """Late answers are longer, and their tokens come as fast."""
    if excess.objective != "e2e_ms":
        return None
    rows = facts.rows[(facts.rows.klass == excess.klass) & (facts.rows.status == "ok")]
    late, good = rows.loc[rows.index.isin(excess.missing)], rows[~rows.index.isin(excess.missing)]
    tokens = late.output_tokens.astype("float64").median() / good.output_tokens.astype("float64").median()
    speed = late.tpot_ms.astype("float64").median() / good.tpot_ms.astype("float64").median()
    if not (tokens >= LONGER and speed < LONGER):
        return None
    longer = evidence(f"late answers have {tokens:.1f} times as many tokens, and each takes {speed:.1f} times as long",
                      tokens, "ratio", "client: output_tokens, chunk_ns", weight=2)  # fmt: skip
    return hint(
        excess, "late answers are longer, and their tokens come as fast", [longer], 0.7, "a bound of the output"
    )


def slowness_of_steps(facts: Records) -> float:
    """What steps take of what they take at normal speed, device, draws and host together; 1 where nobody knows it."""
    speed = facts.speed()
    if speed is None or speed.source != "reference":
        return 1.0
    parts = [each for each in (speed.device, speed.sampling, *speed.host.values()) if each is not None]
    return max(1.0, sum(each.took_ms for each in parts) / max(sum(each.normal_ms for each in parts), 1e-9))


def show_output_lengths(facts: Client) -> Reading | None:
    if tightest(facts, "e2e_ms") is None:
        return Reading("no objective bounds the end-to-end latency, so no answer is too long", True, "run.json")
    tokens = facts.rows.output_tokens.astype("float64").dropna()
    if not len(tokens):
        return None
    return Reading(
        f"an answer has {tokens.median():,.0f} tokens (median), a tenth has {tokens.quantile(0.9):,.0f} or more",
        False,
        "client: output_tokens",
    )


CAUSE = Cause(
    key="long_outputs",
    lifecycles=("token", "request"),
    object="length of the answers",
    kind="workload",
    rival="a decode step that is too slow",
    rival_key="slow_decode",
    asks="Are the answers longer than the objective allows?",
    measurement="the same scenario with a smaller max_tokens",
    figures=(show_output_lengths,),
    complaints={"high_itl": 3, "vram_fills_quickly": 1, "product_latency_poor": 1},
    reads={
        Records: Rule(read_records, needs=("excess", "work")),
        Client: Rule(read_client, lifecycles=("request", "token"), object="output length", rival="slow tokens"),
    },
)
