"""Predicted loads on the axes of a curve: the trials of `sojourn size`, and the replays of `sojourn plan`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sojourn.loadgen.search.bisection import REQUESTS_PER_S
from sojourn.loadgen.search.curve import (
    LESSER_QUANTILE,
    NOT_JUDGED,
    REPLAYED,
    SIMULATED,
    USUAL_QUANTILE,
    Curve,
    Goodput,
)
from sojourn.metrics.prediction import settings_text
from sojourn.metrics.request.objectives import EVERY_CLASS
from sojourn.metrics.results.tradeoff import CurvePoint, crossing
from sojourn.replay.device.estimate import Deployment
from sojourn.replay.sizing.answer import Sized
from sojourn.replay.sizing.limit import Trial
from sojourn.replay.verdict.plan import Planned
from sojourn.replay.verdict.plan import Point as Replay

SLOTS = "slots"  # of a closed loop
BACKLOG = "a backlog grows, so its tokens per second are not those of the load"
TOO_SHORT = "the load has too few requests for a steady state"
NO_TPOT = "no answer has a time per output token"
NOTHING_KEPT = "no load that was tried keeps the objectives"
Objectives = Sequence[Mapping[str, Any]]


def sized_curves(answers: Sequence[Sized], objectives: Objectives, share: float) -> list[Curve]:
    """A curve for each deployment that is not refused, a point for each load that was simulated and kept up with."""
    titles = _titles([answer.deployment for answer in answers])
    return [
        _sized_curve(answer, title, objectives, share)
        for answer, title in zip(answers, titles, strict=True) if not answer.refused
    ]  # fmt: skip


def planned_curves(
    found: Planned, objectives: Objectives, share: float, recorded_rps: float, devices: Mapping[str, int | None],
    usd_per_hour: Mapping[str, float | None],
) -> list[Curve]:  # fmt: skip
    """A curve for the recorded settings, one for the best, and one for each purchase with the best. `devices` and
    `usd_per_hour` are by the name of the purchase, and by "" for the machine as it is."""
    best = settings_text(found.settings)
    groups = [("recorded settings", "", found.recorded, found.recorded_limit)]
    if best:
        groups.append((f"best settings: {best}", "", found.best, found.best_limit))
    groups += [(name, name, found.tried.get(name, []), limit) for name, limit in found.purchases.items()]
    return [
        _planned_curve(
            label, replays, limit, objectives, share, recorded_rps, devices.get(key), usd_per_hour.get(key)
        )
        for label, key, replays, limit in groups
    ]  # fmt: skip


def _sized_curve(answer: Sized, title: str, objectives: Objectives, share: float) -> Curve:
    trials = [*(answer.limit.trials if answer.limit is not None else []), *([answer.own] if answer.own else [])]
    by_load = {_load_of(trial): trial for trial in trials}
    points, left_out = [], []
    for (load, unit), trial in sorted(by_load.items()):
        tpot_ms = trial.tpot_ms[USUAL_QUANTILE]
        why = TOO_SHORT if trial.is_too_short else BACKLOG if not trial.keeps_up else NO_TPOT if not tpot_ms > 0 else ""
        if why:
            left_out.append(f"{load:.3g} {unit}: {why}")
            continue
        error = answer.error
        points.append(CurvePoint(
            rate_rps=load, unit=unit, tpot_ms=tpot_ms, median_tpot_ms=trial.tpot_ms[LESSER_QUANTILE],
            tokens_per_s=trial.output_tokens_per_s, attainment=trial.attainment,
            tpot_range_ms=None if error is None else (tpot_ms * error.low, tpot_ms * error.high),
        ))  # fmt: skip
    best, missed = answer.best, answer.limit.missed if answer.limit is not None else None
    goodput = msgspec.structs.replace(NOT_JUDGED, sentence=NOTHING_KEPT)
    if best is not None:
        load, unit = _load_of(best)
        goodput = Goodput(
            rate_rps=load, low_rps=answer.low, high_rps=answer.high, at_edge=missed is None,
            tokens_per_s=best.output_tokens_per_s, tpot_ms=best.tpot_ms[USUAL_QUANTILE],
            sentence=f"{load:.3g} {unit} keep the objectives for {share:.0%} of the requests, simulated", missed=[],
        )  # fmt: skip
    return _curve(
        title, title, points, left_out, goodput, objectives, share, SIMULATED, answer.deployment.num_devices,
        answer.usd_per_hour,
    )  # fmt: skip


def _planned_curve(
    label: str, replays: Sequence[Replay], limit: Replay | None, objectives: Objectives, share: float,
    recorded_rps: float, devices: int | None, usd_per_hour: float | None,
) -> Curve:  # fmt: skip
    points, left_out = [], []
    for rate, replay in sorted({each.rate: each for each in replays}.items()):
        said, at = replay.prediction, f"{recorded_rps * rate:.3g} {REQUESTS_PER_S}"
        tpot = said.tpot_ms[USUAL_QUANTILE]
        refusal = said.doubts[0] if said.is_refused and said.doubts else "the change cannot be replayed"
        why = refusal if said.is_refused else BACKLOG if not replay.keeps_up else NO_TPOT if not tpot.median > 0 else ""
        if why:
            left_out.append(f"{at}: {why}")
            continue
        known = not math.isnan(tpot.low) and not math.isnan(tpot.high)
        points.append(CurvePoint(
            rate_rps=recorded_rps * rate, tpot_ms=tpot.median, tokens_per_s=said.output_tokens_per_s,
            median_tpot_ms=said.tpot_ms[LESSER_QUANTILE].median, attainment=replay.attainment,
            tpot_range_ms=(tpot.low, tpot.high) if known else None,
        ))  # fmt: skip
    goodput = msgspec.structs.replace(NOT_JUDGED, sentence=NOTHING_KEPT)
    if limit is not None:
        rps = recorded_rps * limit.rate
        goodput = Goodput(
            rate_rps=rps, low_rps=None, high_rps=None, at_edge=False,
            tokens_per_s=limit.prediction.output_tokens_per_s, tpot_ms=limit.prediction.tpot_ms[USUAL_QUANTILE].median,
            sentence=f"{rps:.3g} {REQUESTS_PER_S} keep the objectives for {share:.0%} of the requests, replayed",
            missed=[],
        )  # fmt: skip
    return _curve(label, label, points, left_out, goodput, objectives, share, REPLAYED, devices, usd_per_hour)


def _curve(
    name: str, label: str, points: list[CurvePoint], left_out: list[str], goodput: Goodput, objectives: Objectives,
    share: float, source: str, devices: int | None, usd_per_hour: float | None,
) -> Curve:  # fmt: skip
    bounds = (each["tpot_ms"] for each in objectives
              if each.get("tpot_ms") and each.get("klass", EVERY_CLASS) == EVERY_CLASS)  # fmt: skip
    slo_ms = min(bounds, default=None)
    return Curve(
        name=name, label=label, quantile=USUAL_QUANTILE, points=points, left_out=left_out, slo_ms=slo_ms,
        crossing=crossing(points, slo_ms) if slo_ms is not None else None, goodput=goodput, devices=devices,
        usd_per_hour=usd_per_hour, joules_per_token={}, rates=[], source=source, required_share=share,
    )  # fmt: skip


def _load_of(trial: Trial) -> tuple[float, str]:
    """A load and its unit."""
    return (trial.rate_rps, REQUESTS_PER_S) if trial.rate_rps is not None else (float(trial.slots or 0), SLOTS)


def _titles(deployments: Sequence[Deployment]) -> list[str]:
    """`4 × h100_sxm, vllm, fp8`: unlike for each of them, since they differ in devices or their number."""
    return [f"{each.num_devices} × {each.device}, {each.backend}, {each.weight_format}" for each in deployments]
