"""Why a replay cannot be trusted, as sentences. An empty list: it can."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sojourn.metrics.prediction import Change, Prediction
from sojourn.replay.disturbance import Disturbance
from sojourn.replay.simulate import Material, Replayed

FEW_STEPS = 200  # fewer leave the step model with coefficients from a handful of steps
WORST_MODEL_ERROR = 0.15
WORST_TTFT = 0.15  # of the unchanged replay
WORST_TTFT_MS = 5.0  # of the unchanged replay, at least: nobody feels less; or this share of the tightest objective
WORST_OF_OBJECTIVE = 0.1
WORST_ATTAINMENT = 0.05
WORST_PREEMPTIONS = 0.3
FEW_PREEMPTIONS = 10  # a difference of so many is no storm
WORST_GUESSED = 0.3
FEW_LOOKED_UP = 20  # requests whose outputs were searched for repetitions


def of_run(material: Material, measured: pd.DataFrame) -> list[str]:
    doubts = list(material.load.doubts)
    steps = len(material.step_begins_ns)
    if steps < FEW_STEPS:
        doubts.append(f"The run has only {steps} steps, too few to know how long a step takes.")
    if material.times.known_error > WORST_MODEL_ERROR:
        doubts.append(
            f"The step model is wrong by {100 * material.times.known_error:.0f}% between small and large steps of the "
            "run."
        )
    if material.warm_blocks:
        doubts.append(
            f"The disk tier held {material.warm_blocks:,} blocks at the beginning; the replay begins with none of them."
        )
    lost = measured.get("ledger_request_lost_ns")
    if lost is not None and (lost.astype("float64") > 0).any():
        doubts.append("The core died during the run, and a replay has no dying core.")
    failed = measured.error[measured.status == "error"].dropna().astype(str) if "error" in measured else []
    unlike = sum("429" not in sentence for sentence in failed)
    if unlike > 0.02 * max(len(measured), 1):
        doubts.append(f"{unlike} requests failed for reasons that a replay does not repeat.")
    return doubts


def of_unchanged(
    recorded: Mapping[str, float], replayed: Mapping[str, float], recorded_preemptions: int, preemptions: int,
    objectives: Sequence[Mapping[str, Any]] | None,
) -> list[str]:  # fmt: skip
    """What the run replayed unchanged misses of the recorded run."""
    doubts = []
    ttft, again = recorded.get("ttft_ms:p50", math.nan), replayed.get("ttft_ms:p50", math.nan)
    bounds = [float(each["ttft_ms"]) for each in objectives or () if each.get("ttft_ms")]
    felt_ms = max(WORST_TTFT_MS, WORST_OF_OBJECTIVE * min(bounds, default=0.0))
    if abs(again - ttft) > max(WORST_TTFT * ttft, felt_ms) or math.isnan(ttft) != math.isnan(again):
        doubts.append(
            f"Replayed unchanged, the median time to first token is {again:.3g} ms; the run had {ttft:.3g} ms."
        )
    kept, kept_again = recorded["attainment"], replayed["attainment"]
    if abs(kept_again - kept) > WORST_ATTAINMENT:
        doubts.append(
            f"Replayed unchanged, {100 * kept_again:.0f}% of the requests keep their objectives; in the run "
            f"{100 * kept:.0f}% did."
        )
    if abs(preemptions - recorded_preemptions) > max(FEW_PREEMPTIONS, WORST_PREEMPTIONS * recorded_preemptions):
        doubts.append(
            f"Replayed unchanged, {preemptions} requests are preempted; in the run {recorded_preemptions} were."
        )
    return doubts


def of_open(said: Prediction, disturbance: Disturbance) -> str:
    """Why nearly every outcome lies within the bounds."""
    why = ", and ".join(disturbance.words()) or "at this load a small change of the machine's speed decides"
    bounds = f" ({said.attainment.low:.0%} to {said.attainment.high:.0%})" if said.attainment.high >= 0 else ""
    return f"Nearly every outcome lies within the bounds{bounds}, so this cannot be predicted: {why}."


def of_change(change: Change, replayed: Replayed, material: Material) -> list[str]:
    doubts = []
    if replayed.guessed > WORST_GUESSED:
        doubts.append(
            f"{100 * replayed.guessed:.0f}% of the device time is in steps far from those of the run in size, whose "
            "time is a guess."
        )
    if replayed.guessed and material.times.sizes < 2:
        doubts.append("The steps of the run have one size, so that the time of other sizes cannot be predicted.")
    if replayed.repeated > len(material.load.requests):
        doubts.append("More requests are sent than twice those that were recorded; most of them are repetitions.")
    if "model" in change.settings or ("kv_cache_dtype" in change.settings and not _names_pool(change)):
        doubts.append("The replay keeps the recorded token counts and KV pool, which such a change may not keep.")
    if change.settings.get("policy") == "fair-share" and any(r.tenant for r in material.load.requests):
        doubts.append("The run does not record the weights of its tenants; the replay weighs them alike.")
    return doubts + _of_drafts(change, material)


def _of_drafts(change: Change, material: Material) -> list[str]:
    drafts = material.drafts
    if drafts is None or change.settings.get("speculation", "") == "none":
        return []
    if drafts.sampled is not None and "speculation" in change.settings and drafts.sampled < FEW_LOOKED_UP:
        return [f"The outputs of only {drafts.sampled} requests were searched for what prompt lookup would find."]
    if change.settings.get("speculation_tokens", 0) > drafts.known_positions:
        return [f"The run never verified more than {drafts.known_positions} drafts of a request in one step."]
    return []


def _names_pool(change: Change) -> bool:
    return change.kv_scale != 1 or not change.settings.keys().isdisjoint(("num_kv_blocks", "kv_cache_gib"))
