"""`sojourn capacity --rates`: one run of the scenario at each of several rates, and their frontier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.run.experiment import OnProgress
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.search.points import Search
from sojourn.loadgen.sweeps.folder import OnNote, SearchFolder
from sojourn.loadgen.sweeps.run_point import Target, at_rate
from sojourn.metrics.request.objectives import EVERY_CLASS, objectives_of

MOST_POINTS = 1_000
OnPoint = Callable[[int, int, float], None]  # number of the run, from 1; of how many; its rate


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Every rate once, then all again, so that a drift of the server does not look like an effect of the rate."""

    scenario: Scenario
    rates_rps: tuple[float, ...]
    repeats: int
    seed: int
    target: Target

    def document(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario.model_dump(mode="json"), "rates_rps": list(self.rates_rps),
            "repeats": self.repeats, "seed": self.seed, **self.target.document(),
            "objectives_ms": objectives_of(EVERY_CLASS, [each.model_dump() for each in self.scenario.objectives]),
        }  # fmt: skip


def rate_grid(start_rps: float, end_rps: float, points: int, scale: Literal["linear", "log"]) -> tuple[float, ...]:
    """Rates from start to end, both included, with equal differences or equal ratios, to four digits."""
    if not 0 < start_rps < end_rps:
        raise ScenarioError(
            f"--rate-from {start_rps:g} must be above 0 and below --rate-to {end_rps:g}; swap or change them"
        )
    if not 2 <= points <= MOST_POINTS:
        raise ScenarioError(f"--points is {points}; it must be 2 to {MOST_POINTS}, or name the rates with --rates")
    grid = np.linspace(start_rps, end_rps, points) if scale == "linear" else np.geomspace(start_rps, end_rps, points)
    return tuple(float(f"{rate:.4g}") for rate in grid)


def rate_list(text: str) -> tuple[float, ...]:
    """`1,2,4` → rates, in the order given. Raises ScenarioError."""
    rates = []
    for word in text.split(","):
        try:
            rate = float(word)
        except ValueError:
            rate = 0.0
        if not 0 < rate <= 1_000_000:
            raise ScenarioError(f"--rates has {word!r}; give numbers above 0 and at most 1000000, such as 1,2,4,8")
        rates.append(rate)
    if len(set(rates)) < len(rates):
        raise ScenarioError(f"--rates {text} names a rate twice; to measure it several times, use --repeats")
    return tuple(rates)


def run_sweep(
    plan: SweepPlan, folder: Path, *, on_point: OnPoint, progress: OnProgress, on_note: OnNote = lambda _: None
) -> Search:
    """Measures the missing runs of the sweep in `folder`. An interrupted sweep keeps every finished run.

    Raises ScenarioError before any run if a rate cannot be scheduled, and ExperimentError.
    """
    scenarios = {rate: at_rate(plan.scenario, rate) for rate in plan.rates_rps}
    wanted = schedule(plan.rates_rps, plan.repeats)
    with SearchFolder(folder, "sweep", plan.document()) as search:
        done = {(point.rate_rps, point.repeat) for point in search.points}
        search.resume(on_note, len(wanted))
        for position, (rate, repeat) in enumerate(wanted):
            if (rate, repeat) in done:
                continue
            on_point(position + 1, len(wanted), rate)
            seed, path = search.next_seed(), search.run_path(rate, repeat)
            point = plan.target.measure(scenarios[rate], path, progress, rate_rps=rate, repeat=repeat, seed=seed)
            search.add(point, on_note)
        return search.document


def schedule(rates_rps: Sequence[float], repeats: int) -> list[tuple[float, int]]:
    """(rate, repeat), repeats from 1, in the order in which they run."""
    return [(rate, repeat) for repeat in range(1, repeats + 1) for rate in rates_rps]
