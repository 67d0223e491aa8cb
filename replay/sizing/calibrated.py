"""What a measured point of a deployment says of its estimate: factors of the device's time.

Recorded steps tell of decodes and prompts apart. Of any other point, the load is simulated until its time per output
token is the measured one.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np

from sojourn.engine.config import EngineConfig
from sojourn.metrics.errors import InputError, ReplayError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.device.estimate import DeviceEstimate, DeviceStep, OutsideTables
from sojourn.replay.settings import overlaps, recorded_config
from sojourn.replay.sizing.corrected import CorrectedEstimate, Correction
from sojourn.replay.sizing.limit import Server
from sojourn.replay.sizing.load import SizedLoad
from sojourn.replay.steps_table import FEWEST_STEPS, step_columns, under_load

MOST_STEPS = 5000  # that are asked of the estimate: evenly taken
ROUNDS = 10
CLOSE = 0.01
SMALLEST, LARGEST = 0.02, 50.0  # of a factor: beyond them it is another model or another device


class MeasuredPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One load, and what it gave. Means; tokens are None where the evidence does not say them."""

    source: str
    tpot_ms: float
    of_residence: bool = False  # `tpot_ms` is a request's whole time in the server by its output tokens: of a log
    rate_rps: float | None = None
    tokens_per_s: float | None = None  # in place of the rate
    concurrency: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None


def correction_by_steps(run: RunDirectory, estimate: DeviceEstimate) -> Correction:
    """From the device's time of each recorded step. Raises ReplayError where there are too few, or none that the
    estimate reaches."""
    requests, steps = run.requests(), run.table("steps")
    steps = under_load(steps, requests) if len(requests) else steps
    steps = steps[steps.new_tokens.map(len) > 0].sort_values("begin_ns", ignore_index=True)
    if len(steps) < FEWEST_STEPS:
        raise ReplayError(f"{run.name} has {len(steps)} step records; a correction needs at least {FEWEST_STEPS}")
    meta = run.meta()
    config = recorded_config(meta)
    overlap = overlaps(config, meta)
    columns = step_columns(steps, overlap=overlap)
    turn_ns = columns.receive_ns + columns.before_ns + columns.after_ns + columns.publish_ns
    host_ns = None if overlap else float(np.nanmedian(turn_ns))
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS)).astype(int))
    alone, alone_said, mixed, mixed_decodes, mixed_prompts = 0.0, 0.0, 0.0, 0.0, 0.0
    reached = 0
    for place in chosen.tolist():
        new, past = steps.new_tokens[place], steps.past_tokens[place]
        step = _step(new, past)
        took = float(columns.device_ns[place])
        try:
            said = estimate.device_ns(step)
            decodes = estimate.device_ns(step._replace(chunks=())) if step.chunks and step.decodes else 0.0
        except OutsideTables:
            continue
        if not np.isfinite(took) or said <= 0:
            continue
        reached += 1
        if step.chunks:
            mixed, mixed_decodes, mixed_prompts = mixed + took, mixed_decodes + decodes, mixed_prompts + said - decodes
        else:
            alone, alone_said = alone + took, alone_said + said
    if reached < FEWEST_STEPS:
        raise ReplayError(
            f"{reached} steps of {run.name} are within the tables of this estimate; a correction takes {FEWEST_STEPS}"
        )
    whole = (alone + mixed) / (alone_said + mixed_decodes + mixed_prompts)
    decode = alone / alone_said if alone_said > 0 else whole
    prompt = (mixed - decode * mixed_decodes) / mixed_prompts if mixed_prompts > 0 else whole
    _check(decode, run.name)
    _check(whole, run.name)
    prompt = max(prompt, SMALLEST)
    return Correction(
        decode=decode, prompt=prompt, host_ns=host_ns, source=f"{reached:,} steps of {run.name}",
        sentence=f"{reached:,} steps of {run.name}: decodes took {decode:.2f} times as long as the estimate said, "
        f"prompts {prompt:.2f} times" + ("" if host_ns is None else f"; the host adds {host_ns / 1e6:.2g} ms a step"),
    )  # fmt: skip


