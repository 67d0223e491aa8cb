"""Whether a run did what was predicted: what changed between two runs, who predicted it, and how far it was off."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from sojourn.metrics.compare.settings import identity
from sojourn.metrics.errors import InputError
from sojourn.metrics.prediction import Change, Interval, Prediction, Predictor, change_text
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.replay.predictor import ReplayPredictor
from sojourn.replay.settings import SPEED
from sojourn.replay.verdict.changed import changed_settings
from sojourn.replay.verdict.differences import Difference, differences, loaded
from sojourn.replay.verdict.ledger import Checked, LedgerEntry
from sojourn.replay.verdict.measured import SHARE, measured_figures, num_measured, predicted_figures

SHOWN = (SHARE, "goodput_rps", "ttft_ms:p50", "ttft_ms:p90", "tpot_ms:p50", "tpot_ms:p90", "e2e_ms:p50", "e2e_ms:p90")
SETTINGS_ONLY = Change()


class Claim(NamedTuple):
    """A prediction that a pair of runs can test."""

    prediction: Prediction
    predicted_by: str  # as in LedgerEntry
    cause: str


class Verified(NamedTuple):
    """A prediction and its outcome, with what limits it."""

    entry: LedgerEntry
    changed: dict[str, tuple[Any, Any]]  # setting → before, after
    notes: list[str]
    differences: list[Difference]  # beside the settings


def check_comparable(run: RunDirectory, run2: RunDirectory) -> list[str]:
    """What is to be said about the pair. Raises InputError where the two did not serve the same load on the same
    model and machine: then only the settings' effect cannot be told from the rest."""
    if run.path.resolve() == run2.path.resolve():
        raise InputError(f"{run.path} is on both sides; give the run with the change as the second one")
    meta, meta2 = run.meta(), run2.meta()
    first, second = identity(meta), identity(meta2)
    different = [name for name in first if not _alike(first[name], second[name])]
    if different:
        raise InputError(
            f"{run2.name} is not {run.name} with other settings: {', '.join(different)} differ; repeat {run.name}'s "
            "scenario on the same machine, and change only engine settings"
        )
    if meta.get("seed") != meta2.get("seed"):
        raise InputError(
            f"{run.name} has seed {meta.get('seed')} and {run2.name} has {meta2.get('seed')}; other requests were sent "
            f"at other moments: repeat it with --seed {meta.get('seed')}"
        )
    notes = []  # arrivals that differ are among the `differences`
    for each, its in ((run, meta), (run2, meta2)):
        if not its.get("valid"):
            reasons = "; ".join(its.get("invalid_reasons") or ["no reason is given"])
            notes.append(f"{each.name} is not valid, and its figures may not be the server's: {reasons}")
    if meta.get("versions") != meta2.get("versions"):
        notes.append("the two runs were made by different versions, which may differ in speed")
    return notes


def claims(diagnosis: Mapping[str, Any] | None) -> list[Claim]:
    """The predictions of a `diagnosis.json`, those of the findings first; [] of an older one."""
    found = []
    for prediction_of, predicted_by, cause_of in (
        ("prediction", "diagnosis", "key"), ("rival_prediction", "rival", "rival_key"),
    ):  # fmt: skip
        for finding in (diagnosis or {}).get("findings") or []:
            stated = finding.get(prediction_of)
            if isinstance(stated, dict):
                try:
                    prediction = msgspec.convert(stated, Prediction, strict=False)
                except msgspec.ValidationError:
                    continue
                found.append(Claim(prediction, predicted_by, finding.get(cause_of) or ""))
    return found


def chosen_claim(
    changed: Mapping[str, tuple[Any, Any]], stated: Sequence[Claim], make_predictor: Callable[[], Predictor],
    device_speed: float = 1.0,
) -> tuple[Claim, list[str]]:  # fmt: skip
    """The prediction of exactly these changes: one that was stated, or else a replay of them. `device_speed` is what
    the settings do to the device, as whoever verifies says: only a replay takes it.

    The predictor is made where it is needed. Raises ReplayError where nothing predicts the changes.
    """
    after = {name: value for name, (_, value) in changed.items()}
    for claim in stated if device_speed == 1.0 else ():
        if _is_of_settings(claim.prediction.change) and dict(claim.prediction.change.settings) == after:
            return claim, []
    notes = [
        f"{claim.predicted_by} predicted {change_text(claim.prediction.change)}, which is not what differs"
        for claim in stated[:2]
    ]
    predictor = make_predictor()
    change = Change(settings=after, device_speed=device_speed)
    predictor.check(change)
    (prediction,) = predictor.predict([change])
    return Claim(prediction, "replay", ""), notes


