"""What a diagnosis says, as data: the terminal, the HTML report, the app and `diagnosis.json` all show this."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from sojourn.interop.sources.view import ServerView
from sojourn.metrics.prediction import Change, Prediction, attainment_text
from sojourn.metrics.request.goodput import ClassGoodput
from sojourn.metrics.results.energy import EnergyUse
from sojourn.metrics.results.summary import Results

Kind = Literal["capacity", "policy", "workload", "client", "fault"]
Status = Literal["present", "absent", "unknown"]
# "stuck" is of a watch only: an engine has requests and does not move.
State = Literal["healthy", "degraded", "overloaded", "stuck", "inconclusive", "invalid"]

NEEDS_SECOND_RUN = "needs a second run to compare with: `sojourn diagnose RUN --against RUN2`"
SEPARATOR = " · "  # between the symptoms in the title of one cause
LOST_TITLE = "Lost requests"
SERVED_PREFIX = "served:"  # how the objective of a finding about lost requests begins
NEEDS_SERVER_RECORDS = "the cause cannot be known without the server's records"
RECORD_THE_SERVER = (
    "replay with `sojourn run`, or `sojourn load … --server-run DIR` beside a `sojourn serve … --run-dir DIR`"
)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One measured fact, its size, and whether it speaks for the cause or against it."""

    statement: str  # "71% of the time to first token above the objective is request.queue"
    value: float
    unit: str
    supports: bool
    source: str  # table and columns that it was computed from
    # How much it moves a judge who knows nothing else: 0 context, 1 a hint, 2 the defining measurement of the cause or
    # of its rival, 4 a contradiction
    weight: float = 1.0


def evidence(
    statement: str, value: float, unit: str, source: str, *, supports: bool = True, weight: float = 1.0
) -> Evidence:
    return Evidence(
        statement=statement, value=float(value), unit=unit, supports=bool(supports), source=source, weight=weight
    )


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest measurement that separates the named cause from its nearest rival."""

    measurement: str
    command: str  # a line that can be typed, or "" where none exists yet
    rival: str  # the cause that looks alike
    if_cause: str  # predicted outcome if the named cause is right, with a number
    if_rival: str  # predicted outcome if the rival is


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """What to change, what it should gain and what that prediction rests on."""

    change: str
    gain: str
    basis: str
    regains: bool = True  # False: alone it brings no request within its objectives, so it is no fix


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A symptom with the cause that explains most of it."""

    symptom: str  # key of symptoms.SYMPTOMS
    title: str  # "High time to first token"
    objective: str  # "ttft ≤ 500 ms for chat", or "" where none applies
    cohort: str  # who is hit: "klass chat, prompts over 1,000 tokens"
    goodput_lost: float | None  # share of the sent requests that miss an objective through this symptom: 0 to 1
    lifecycles: list[str]  # most responsible first; members of ledger.LIFECYCLES or "client"
    object: str  # the thing in the lifecycle: "KV block pool", "token budget", "front process"
    cause: str
    kind: Kind
    evidence: list[Evidence]
    probe: Probe
    fix: Fix
    key: str = ""  # of the cause: the name of its rule
    role: Literal["cause", "alternative"] = "cause"  # alternative: its fix adds nothing to those of the causes
    follows: list[str] = []  # keys of the causes that it is a consequence of
    confidence: float = 0.0  # 0 to 1: the share of such verdicts that are right, as calibrated on planted faults
    confidence_features: dict[str, float] = {}  # what the confidence consists of (diagnosis.confidence)
    explains_ms: float = 0.0  # of one late request's excess over its objective; never more than its accounts hold
    explains_share: float = 0.0  # of that excess, 0 to 1
    change: Change | None = None  # its fix as a replay; None where no replay can show it
    prediction: Prediction | None = None  # of that fix
    goodput_gain: float | None = None  # attainment that the fix regains, 0 to 1: by replay, else an estimate
    gain_is_estimate: bool = True  # not of a replay
    rival_key: str = ""
    rival_prediction: Prediction | None = None  # of the rival's fix
    unsafe: str = ""  # why the lateness of the client could change this verdict
    request_ids: list[str] = []  # up to 50 that show it worst
    steps: tuple[int, int] | None = None  # first and last step of its worst stretch


class SymptomCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One of the six symptoms and whether this run shows it, with the reason in numbers."""

    symptom: str
    title: str
    status: Status
    reason: str
    lifecycles: list[str]


class Closure(msgspec.Struct, frozen=True, kw_only=True):
    """How well the accounts sum to the client's latency over the joined requests."""

    joined: int
    closed: int  # within 1% and 1 ms
    worst_share: float | None
    worst_ns: float | None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the main job for one run."""

    schema: str = "sojourn.diagnosis/1"
    run: str  # its name
    against: str | None  # the second run
    state: State
    headline: str  # one sentence: state, the first cause, its size
    goodput: list[ClassGoodput]  # "all" first, then each class
    ledger_share: dict[str, float]  # account name → share of all requests' time, sums to 1 with "unaccounted"
    ttft_share: dict[str, float]  # account name → share of all requests' time up to the first text
    lifecycle_share: dict[str, float]  # the four lifecycles and "client", of all requests' time
    bottleneck: str | None  # the first lifecycle of the first finding; without one, that of the largest excess
    findings: list[Finding]  # causes, most important first, then the alternatives
    checks: list[SymptomCheck]  # all six, in the order of symptoms.SYMPTOMS
    closure: Closure
    warnings: list[str]  # what limits this diagnosis: few requests, client lag, missing tables
    results: Results | None = None  # what the client measured: None in a diagnosis of an older version
    energy: EnergyUse | None = None  # of the measured window; None where the machine has no power sensor
    server: ServerView | None = None  # what its own metrics show of a server that recorded nothing for us
    clock_uncertainty_ms: float | None = None  # of client.network, where the clocks of two hosts were joined
    level: str = "all"  # what it was allowed to read: one of evidence_level.LEVELS
    predicted: Prediction | None = None  # the run replayed unchanged: how far a replay can be trusted
    predicted_with_all: Prediction | None = None  # with the fixes of all causes together
    replay_refused: str = ""  # why no replay was made
    unsafe: list[str] = []  # verdicts that the lateness of the client could change
    left_out: list[str] = []  # what there was no time for, and how to get it
    unrecorded: str = ""  # how to get the server's records, where this run has none; else ""
    devices: list[str] = []  # by sensors: what each did while requests were in flight, a sentence each
    made_by: str = ""  # the version of Sojourn, where it lies with the run


def label_fix(fix: Fix) -> str:
    """What a change is called: a fix that regains nothing is none."""
    return "fix" if fix.regains else "change"


def support_of(found: Iterable[Evidence]) -> float:
    """More evidence for a cause never lowers it, more against it never raises it."""
    weights = {True: 1.0, False: 1.0}  # one of each to begin with: nobody knows anything
    for fact in found:
        weights[fact.supports] += fact.weight
    return weights[True] / (weights[True] + weights[False])


def tell_confidence(found: Finding) -> str:
    """The confidence, and what it explains: "confidence 82%; explains 120 ms (71%) of a late request's excess"."""
    return "; explains ".join(filter(None, (f"confidence {found.confidence:.0%}", explain_finding(found))))


def tell_missed(found: Finding) -> str:
    """How many requests a finding costs: "76% of requests miss this SLO"; "" where it costs none."""
    if not found.goodput_lost:
        return ""
    if found.objective.startswith(SERVED_PREFIX):
        return f"{found.goodput_lost:.0%} of requests are lost{' or late' if SEPARATOR in found.title else ''}"
    return f"{found.goodput_lost:.0%} of requests miss {'this' if found.objective else 'an'} SLO"


def explain_finding(found: Finding) -> str:
    """What a finding explains, where that was measured, else "". Without accounts of time only failures count."""
    if found.explains_ms:
        shown = f"{found.explains_ms:,.0f}" if found.explains_ms >= 10 else f"{found.explains_ms:,.2f}"
        return f"{shown} ms ({found.explains_share:.0%}) of a late request's excess"
    is_loss = found.objective.startswith(SERVED_PREFIX)
    return f"{found.explains_share:.0%} of the failures" if is_loss and found.explains_share else ""


def rivals_fix(found: Finding) -> str:
    """What the rival's fix would give, where it was replayed; else ""."""
    rival = found.rival_prediction
    return f"the rival's fix replayed: attainment {attainment_text(rival)}" if rival is not None else ""


def without_finding(diagnosis: Diagnosis) -> str:
    """What to say where the findings would stand; "" where there are some."""
    if diagnosis.findings:
        return ""
    if diagnosis.state == "invalid":
        return "The run is not valid, and nothing in it points to a cause."
    shows = any(check.status == "present" for check in diagnosis.checks)
    served, seen = bool(diagnosis.ledger_share), bool(diagnosis.closure.joined)
    if served and not seen and (shows or diagnosis.state in ("degraded", "overloaded")):
        if diagnosis.server is not None:
            title = diagnosis.server.title
            return f"{title}'s metrics name no cause: they are means over all requests, late or not."
        return f"{NEEDS_SERVER_RECORDS[0].upper()}{NEEDS_SERVER_RECORDS[1:]}: {RECORD_THE_SERVER}."
    if shows:
        return "No known cause explains what this run shows: look at its slowest requests first."
    return "No symptom of this run has a cause to name."
