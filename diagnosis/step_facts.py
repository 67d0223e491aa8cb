"""What the step records show: how busy the device was, what requests waited for, and what a step costs."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import pandas as pd
import pyarrow as pa

from sojourn.interop.sources.pressure import KV_FREE
from sojourn.metrics.records import PROMPT_KINDS, STAGES
from sojourn.metrics.request.stalls import COLUMNS, stalled
from sojourn.metrics.request.waits import reasons
from sojourn.metrics.statistics.relative_fit import fitted

FEWEST_STEPS_FOR_A_FIT = 50  # three coefficients from fewer steps are noise
OUTLIER_DEVIATIONS = 4.0  # robust standard deviations; a page fault must not bend the step model
DEVICE_STAGES = ("wait", "sample")  # all other stages are the host's


@dataclass(frozen=True, slots=True)
class StepModel:
    """Wall time of a step by least squares: `step_ns + token_ns · tokens + context_ns · context`.

    It describes the run that it was fitted to, host time included. What it cannot predict: the cost of batches far
    larger than those that the run had.
    """

    step_ns: float
    token_ns: float
    context_ns: float

    def predict(self, tokens: float, context: float) -> float:
        return self.step_ns + self.token_ns * tokens + self.context_ns * context


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Sums and shares over all steps of a run. Times are nanoseconds; shares are 0 to 1."""

    count: int
    wall_ns: float
    stage_share: dict[str, float]  # of the wall time of steps
    host_share: float  # of the wall time of steps, in host stages that the device did not hide
    mean_batch: float  # requests of a step, weighted by its wall time
    waits: dict[str, float]  # reason → share of the request-seconds of waiting; behind_head goes to its head's reason
    waited_with_kv_free: float  # share of the request-seconds of waiting with ≥ KV_FREE of the pool free or reusable
    kv_use_p50: float
    kv_use_max: float
    pool_blocks: int
    preemptions: int
    tokens: float
    recomputed_tokens: float
    slowdown: float | None  # device time / predicted time over the steps that have a prediction
    worst_slowdown: float | None  # the same over the worst quarter of the run
    slowdown_with_prompts: float | None  # over the steps with prompt tokens, which arithmetic bounds
    slowdown_without: float | None  # over the other steps, which memory bounds
    prefill_step_p95_ns: float | None  # wall time of steps that carry both prompt tokens and a decoding request
    decode_step_p50_ns: float | None  # wall time of steps with decodes only
    prefill_tokens_p95: float | None  # prompt tokens in the steps that carry both
    model: StepModel | None
    budget_p50: float = 0.0  # tokens that a step could have held
    starved_share: float = 0.0  # of the wall time, in steps of prompts only while others were decoding


def step_facts(steps: pd.DataFrame) -> StepFacts | None:
    """The facts of a `steps` table; None where no step was recorded."""
    if not len(steps):
        return None
    steps = steps.sort_values("step", ignore_index=True)
    wall = (steps.end_ns - steps.begin_ns).to_numpy(dtype="float64")
    device = steps.device_ns.to_numpy(dtype="float64")
    predicted = np.nan_to_num(steps.predicted_ns.astype("float64").to_numpy())
    batch = composition(steps)
    pool = (steps.blocks_free + steps.blocks_active + steps.blocks_reusable).to_numpy()
    used = (steps.blocks_active / np.maximum(pool, 1)).to_numpy(dtype="float64")
    has_kv = ((steps.blocks_free + steps.blocks_reusable).to_numpy() / np.maximum(pool, 1)) >= KV_FREE
    waits, waiting_ns, with_kv_free = _waits(steps, wall, has_kv)
    prompt_tokens = batch.prompt_tokens.to_numpy()
    tokens = prompt_tokens + batch.decode_tokens.to_numpy()
    both = (prompt_tokens > 0) & (batch.decoding > 0).to_numpy()
    alone = (prompt_tokens == 0) & (batch.decoding > 0).to_numpy()
    whole = max(wall.sum(), 1)
    stage_share = {stage: float(steps[f"stage_{stage}_ns"].sum() / whole) for stage in STAGES}
    host_share = sum(share for stage, share in stage_share.items() if stage not in DEVICE_STAGES)
    pace = _without_stalls(steps, device)
    slowdown = _slowdown(pace, predicted)
    return StepFacts(
        count=len(steps),
        wall_ns=float(wall.sum()),
        stage_share=stage_share,
        host_share=min(host_share, max(0.0, 1.0 - float(device.sum() / whole))),
        mean_batch=float((batch.requests * wall).sum() / whole),
        waits={reason: ns / waiting_ns for reason, ns in waits.items()} if waiting_ns else {},
        waited_with_kv_free=with_kv_free / waiting_ns if waiting_ns else 0.0,
        kv_use_p50=float(np.median(used)),
        kv_use_max=float(used.max()),
        pool_blocks=int(pool.max()),
        preemptions=int(steps.preempted_ids.map(len).sum()),
        tokens=float(tokens.sum()),
        recomputed_tokens=float(batch.recomputed_tokens.sum()),
        slowdown=slowdown,
        worst_slowdown=None if slowdown is None else _worst_quarter(pace, predicted),
        slowdown_with_prompts=_slowdown(pace, predicted, prompt_tokens > 0),
        slowdown_without=_slowdown(pace, predicted, prompt_tokens == 0),
        prefill_step_p95_ns=float(np.quantile(wall[both], 0.95)) if both.any() else None,
        decode_step_p50_ns=float(np.median(wall[alone])) if alone.any() else None,
        prefill_tokens_p95=float(np.quantile(prompt_tokens[both], 0.95)) if both.any() else None,
        model=fit(tokens, batch.context.to_numpy(), wall),
        budget_p50=float(steps.budget.median()),
        starved_share=float(wall[_find_starving(steps, prompt_tokens > 0, batch.decoding.to_numpy())].sum() / whole),
    )


