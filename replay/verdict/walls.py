"""The walls of a server: how many requests and tokens its memory, its arithmetic, its bandwidth and an objective allow.

Each wall is a bound of what one resource allows alone, with its formula in numbers. The nearest one binds. Pure.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from sojourn.metrics.compute.cost_model import ModelShape, StepWork, saved_flops, step_cost
from sojourn.metrics.compute.roofline import Ceilings
from sojourn.metrics.compute.step_time import StepTimeModel

GIB = 2**30


class MeanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request of the run is on average."""

    prompt_tokens: float
    computed_tokens: float  # of the prompt, without those that the prefix cache had
    output_tokens: float

    @property
    def length(self) -> float:
        """Tokens with keys and values at its end."""
        return self.prompt_tokens + self.output_tokens


class Wall(msgspec.Struct, frozen=True, kw_only=True):
    """The load that one resource allows, in requests per second, and how it is computed."""

    name: str  # memory, compute, bandwidth, objective
    requests_per_s: float | None  # None: not known, the formula says why
    concurrent: float | None  # requests at a time, where the wall is of those
    formula: str


def memory_wall(shape: ModelShape, mean: MeanRequest, pool_tokens: int, e2e_s: float) -> Wall:
    """Requests that fit in the KV pool at their full length, each for `e2e_s`. Blocks that requests share make more
    fit; blocks that are not full make fewer fit."""
    fits = pool_tokens / max(mean.length, 1.0)
    width = shape.kv_bytes_per_token / max(2 * shape.num_layers, 1)
    return Wall(
        name="memory",
        requests_per_s=fits / e2e_s if e2e_s > 0 else None,
        concurrent=fits,
        formula=(
            f"KV bytes = batch × length × layers × KV width in bytes × 2 = {fits:,.0f} × {mean.length:,.0f} × "
            f"{shape.num_layers} × {width:,.0f} × 2 = {pool_tokens * shape.kv_bytes_per_token / GIB:,.2f} GiB; "
            f"a request keeps its blocks for {e2e_s:,.2f} s"
        ),
    )


def compute_wall(shape: ModelShape, mean: MeanRequest, peak_flops: float) -> Wall:
    """Requests whose FLOPs fit in a second of the fastest matrix product that was measured."""
    tokens = mean.computed_tokens + mean.output_tokens
    cached = mean.prompt_tokens - mean.computed_tokens
    pairs = shape.num_layers * (tokens * cached + tokens * (tokens + 1) / 2)
    flops = (
        tokens * shape.linear_flops_per_token
        + shape.pair_flops * pairs
        - saved_flops(shape, round(mean.computed_tokens), round(cached))  # as if a prompt were one chunk
        + mean.output_tokens * shape.head_flops_per_row
    )
    return Wall(
        name="compute",
        requests_per_s=peak_flops / flops,
        concurrent=None,
        formula=f"peak / FLOPs of a request = {peak_flops / 1e9:,.0f} GFLOP/s / {flops / 1e9:,.2f} GFLOP",
    )


def bandwidth_wall(shape: ModelShape, mean: MeanRequest, batch: float, bytes_per_s: float) -> Wall:
    """Requests whose decode steps fit in a second, where a step reads the weights and the KV of `batch` sequences."""
    context = mean.prompt_tokens + mean.output_tokens / 2
    count = max(1, round(batch))
    reads = round(count * context * shape.num_layers)
    moved = step_cost(shape, StepWork(count, count, 0, 0, 0, reads, count)).moved_bytes
    step_s = moved / bytes_per_s
    return Wall(
        name="bandwidth",
        requests_per_s=count / step_s / max(mean.output_tokens, 1.0),
        concurrent=None,
        formula=(
            f"bytes of a decode step / bandwidth = {moved / 1e6:,.1f} MB / {bytes_per_s / 1e9:,.1f} GB/s = "
            f"{1e3 * step_s:,.2f} ms for {count} requests, each with {mean.output_tokens:,.0f} such steps"
        ),
    )


def objective_wall(shape: ModelShape, mean: MeanRequest, model: StepTimeModel, tpot_ms: float, most: int) -> Wall:
    """The largest batch whose decode step, with the prompt tokens that such a load brings, keeps the time per output
    token; by the step-time model of the run."""
    context = round(mean.prompt_tokens + mean.output_tokens / 2)

    def step_ms(batch: int) -> float | None:
        """Each output token of a request comes with its share of a prompt that somebody else brings."""
        prompt = round(batch * mean.computed_tokens / max(mean.output_tokens, 1.0))
        pairs = shape.num_layers * batch * context
        work = StepWork(batch + prompt, batch, pairs, int(prompt > 0), shape.num_layers * prompt**2 // 2, 0, batch)
        predicted = model.predict_work(work)
        return None if predicted is None else predicted / 1e6

    def is_late(batch: int) -> bool:
        took = step_ms(batch)
        return took is None or took > tpot_ms

    low = bisect_left(range(1, most + 1), True, key=is_late)  # the time grows with the batch
    took = step_ms(low) if low else None
    if took is None:
        return Wall(
            name="objective", requests_per_s=None if low else 0.0, concurrent=float(low),
            formula=f"no batch has a step within TPOT ≤ {tpot_ms:g} ms, by the steps of the run",
        )  # fmt: skip
    rate = low / (took / 1e3) / max(mean.output_tokens, 1.0)
    return Wall(
        name="objective",
        requests_per_s=rate,
        concurrent=float(low),
        formula=(
            f"a step of {low} requests with their share of prompts takes {took:,.1f} ms, within TPOT ≤ {tpot_ms:g} ms"
            + (f"; max_num_seqs={most} ends it" if low == most else "")
        ),
    )


def measured_walls(
    shape: ModelShape, mean: MeanRequest, batch: float, ceilings: Ceilings | None, precision: str
) -> list[Wall]:
    """The walls of arithmetic and bandwidth; without ceilings they say how to measure them."""
    if ceilings is None or precision not in ceilings.precisions:
        missing = f"not measured for {precision}: sojourn calibrate device, then measure the run again"
        return [
            Wall(name=name, requests_per_s=None, concurrent=None, formula=missing) for name in ("compute", "bandwidth")
        ]
    return [
        compute_wall(shape, mean, ceilings.peak_flops(precision)),
        bandwidth_wall(shape, mean, batch, ceilings.bandwidth),
    ]


def binding(walls: Sequence[Wall]) -> Wall | None:
    """The wall that allows the least; None where none is known."""
    known = [wall for wall in walls if wall.requests_per_s is not None and math.isfinite(wall.requests_per_s)]
    return min(known, key=lambda wall: wall.requests_per_s, default=None)
