"""What is known of every run: what the load generator recorded, the settings, and the machines."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from sojourn.diagnosis.evidence_level import Level
from sojourn.diagnosis.sensor_facts import SensorFacts
from sojourn.diagnosis.stop_facts import NO_STOPS, Stops
from sojourn.metrics.compute.machine_facts import MachineFacts
from sojourn.metrics.machine.steal import Steal
from sojourn.metrics.request.objectives import objectives_of

VARIED = 1.5  # coefficient of variation of the gaps; Poisson arrivals have 1, and 200 of them stay below 1.3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)  # it equals only itself
class Client:
    """One run in the client's numbers; each other kind of evidence has them, too. `rows` is `goodput.judged` of the
    measured requests."""

    name: str
    path: str
    scenario: str
    meta: dict[str, Any]
    objectives: list[dict[str, Any]]
    engine: dict[str, Any]  # the settings in force, as far as they are known
    chosen: frozenset[str]  # the settings that the scenario or the command line names; the others are defaults
    rows: pd.DataFrame
    sent: int
    served: int
    errors: dict[str, int]  # of the requests that were not served: what they ended with → how many
    offered_rps: float  # NaN where all requests were due at once: such a run offers no rate
    arrivals: "Arrivals | None"  # None for fewer than three requests, and in a closed loop
    lag_p90_ms: float | None
    served_rps: float | None  # over the whole run: the server can do so much at least; None for a few requests
    declared_shared_share: float  # of the prompt tokens, what the scenario says is alike between requests
    scraped: bool  # whether the server had a /metrics at all
    level: Level  # what was read
    measured_by: Literal["client", "server"]  # whose stamps `rows` has; a server alone knows no network
    steal: Steal | None  # None where nothing sampled the server's machine, or its kernel does not count
    machine: MachineFacts | None  # who had the CPUs
    sensors: SensorFacts | None = None  # of the GPUs and the host, while requests were in flight
    stops: Callable[[], Stops] = lambda: NO_STOPS  # in which the server stood, as clients and scrapes tell together

    @property
    def token_budget(self) -> int | None:
        """Tokens that a step may hold."""
        setting = self.engine.get("max_num_batched_tokens")
        return setting if isinstance(setting, int) else None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How the gaps between due times vary: `cv` over the whole run, `local_cv` around the mean gap of the stretch that
    they are in. Bursts are in both; a rate that rises or has peaks is in `cv` alone."""

    cv: float
    local_cv: float
    peak_rps: float  # of the busiest stretch

    @property
    def varied(self) -> bool:
        return self.cv >= VARIED

    @property
    def bursty(self) -> bool:
        return self.varied and self.local_cv >= VARIED


def tightest(facts: Client, objective: str) -> float | None:
    """The smallest bound that any class of this run has for an objective, in ms."""
    bounds = [objectives_of(klass, facts.objectives).get(objective) for klass in facts.rows.klass.unique()]
    return min((bound for bound in bounds if bound is not None), default=None)


def declared_classes(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """The classes of requests in the scenario; [] where it names none."""
    scenario = meta.get("scenario") if isinstance(meta.get("scenario"), dict) else {}
    return (scenario.get("workload") or {}).get("classes") or []