def _step(new: list[int], past: list[int]) -> DeviceStep:
    chunks = tuple((int(n), int(p)) for n, p in zip(new, past, strict=True) if n > 1)
    pasts = [int(p) for n, p in zip(new, past, strict=True) if n == 1]
    return DeviceStep(chunks, len(pasts), sum(pasts))


def correction_by_point(
    point: MeasuredPoint, estimate: DeviceEstimate, config: EngineConfig, load: SizedLoad
) -> Correction:
    """From a mean time per output token. The load is `load`, with the point's own mean lengths where they are known.
    Raises InputError for a point without a load."""
    if point.rate_rps is None and point.concurrency is None and point.tokens_per_s is None:
        raise InputError(
            f"{point.source} says neither its request rate nor its concurrency, so no load can be simulated to compare"
        )
    alike = load.scaled(point.prompt_tokens, point.output_tokens)
    rate_rps = point.rate_rps
    if rate_rps is None and point.tokens_per_s is not None:
        rate_rps = point.tokens_per_s / alike.mean_output

    def said(factor: float) -> tuple[float, str]:
        """What the corrected estimate says of the load, and the load in words."""
        corrected = CorrectedEstimate(estimate, Correction(decode=factor, prompt=factor))
        server = Server(corrected, config, alike, None, at_a_time=point.concurrency)
        if rate_rps is not None and alike.slots is None and not np.isnan(alike.rate_rps):
            trial, how = server.at_rate(rate_rps), f"{rate_rps:.3g} requests/s"
        else:
            slots = max(1, round(point.concurrency or (rate_rps or 1.0) * server.full.mean_e2e_ms / 1e3))
            trial, how = server.at_slots(slots), f"{slots} at a time"
        found = 1e3 * trial.in_flight / trial.output_tokens_per_s if point.of_residence else trial.mean_tpot_ms
        if not np.isfinite(found) or found <= 0:
            raise InputError(f"the answers of {point.source} have one token, so no time per output token")
        return found, how

    first, how = said(1.0)
    factor = _solved(lambda factor: said(factor)[0], first, point.tpot_ms)
    _check(factor, point.source)
    what = "time in the server by output tokens" if point.of_residence else "TPOT"
    return Correction(
        decode=factor, prompt=factor, source=point.source,
        sentence=f"{point.source}: {what} {point.tpot_ms:.3g} ms at {how}, where the estimate said {first:.3g} ms; so "
        f"steps take {_words(factor)} the estimate says",
    )  # fmt: skip


def _solved(said: Callable[[float], float], first: float, wanted: float) -> float:
    """The factor with which a simulation says `wanted`; `first` is what it says with 1. Near a server's capacity a time
    per token grows much faster than its steps, so each try stays within the bracket of those before."""
    low, high = (0.0, math.inf) if first == wanted else ((1.0, math.inf) if first < wanted else (0.0, 1.0))
    factor, found, slope = 1.0, first, 1.0
    for _ in range(ROUNDS):
        if abs(wanted / found - 1) < CLOSE:
            return factor
        tried, before = factor, found
        factor *= min(3.0, max(1 / 3, (wanted / found) ** (1 / slope)))
        if not low < factor < high:
            factor = math.sqrt(low * high)
        found = said(factor)
        low, high = (max(low, factor), high) if found < wanted else (low, min(high, factor))
        if factor != tried and found != before:
            slope = min(8.0, max(0.5, math.log(found / before) / math.log(factor / tried)))
    return factor


def _check(factor: float, source: str) -> None:
    if not SMALLEST <= factor <= LARGEST:
        raise ReplayError(
            f"{source} was {_words(factor)} the estimate of this deployment says; it is of another model or another "
            "device"
        )


def _words(factor: float) -> str:
    return f"{factor:.2f} times as long as"
