"""One run of a search: a scenario at another rate, against our engine or a running server."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen.experiment import OnProgress, load_url, run_scenario
from loadgen.scenario import Objective, Scenario
from loadgen.scenario_faults import ScenarioError
from metrics.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes: a running server by its `base_url`, or our engine, started anew for each run."""

    base_url: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    engine_overrides: dict[str, Any] = field(default_factory=dict)

    def replay(self, scenario: Scenario, run_dir: Path, seed: int, progress: OnProgress) -> RunDirectory:
        """Runs it. Raises ExperimentError or ScenarioError."""
        if self.base_url is None:
            return run_scenario(scenario, run_dir, engine_overrides=self.engine_overrides, seed=seed, progress=progress)
        return load_url(
            scenario, self.base_url, run_dir, model=self.model, tokenizer=self.tokenizer, seed=seed, progress=progress
        )


def at_rate(scenario: Scenario, rate_rps: float, **changes: Any) -> Scenario:
    """The same scenario at another rate; `changes` are of its arrivals. Raises ScenarioError if it has no rate."""
    arrivals = scenario.arrivals
    if "rate_rps" not in type(arrivals).model_fields:
        raise ScenarioError(
            [f"arrivals.process is {arrivals.process}, which has no rate_rps to search over; use one that has, such as "
             "poisson, gamma or constant"]
        )  # fmt: skip
    changed = arrivals.model_dump() | {"rate_rps": rate_rps} | changes
    return scenario.model_copy(update={"arrivals": type(arrivals)(**changed)})


def with_objectives(scenario: Scenario, bounds: dict[str, float]) -> Scenario:
    """The scenario with these bounds, in ms, for every class, in the place of its own objectives."""
    objective = Objective(**bounds, source="given on the command line")
    return scenario.model_copy(update={"objectives": [objective]})
