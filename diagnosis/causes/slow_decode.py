"""A step of the normal length is longer than the objective even for a single request: the model is too large."""

from typing import Any, NamedTuple

from sojourn.diagnosis.capacity import batch_within_tpot
from sojourn.diagnosis.cause import Accounts, Cause, Change, Client, Evidence, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.client_signs import signs_of
from sojourn.diagnosis.evidence import tightest
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.statements.accounts import propose
from sojourn.diagnosis.statements.client_only import CHUNKS, STALLS, hint
from sojourn.diagnosis.statements.device import HEADROOM
from sojourn.diagnosis.statements.excess import excess_evidence, residual_evidence
from sojourn.diagnosis.statements.formats import MEASURED, PRECISION, faster_formats, own_format
from sojourn.diagnosis.symptom_tree.reading import show_decode_step

DECODE = ("compute.decode",)
NEARLY_ALL = 0.75  # of what a token may take: a mean step leaves no room for the prompts of others


class Smaller(NamedTuple):
    """What fewer bits would give, as parts of a verdict; all empty where nobody measured it."""

    evidence: list[Evidence]
    words: str
    fixes: tuple[Change, ...]


def read_records(facts: Records, excess: Excess) -> Proposal | None:
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


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """Decode steps take the time."""
    return propose(excess, "decode steps take longer than the objective allows",
                   excess_evidence(excess, ("compute.decode",)), "a smaller batch, or a faster device")  # fmt: skip


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """Tokens come evenly, and each one late."""
    signs = signs_of(facts)
    if excess.objective != "tpot_ms" or signs.gap_ms is None or signs.stalled >= STALLS:
        return None
    even = evidence(f"{1 - signs.stalled:.0%} of the time between tokens lies in ordinary gaps: each token is late",
                    1 - signs.stalled, "share", CHUNKS)  # fmt: skip
    return hint(excess, "tokens come evenly, and each one late", [even], 0.5, "a smaller batch, or a faster device")


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


def smaller_weights(facts: Records) -> Smaller:
    """The fastest format with fewer bits than the run's, by what its steps take at normal speed."""
    own, found = own_format(facts, "weights"), faster_formats(facts, "weights")
    fewer = [each for each in found if PRECISION.get(each.settings["weights"], 99) < PRECISION.get(own, 0)]
    if not fewer:
        return Smaller([], "lower precision, ", ())
    best, name = fewer[0], fewer[0].settings["weights"]
    told = evidence(f"with weights={name} in place of {own} the same steps take {1 / best.speedup:.0%} of the time",
                    best.speedup, "ratio", MEASURED, weight=0)  # fmt: skip
    words = f"weights={name}, which changes outputs a little (weights_reference measures it), "
    return Smaller([told], words, (Change(settings={"weights": name}, device_speed=best.speedup),))


CAUSE = Cause(
    key="slow_decode",
    lifecycles=("compute",),
    object="decode step",
    kind="capacity",
    rival="a fault of the device",
    rival_key="slow_device",
    asks="Is a normal step longer than the objective?",
    measurement="one request alone",
    figures=(show_decode_step,),
    booked=("compute.decode",),
    complaints={"high_itl": 1},
    reads={
        Records: Rule(read_records, accounts=DECODE, needs=("excess", "step model", "work")),
        Accounts: Rule(read_accounts, accounts=("compute.decode",)),
        Client: Rule(read_client, rival="a slow device"),
    },
)