def verified(
    run: RunDirectory, run2: RunDirectory, claim: Claim, notes: Sequence[str] = (),
    predictor: ReplayPredictor | None = None,
) -> Verified:  # fmt: skip
    """Measures both runs, and judges the prediction by attainment, or by the median end-to-end latency of runs without
    objectives; with a predictor of the first run also for the speed of the second. Raises RunDataError where a run
    measured nothing."""
    meta, meta2 = run.meta(), run2.meta()
    figures = checked_figures(claim.prediction, measured_figures(run), measured_figures(run2), num_measured(run2))
    if not figures:
        raise InputError(f"{run2.name} has no figure that was predicted; its requests failed, or nobody read them")
    different = differences(run, run2, predictor)
    entry = LedgerEntry(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        build=build_of(meta2),
        run=run.name,
        run2=run2.name,
        scenario=str(section(meta, "scenario").get("name") or ""),
        change=claim.prediction.change,
        predicted_by=claim.predicted_by,
        cause=claim.cause,
        figures=figures,
        hit=figures[0].hit,
        error=figures[0].error,
        is_trusted=claim.prediction.is_trusted,
        is_open=claim.prediction.is_open,
        at_speed=_at_speed(run2, claim, figures[0].name, predictor),
        longer=next((each.after for each in different if each.name == "speed"), None),
    )
    doubts = [f"the replay is not trusted: {doubt}" for doubt in claim.prediction.doubts]
    return Verified(entry, changed_settings(meta, meta2), [*notes, *doubts], different)


def _at_speed(run2: RunDirectory, claim: Claim, judged: str, predictor: ReplayPredictor | None) -> Checked | None:
    """The judged figure, predicted with the speed that the second run had at each moment; None where nothing tells."""
    if predictor is None:
        return None
    # What the settings do to the device is in the steps of the second run
    given = {name: value for name, value in claim.prediction.change.settings.items() if name not in SPEED}
    change = msgspec.structs.replace(claim.prediction.change, settings=given, device_speed=1.0)
    found = predictor.predict_at(change, loaded(run2))
    if found is None:
        return None
    checked = checked_figures(found, {}, measured_figures(run2), num_measured(run2))
    return next((each for each in checked if each.name == judged), None)


def checked_figures(
    prediction: Prediction, before: Mapping[str, float], after: Mapping[str, float], requests: int
) -> list[Checked]:
    """The judged figure first: attainment where it was predicted and measured, else the median end-to-end latency.

    All figures are finite: JSON has no other numbers, so that a line of the ledger could not be read again.
    """
    found, predicted = [], predicted_figures(prediction)
    names = [name for name in SHOWN if name in after and name in predicted and _is_finite(predicted[name], after[name])]
    if SHARE not in names and "e2e_ms:p50" in names:
        names.remove("e2e_ms:p50")
        names.insert(0, "e2e_ms:p50")
    for name in names:
        interval, value = predicted[name], after[name]
        # A share of n requests comes in steps of 1/n, and so does the rate of good ones.
        grain = {SHARE: 0.5 / requests, "goodput_rps": 0.5 / requests * value}.get(name, 0.0)
        scale = 1.0 if name == SHARE else max(abs(interval.median), 1e-9)
        found.append(
            Checked(
                name=name,
                before=before.get(name),
                low=interval.low,
                median=interval.median,
                high=interval.high,
                measured=value,
                hit=bool(interval.low - grain <= value <= interval.high + grain),
                error=(value - interval.median) / scale,
            )
        )
    return found


def build_of(meta: Mapping[str, Any]) -> str:
    versions = section(meta, "versions")
    return str(versions.get("sojourn") or versions.get("build") or "")


def _alike(one: Any, other: Any) -> bool:
    """Equal, but for what one of two versions did not write yet: a scenario is written with all its defaults."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_alike(one[key], other[key]) for key in one.keys() & other.keys())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return one == other


def _is_finite(interval: Interval, measured: float) -> bool:
    return all(map(math.isfinite, (*msgspec.structs.astuple(interval), measured)))


def _is_of_settings(change: Change) -> bool:
    """Nothing else is different, nor are the objectives: both runs are judged by those that they have."""
    return msgspec.structs.replace(change, settings={}) == SETTINGS_ONLY
