"""One run of a search: a scenario at another rate, against our engine or a running server."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.run.experiment import OnProgress, load_url, run_scenario
from sojourn.loadgen.scenario.arrivals import CLOSED_PROCESSES, PROCESSES_WITH_RATE
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.schedule.facts import repeated_texts
from sojourn.loadgen.search.bisection import REQUESTS_PER_S
from sojourn.loadgen.search.points import Point, point_of
from sojourn.loadgen.target.processes import ServerDied
from sojourn.metrics.machine.host import hardware, versions
from sojourn.metrics.run.directory import RunDirectory

ENGINE = Path(__file__).parents[2] / "engine"


@dataclass(frozen=True, slots=True)
class Target:
    """The server of a search: a running one by its `base_url`, or our engine, started anew for each run."""

    base_url: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    engine_overrides: dict[str, Any] = field(default_factory=dict)
    processes: int = 1  # of the load generator, for each run

    def document(self) -> dict[str, Any]:
        """The identity of the target, which a resumed search must match: the server, the machine and the programs.

        The number of sending processes is no part of it: the load is the same.
        """
        machine = {name: value for name, value in hardware().items() if name not in ("boot_id", "host_cores")}
        return {
            "target": {
                "base_url": self.base_url, "model": self.model, "tokenizer": self.tokenizer,
                "engine": self.engine_overrides, "engine_build": None if self.base_url else engine_build(),
            },
            "hardware": machine, "versions": versions(),
        }  # fmt: skip

    def doubts(self, scenario: Scenario) -> list[str]:
        """Warnings for several runs of a scenario one after another."""
        return repeated_texts(scenario) if self.base_url else []

    def measure(
        self, scenario: Scenario, run_dir: Path, progress: OnProgress, *, rate_rps: float, repeat: int, seed: int,
        warm_up: bool = False, unit: str = REQUESTS_PER_S,
    ) -> Point:  # fmt: skip
        """Runs the scenario and reads its point, also if our server died. Raises ExperimentError or ScenarioError."""
        died, sent = False, {"seed": seed, "processes": self.processes, "progress": progress}
        try:
            if self.base_url is None:
                run = run_scenario(scenario, run_dir, engine_overrides=self.engine_overrides, **sent)
            else:
                run = load_url(scenario, self.base_url, run_dir, model=self.model, tokenizer=self.tokenizer, **sent)
        except ServerDied:
            run, died = RunDirectory.open(run_dir), True
        return point_of(run, rate_rps=rate_rps, repeat=repeat, seed=seed, warm_up=warm_up, died=died, unit=unit)


def with_sessions(scenario: Scenario, sessions: int, **changes: Any) -> Scenario:
    """The same scenario with another number of users or requests in flight; `changes` are of its arrivals. Raises
    ScenarioError for an open load."""
    arrivals = scenario.arrivals
    name = next((name for name in ("users", "in_flight") if name in type(arrivals).model_fields), None)
    if name is None:
        raise ScenarioError(
            f"arrivals.process is {arrivals.process}, an open load, which has no number of sessions; use a closed "
            f"loop: {', '.join(sorted(CLOSED_PROCESSES))}"
        )
    changed = arrivals.model_dump() | {name: sessions} | changes
    return scenario.model_copy(update={"arrivals": type(arrivals)(**changed)})


def engine_build() -> str:
    """Identifies the code of our engine: another build is another server."""
    digest = hashlib.sha256()
    for file in sorted(file for kind in ("py", "cpp", "h") for file in ENGINE.rglob(f"*.{kind}")):
        digest.update(file.relative_to(ENGINE).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def at_rate(scenario: Scenario, rate_rps: float, **changes: Any) -> Scenario:
    """The same scenario at another rate; `changes` are of its arrivals. Raises ScenarioError without a rate."""
    arrivals = scenario.arrivals
    if arrivals.process not in PROCESSES_WITH_RATE:
        raise ScenarioError(
            f"arrivals.process is {arrivals.process}, which has no rate_rps to search over; use one that has: "
            f"{', '.join(PROCESSES_WITH_RATE)}"
        )
    changed = arrivals.model_dump() | {"rate_rps": rate_rps} | changes
    return scenario.model_copy(update={"arrivals": type(arrivals)(**changed)})
