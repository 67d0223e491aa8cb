"""One figure of a run that speaks for or against an object of a symptom tree, and the figures that several share.

A reading is None where its evidence is missing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sojourn.diagnosis.evidence import Accounts, Client, Records, tightest
from sojourn.diagnosis.proposal import CONTENTION
from sojourn.metrics.ledger import ACCOUNT_BY_NAME

# Below a tenth, an account or a reason is not what a user feels: nine tenths of the delay would remain without it.
NEGLIGIBLE = 0.10
DIED = ("core", "died", "connection")  # words of an error of a server that stopped
# Accounts that hold the time of several objects.
PREFILL_TIME = ("compute.prefill", "request.interference")
DEVICE_TIME = ("compute.prefill", "compute.decode", "memory.recompute", *CONTENTION)
FRONT_TIME = ("token.encode", "token.decode", "request.stream", "request.admission", "client.network")
KNOWN_OUTCOMES = "what became of each prompt token in the prefix cache (requests: prefix_outcomes)"


@dataclass(frozen=True, slots=True)
class Reading:
    """A measured fact in words. `rules_out`: its size excludes the object; `share` (0 to 1) draws a bar."""

    statement: str
    rules_out: bool
    source: str  # table and columns
    share: float | None = None


Read = Callable[..., Reading | None]  # of one kind of evidence, which the type of its argument names


def figures(reads: Iterable[Read], facts: Client) -> list[Reading]:
    """Those of them that this evidence can give."""
    asked = [read for read in reads if isinstance(facts, read.__annotations__["facts"])]
    return [found for read in asked if (found := read(facts)) is not None]


def account(*names: str) -> Read:
    """The share of all requests' time that these accounts hold together, and what they take of a request."""

    def read(facts: Client) -> Reading | None:
        columns = [f"ledger_{ACCOUNT_BY_NAME[name].column}" for name in names]
        served = facts.rows[facts.rows.status == "ok"]
        booked = served[columns].astype("float64")
        if not booked.notna().any(axis=None):
            return None
        ms = float(booked.mean().sum()) / 1e6
        share = ms / max(float(served.e2e_ms.astype("float64").mean()), 1e-9)
        take = "takes" if len(names) == 1 else "take"
        return Reading(
            f"{' + '.join(names)} {take} {ms:,.1f} ms of a request, {share:.0%} of its latency",
            share < NEGLIGIBLE / 10,
            f"requests: {', '.join(columns)}",
            share,
        )

    return read


def waiting_for(reason: str, what: str) -> Read:
    def read(facts: Records) -> Reading | None:
        if not facts.joined:
            return None
        share = facts.waits.get(reason, 0.0)
        return Reading(f"{share:.0%} of the waiting was for {what}", share < NEGLIGIBLE, "requests: waits", share)

    return read


def prefix_outcome(*outcomes: str, what: str) -> Read:
    def read(facts: Accounts) -> Reading | None:
        if facts.prefix is None:
            return None
        share = sum(facts.prefix.outcomes.get(outcome, 0.0) for outcome in outcomes)
        return Reading(
            f"{share:.0%} of the prompt tokens {what}", share < NEGLIGIBLE, "requests: prefix_outcomes", share
        )

    return read


def show_decode_step(facts: Records) -> Reading | None:
    bound = tightest(facts, "tpot_ms")
    if facts.steps is None or facts.steps.decode_step_p50_ns is None or bound is None:
        return None
    ms = facts.steps.decode_step_p50_ns / 1e6
    return Reading(
        f"a step with decodes only takes {ms:,.1f} ms, and the objective allows {bound:,.0f} ms",
        ms < bound,
        "steps: begin_ns, end_ns, kinds",
        min(1.0, ms / bound),
    )


def show_batch(facts: Records) -> Reading | None:
    cap = facts.engine.get("max_num_seqs")
    if facts.steps is None or not cap:
        return None
    share = facts.steps.mean_batch / cap
    return Reading(
        f"{facts.steps.mean_batch:.1f} requests run together on average, of {cap} that may",
        False,
        "steps: request_ids; run.json: max_num_seqs",
        min(1.0, share),
    )


def show_exchanges(facts: Records) -> Reading | None:
    """One process exchanges nothing."""
    group = facts.group()
    share = 0.0 if group is None else group.communication_share
    if group is None and facts.steps is None:
        return None
    return Reading(
        f"exchanges between ranks take {share:.0%} of the steps' time" if group else "one process computes the model",
        share < NEGLIGIBLE,
        "steps: communication_ns",
        share,
    )


def in_the_front(noun: str, what: str) -> Read:
    """Text work that holds the front's event loop. Its cost stands in other accounts, too: whoever waits for the loop
    books `request.stream` or `request.admission`. Without the loop's records it can therefore not be excluded."""

    def read(facts: Client) -> Reading | None:
        booked = account(f"token.{noun}")(facts)
        if booked is None:
            return None
        if facts.machine is None or facts.machine.front is None:
            return replace(booked, rules_out=False)
        loop = facts.machine.front
        part = {"encode": loop.encoding, "decode": loop.decoding}[noun]
        return Reading(
            f"{what} takes {part:.0%} of the busy time of the front's event loop, which is busy {loop.busy:.0%} of the "
            "time",
            part * loop.busy < NEGLIGIBLE and booked.rules_out,
            "system: front turns; requests: encoding_ns, decoding_ns",
            min(1.0, part * loop.busy),
        )

    return read


def show_crashes(facts: Client) -> Reading | None:
    if not facts.sent:
        return None
    count = sum(n for error, n in facts.errors.items() if any(word in error.lower() for word in DIED))
    return Reading(
        f"{count} of {facts.sent} requests ended with the server",
        count == 0,
        "client: status, error",
        count / facts.sent,
    )


EVICTED = prefix_outcome("miss_evicted", what="were in the cache once and had been evicted")
