"""Each measurement simulated, by maker: what the estimate says of its deployment and load, or why it says nothing."""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from typing import NamedTuple

import numpy as np

from bench.silicon.rows import Measured
from sojourn.metrics.errors import SojournError
from sojourn.replay.device.estimate import Deployment, DeviceEstimate, DeviceStep
from sojourn.replay.device.known_errors import Maker
from sojourn.replay.device.makers import estimate_of
from sojourn.replay.device.simulate import Load, server_config, simulate

WAVES = 10  # requests of each slot
BLOCK_SIZE = 64  # larger than a server has it: a third of the time, and the same answers
MOST_REQUESTS = 2000


class Estimated(NamedTuple):
    """Of one measurement; ms."""

    measured: Measured
    tpot_ms: float
    ttft_ms: float
    e2e_ms: float
    steps_per_token: float  # of a request's decode: host time comes once a step

    @property
    def error(self) -> float:
        """Of TPOT, relative."""
        return self.tpot_ms / self.measured.tpot_ms - 1


Refused = tuple[Measured, str]


def judged(
    rows: Iterable[Measured], maker: Maker, processes: int = 2, host_ns: dict[str, float] | None = None
) -> tuple[list[Estimated], list[Refused]]:
    """In order of the file. `host_ns` of a step, by backend, in place of the product's own."""
    ordered = sorted(rows, key=lambda each: (repr(each.deployment), each.place))
    groups = [(list(group), maker, host_ns) for _, group in groupby(ordered, key=lambda each: each.deployment)]
    groups.sort(key=lambda each: -len(each[0]))
    found, refused = [], []
    with ProcessPoolExecutor(processes) as pool:
        for estimated, without in pool.map(_judged_group, groups, chunksize=1):
            found += estimated
            refused += without
    return sorted(found, key=lambda e: e.measured.place), sorted(refused, key=lambda r: r[0].place)


def _judged_group(
    given: tuple[list[Measured], Maker, dict[str, float] | None],
) -> tuple[list[Estimated], list[Refused]]:
    rows, maker, host_ns = given
    deployment: Deployment = rows[0].deployment
    try:
        estimate = estimate_of(deployment, maker)
    except SojournError as error:
        return [], [(row, str(error)) for row in rows]
    if host_ns is not None:
        estimate.host_ns = host_ns[deployment.backend]
    found: list[Estimated] = []
    refused: list[Refused] = []
    answered = of_load if maker == "kernels" else mean_step
    known: dict[tuple, tuple[float, float, float, float]] = {}
    for row in rows:
        try:
            if row.point not in known:
                known[row.point] = answered(estimate, row.prompt_tokens, row.output_tokens, row.concurrency)
            found.append(Estimated(row, *known[row.point]))
        except SojournError as error:
            refused.append((row, str(error)))
    return found, refused


def mean_step(
    estimate: DeviceEstimate, prompt: int, output: int, concurrency: int
) -> tuple[float, float, float, float]:
    """The same without a simulation, for a bound: each step has all decodes and as many prompt tokens as come to it."""
    share = max(1, round(concurrency * prompt / output))
    past = round(concurrency * (prompt + output / 2))
    step_ms = estimate.device_ns(DeviceStep(((share, prompt // 2),), concurrency, past)) / 1e6
    first_ms = estimate.device_ns(DeviceStep(((prompt, 0),), 0, 0)) / 1e6
    return step_ms, first_ms, first_ms + (output - 1) * step_ms, 1.0


def of_load(estimate: DeviceEstimate, prompt: int, output: int, concurrency: int) -> tuple[float, float, float, float]:
    """(TPOT, TTFT, E2E, steps per token) of a closed loop, as means."""
    count = max(2 * concurrency, min(WAVES * concurrency, MOST_REQUESTS))
    load = Load(np.full(count, prompt), np.full(count, output), concurrency=concurrency)
    done = simulate(estimate, load, server_config(estimate, block_size=BLOCK_SIZE))
    answers = done.answers
    tpot, ttft, e2e = (float(np.nanmean(each)) for each in (answers.tpot_ms, answers.ttft_ms, answers.e2e_ms))
    tokens = count * max(output - 1, 1) / min(concurrency, count)
    return tpot, ttft, e2e, done.steps / tokens