def _without_stalls(steps: pd.DataFrame, device: np.ndarray) -> np.ndarray:
    """[steps] the device's time, without that in which the engine stood still: it says nothing of the pace."""
    at, length = stalled(pa.Table.from_pandas(steps[list(COLUMNS)], preserve_index=False))
    pace = device.copy()
    pace[at] -= length
    return pace


def _find_starving(steps: pd.DataFrame, has_prompts: np.ndarray, decoding: np.ndarray) -> np.ndarray:
    """[steps] bool: steps of prompts alone, though requests decoded before and go on to decode after them."""
    last: dict[str, int] = {}
    first_gap = np.zeros(len(steps), dtype=bool)
    for at, names in enumerate(steps.request_ids):
        for name in names:
            before = last.get(name)
            if before is not None and at - before > 1:
                first_gap[before + 1 : at] = True
            last[name] = at
    return first_gap & has_prompts & (decoding == 0)


def fit(tokens: np.ndarray, context: np.ndarray, wall: np.ndarray) -> StepModel | None:
    """Least squares with non-negative coefficients, without the outliers; None for too few steps."""
    timed = (tokens > 0) & (wall > 0) & np.isfinite(wall)
    if timed.sum() < FEWEST_STEPS_FOR_A_FIT:
        return None
    tokens, context, wall = tokens[timed], context[timed], wall[timed]
    features = np.column_stack([np.ones(len(tokens)), tokens, context])
    residual = wall - features @ fitted(features, wall)
    spread = 1.4826 * np.median(np.abs(residual - np.median(residual)))  # 1.4826: MAD of a normal = 1 σ
    usual = np.abs(residual) <= OUTLIER_DEVIATIONS * max(spread, 1.0)
    kept = usual if usual.sum() >= FEWEST_STEPS_FOR_A_FIT else np.ones(len(tokens), dtype=bool)
    return _fit_once(tokens[kept], context[kept], wall[kept])


def _fit_once(tokens: np.ndarray, context: np.ndarray, wall: np.ndarray) -> StepModel:
    columns = {"step_ns": np.ones(len(tokens)), "token_ns": tokens, "context_ns": context}
    names = list(columns)
    while names:
        solution, *_ = np.linalg.lstsq(np.column_stack([columns[name] for name in names]), wall, rcond=None)
        if (solution >= 0).all():
            return StepModel(**(dict.fromkeys(columns, 0.0) | dict(zip(names, map(float, solution), strict=True))))
        del names[int(np.argmin(solution * [np.mean(columns[name]) for name in names]))]
    return StepModel(float(np.mean(wall)), 0.0, 0.0)


def composition(steps: pd.DataFrame) -> pd.DataFrame:
    """What each step holds, in the order of the steps."""
    sizes = steps.request_ids.map(len).to_numpy(dtype="int64")
    place = np.repeat(np.arange(len(steps)), sizes)
    new, past = (np.fromiter(chain.from_iterable(steps[name]), "float64") for name in ("new_tokens", "past_tokens"))
    kinds = np.fromiter(chain.from_iterable(steps.kinds), object)
    prompt = np.isin(kinds, PROMPT_KINDS)

    def total(weights: np.ndarray) -> np.ndarray:
        return np.bincount(place, weights=weights, minlength=len(steps))

    return pd.DataFrame({
        "requests": sizes.astype("float64"),
        "prompt_tokens": total(new * prompt),  # of kind prefill or recompute
        "recomputed_tokens": total(new * (kinds == "recompute")),
        "decode_tokens": total(new * ~prompt),  # of the other kinds
        "decoding": total((~prompt).astype("float64")),  # requests of the other kinds
        "context": total(new + past),  # tokens
    })  # fmt: skip


def _waits(steps: pd.DataFrame, wall: np.ndarray, has_kv: np.ndarray) -> tuple[dict[str, float], float, float]:
    """Request-ns of waiting by root reason, their sum, and the part of it in which the KV pool was not short."""
    by_reason: dict[str, float] = {}
    free_ns = total_ns = 0.0
    for refusals, ns, spare in zip(steps.refusals, wall, has_kv, strict=True):
        counts = reasons(refusals)
        if behind := counts.pop("behind_head", 0):
            head = next(iter(counts), "behind_head")  # the scheduler names the reason of the queue's head first
            counts[head] = counts.get(head, 0) + behind
        for reason, count in counts.items():
            by_reason[reason] = by_reason.get(reason, 0.0) + count * ns
            total_ns += count * ns
            free_ns += count * ns * spare
    return by_reason, total_ns, free_ns


def _slowdown(device: np.ndarray, predicted: np.ndarray, chosen: np.ndarray | bool = True) -> float | None:
    """Device time over predicted time of the chosen steps that have a prediction; None for too few."""
    known = chosen & (predicted > 0)
    return float(device[known].sum() / predicted[known].sum()) if known.sum() >= FEWEST_STEPS_FOR_A_FIT else None


def _worst_quarter(device: np.ndarray, predicted: np.ndarray) -> float:
    quarters = np.array_split(np.flatnonzero(predicted > 0), 4)
    return max(float(device[part].sum() / predicted[part].sum()) for part in quarters)
