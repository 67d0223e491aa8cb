"""What disturbed the steps of a run: other processes, other machines, clocks that changed, and a speed that wandered.

A prediction is of another run. What disturbed this one may be there again, stronger, or gone. So a run that others
slowed says less of the next one than a run that had its machine to itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.compute.machine_facts import machine_facts
from sojourn.metrics.machine.steal import steal_within
from sojourn.metrics.statistics.intervals import student
from sojourn.replay.step_fit import StepRatios, StepTimes

BLOCKS = (16, 8, 4)  # of the run's time: the speed wanders as slowly as the block length in which it differs most
WORTH_A_WORD = 0.05
MOST_TAKEN = 0.95  # by others: more leaves no logarithm
NORMAL_80 = 1.2816  # standard deviations between the median and the bounds of 80%


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Of the steps under load. Shares are 0 to 1; None where the run does not tell."""

    waiting: float | None = None  # of the time of the core's threads: for a CPU that other processes had
    stolen: float | None = None  # of the CPUs' time: the hypervisor gave it to other machines
    clock: float | None = None  # of the device's highest clock in the run: the standard deviation
    neighbours: Mapping[str, float] = field(default_factory=dict)  # `name (pid)` → mean cores, most first
    wandering: float = 0.0  # standard error of the run's mean speed, relative, by how the speed wandered

    @property
    def slowdown(self) -> float:
        """Logarithm of how many times as long the steps took because of others."""
        return -sum(math.log1p(-min(share or 0.0, MOST_TAKEN)) for share in (self.waiting, self.stolen))

    def words(self) -> list[str]:
        """What was worth a word, as parts of a sentence."""
        found = []
        if (self.waiting or 0.0) >= WORTH_A_WORD:
            names = f" ({', '.join(self.neighbours)})" if self.neighbours else ""
            found.append(f"other processes{names} had the CPU for {self.waiting:.0%} of the time of the core's threads")
        if (self.stolen or 0.0) >= WORTH_A_WORD:
            found.append(f"the hypervisor gave {self.stolen:.0%} of the CPU time to other machines")
        if (self.clock or 0.0) >= WORTH_A_WORD:
            found.append(f"the device's clock varied by {self.clock:.0%}")
        if self.wandering >= WORTH_A_WORD:
            found.append(f"the speed wandered within the run, so that its mean is known to {self.wandering:.0%}")
        return found


def disturbance_of(
    meta: Mapping[str, Any], system: pd.DataFrame, steps: pd.DataFrame, wandering: float = 0.0
) -> Disturbance:
    """`steps` are those under load, `system` the samples of the server's machine."""
    if not len(steps) or not len(system):
        return Disturbance(wandering=wandering)
    window = float(steps.begin_ns.min()), float(steps.end_ns.max())
    facts = machine_facts(meta, system, steps, pd.DataFrame(), window)
    steal = steal_within(system, round(window[0]), round(window[1]))
    return Disturbance(
        waiting=None if facts is None else facts.core_queued_by_others,
        stolen=None if steal is None else steal.mean / 100,
        clock=_clock(system, window),
        neighbours={} if facts is None else facts.neighbours,
        wandering=wandering,
    )  # fmt: skip


def wandering_of(times: StepTimes | StepRatios, begins_ns: np.ndarray) -> float:
    """Standard error of the mean speed: by blocks of the run's time, of the length in which it is largest."""
    measured, expected = times.device_ratio * times.predicted_ns, times.predicted_ns
    found = [0.0]
    for count in BLOCKS:
        edges = np.linspace(begins_ns[0], begins_ns[-1] + 1.0, count + 1)
        block = np.searchsorted(edges, begins_ns, side="right") - 1
        sums, usual = (np.bincount(block, weights=each, minlength=count) for each in (measured, expected))
        used = usual > 0.1 * usual.sum() / count  # an idle block tells nothing
        if used.sum() >= min(BLOCKS):
            ratios = np.log(sums[used] / usual[used])
            found.append(_error_of_mean(ratios))
    return max(found)


def _error_of_mean(values: np.ndarray) -> float:
    return student(len(values), NORMAL_80) * float(values.std(ddof=1)) / math.sqrt(len(values))


def _clock(system: pd.DataFrame, window: tuple[float, float]) -> float | None:
    """GPUs alone tell their clock."""
    within = system[(system.ns >= window[0]) & (system.ns <= window[1])]
    clocks = within.gpu_sm_clock_mhz.astype("float64").dropna().to_numpy() if "gpu_sm_clock_mhz" in within else []
    return float(np.std(clocks) / np.max(clocks)) if len(clocks) > 1 and np.max(clocks) > 0 else None
