"""`diagnose`: one run, or two, to the answer of the main job. Reads records, writes nothing."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from sojourn.diagnosis.adjudicate import Judgement, adjudicate
from sojourn.diagnosis.compare import devices, product_latency
from sojourn.diagnosis.evidence import Client, Records, is_joined, read_evidence, view_of
from sojourn.diagnosis.evidence_level import Level, view_at_level
from sojourn.diagnosis.excess import Excess, excesses, losses
from sojourn.diagnosis.findings import finding_of_symptom, findings
from sojourn.diagnosis.foreign_server import shares_seen
from sojourn.diagnosis.limits import unmeasured_speed, warnings
from sojourn.diagnosis.repeat import with_records
from sojourn.diagnosis.server_means import mean_excess, with_means
from sojourn.diagnosis.shares import by_lifecycle, closure
from sojourn.diagnosis.state import state_of
from sojourn.diagnosis.statements.sensors import device_lines, unsaid
from sojourn.diagnosis.suspects import suspects_of
from sojourn.diagnosis.symptoms import SYMPTOMS, check, significant
from sojourn.diagnosis.validity import Lateness, lateness, mark
from sojourn.diagnosis.verdict import Diagnosis, Finding, State, SymptomCheck
from sojourn.metrics.ledger import LIFECYCLES
from sojourn.metrics.prediction import Predictor
from sojourn.metrics.request.goodput import class_goodput
from sojourn.metrics.results.energy import run_energy
from sojourn.metrics.results.load import declared_window_s
from sojourn.metrics.results.summary import results
from sojourn.metrics.run.directory import RunDirectory, kept_share
from sojourn.metrics.run.join import clock_of
from sojourn.metrics.time_limit import TimeLimit

LATENCIES = ("high_ttft", "high_itl")  # the symptoms that late requests have


def diagnose(
    run: RunDirectory,
    against: RunDirectory | None = None,
    *,
    predictor: Predictor | None = None,
    level: Level = "all",
    limit: TimeLimit | None = None,
) -> Diagnosis:
    """The diagnosis of a run; `against` adds the two symptoms that take a comparison.

    With a predictor of this run, the fixes of all proposed causes are replayed, and what they regain decides between
    them; without one the gains are estimates. `level` says how much of the run is read. Replays that do not fit into
    the limit are left out, and the diagnosis says so. Raises RunDataError.
    """
    facts = with_means(read_evidence(run, level))
    other = read_evidence(against, level) if against is not None else None
    checks = {symptom.key: check(facts, symptom) for symptom in SYMPTOMS}
    late_ones = [mean_excess(facts, each) for each in excesses(facts)]
    lost = [each for each in (*late_ones, *losses(facts)) if significant(facts, each)]
    judgement = adjudicate(facts, lost, suspects_of(facts, lost), predictor, limit)
    found = _with_symptoms(facts, findings(facts, judgement), lost, checks)
    if other is not None:
        for result, compared in (product_latency(facts, other), devices(facts, other)):
            checks[result.symptom] = result
            found += [compared] if compared else []
    late = lateness(facts, lost)
    found = [mark(each, late) for each in found]
    measured_energy = run_energy(view_at_level(run, level), facts.rows)
    measured = results(facts.rows, facts.meta, measured_energy)
    state, headline = state_of(facts, found, measured.steady, late)
    account_shares, clocks, closed = shares_seen(facts), clock_of(facts.meta), closure(facts.rows)
    return Diagnosis(
        run=facts.name,
        against=other.name if other else None,
        state=state,
        headline=headline,
        goodput=class_goodput(facts.rows, facts.objectives, declared_window_s(facts.meta), kept_share(facts.meta)),
        ledger_share=account_shares,
        ttft_share=shares_seen(facts, "ttft"),
        lifecycle_share=by_lifecycle(account_shares),
        bottleneck=_bottleneck(lost, state, found),
        findings=found,
        checks=[checks[symptom.key] for symptom in SYMPTOMS],
        closure=closed,
        warnings=[
            *warnings(facts, closed),
            *unsaid(facts.sensors, found),
            *_of_stalls(facts, found),
            *_of_replay(judgement, late),
        ],
        results=measured,
        energy=measured_energy,
        server=view_of(facts),
        clock_uncertainty_ms=None if clocks is None or clocks.offset is None else clocks.uncertainty_ns / 1e6,
        level=level,
        predicted=judgement.unchanged,
        predicted_with_all=judgement.with_all,
        replay_refused=judgement.refused,
        unsafe=late.unsafe,
        devices=device_lines(facts.sensors),
        unrecorded="" if is_joined(facts) else "\n$ ".join(filter(None, with_records(facts))),
        left_out=[*judgement.left_out, *unmeasured_speed(facts)],
    )


def _with_symptoms(
    facts: Client, found: list[Finding], lost: Sequence[Excess], checks: dict[str, SymptomCheck]
) -> list[Finding]:
    """With the causes of symptoms that cost no request; a cause that is named already gets their title, too."""
    shown = [symptom for symptom in SYMPTOMS if checks[symptom.key].status == "present"]
    for symptom in shown:
        if (lost and symptom.key in LATENCIES) or (new := finding_of_symptom(facts, symptom)) is None:
            continue
        place = next((at for at, each in enumerate(found) if each.key == new.key), None)
        if place is None:
            found.append(new)
        elif symptom.title not in found[place].title:
            found[place] = msgspec.structs.replace(found[place], title=f"{found[place].title} · {symptom.title}")
    return found


def _of_stalls(facts: Client, found: Sequence[Finding]) -> list[str]:
    """That the engine stood still, where it is no finding: it made few requests late, or others made more so."""
    stalls = facts.stalls() if isinstance(facts, Records) else None
    if stalls is None or any(each.key == "engine_stall" for each in found):
        return []
    return [f"the engine stood still for {stalls.total_ns / 1e9:,.1f} s: {stalls.sentence}"]


def _of_replay(judgement: Judgement, late: Lateness) -> list[str]:
    """Why gains are estimates, where they are, and what the replays are doubted for."""
    if not judgement.causes:
        return list(late.unsafe)
    if judgement.refused:
        return [*late.unsafe, f"gains are estimates: {judgement.refused}"]
    doubts = judgement.unchanged.doubts if judgement.unchanged is not None else []
    return [*late.unsafe, *(f"replays: {doubt}" for doubt in doubts)]


def _bottleneck(lost: Sequence[Excess], state: State, found: Sequence[Finding]) -> str | None:
    """The first lifecycle of the first finding, None if that is the client; without one, of the largest excess."""
    if state == "healthy":
        return None
    if found:
        first = found[0].lifecycles[0]
        return first if first in LIFECYCLES else None
    saved: dict[str, float] = defaultdict(float)
    for excess in lost:
        for name, _ in excess.ranked():
            saved[name.split(".")[0]] += excess.accounts[name] * excess.missed
    top = max(LIFECYCLES, key=lambda lifecycle: saved[lifecycle])
    return top if saved[top] > 0 else None
