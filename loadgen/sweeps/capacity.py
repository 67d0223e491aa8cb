"""`sojourn capacity`: drives the search of loadgen/search/bisection.py with real runs, one a trial, kept on disk."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.run.experiment import OnProgress
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.search import bisection
from sojourn.loadgen.sweeps.folder import OnNote, SearchFolder
from sojourn.loadgen.sweeps.run_point import Target, at_rate, with_sessions

UNCOUNTED = 0.25  # share of a trial at its start, until the queues have filled
# Number of the trial, from 1; what it is; what is known.
OnTrial = Callable[[int, bisection.Proposal, list[bisection.Judgement]], None]


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A trial lasts at least `trial_s` and counts at least `trial_requests`."""

    scenario: Scenario
    goal: bisection.Goal
    trial_s: float
    trial_requests: int
    seed: int
    target: Target

    def document(self) -> dict[str, Any]:
        """The identity of the search. The number of trials is no part of it: a search can resume with more."""
        goal = msgspec.structs.asdict(self.goal)
        fixed = {name: value for name, value in goal.items() if not name.startswith("most_")}
        if self.goal.unit == bisection.REQUESTS_PER_S:
            del fixed["unit"]  # a search of an older version goes on
        return {
            "scenario": self.scenario.model_dump(mode="json"), "goal": fixed, "trial_s": self.trial_s,
            "trial_requests": self.trial_requests, "seed": self.seed, **self.target.document(),
        }  # fmt: skip

    def trial(self, rate_rps: float) -> Scenario:
        """The scenario of one trial at this rate; its warm-up is not counted.

        Arrivals at the edge of the warm-up may count or not, so that the number of counted requests varies a little.
        """
        if self.goal.unit == bisection.SESSIONS:
            return self._of_sessions(int(rate_rps))
        counted = max(self.trial_requests, math.ceil(self.trial_s * rate_rps))
        count = math.ceil(counted / (1 - UNCOUNTED))
        timed = at_rate(self.scenario, rate_rps, count=count, duration_s=None)
        warmup_s = min((count - counted) / rate_rps, 86_400.0)
        measure = self.scenario.measure.model_copy(update={"warmup_s": warmup_s})
        return timed.model_copy(update={"measure": measure})

    def _of_sessions(self, sessions: int) -> Scenario:
        """A closed loop for so long. Each slot begins within the warm-up, and has as many sessions as it can take."""
        whole_s = self.trial_s / (1 - UNCOUNTED)
        warmup_s = whole_s - self.trial_s
        spread = {"start_over_s": warmup_s} if self.scenario.arrivals.process == "users" else {}
        timed = with_sessions(self.scenario, sessions, count=None, duration_s=whole_s, **spread)
        measure = self.scenario.measure.model_copy(update={"warmup_s": warmup_s})
        return timed.model_copy(update={"measure": measure})

    def doubts(self) -> list[str]:
        """Warnings before the search: about its target, and about trials too short to decide alone."""
        known, fewest = self.target.doubts(self.scenario), bisection.fewest_to_meet(self.goal)
        if self.goal.unit == bisection.SESSIONS or self.trial_requests >= fewest:
            return known
        return [
            *known,
            f"a trial counts {self.trial_requests} requests where the rate is low, and to be sure that a rate keeps "
            f"{self.goal.attainment:.0%} takes {fewest} independent ones at least, all good: each rate will be tried "
            f"{math.ceil(fewest / self.trial_requests)} times or more. --requests {fewest} needs fewer trials",
        ]


def find_capacity(
    plan: CapacityPlan, folder: Path, *, on_trial: OnTrial, progress: OnProgress, on_note: OnNote = lambda _: None
) -> bisection.Outcome:
    """Searches until `next_trial` returns an outcome. An interrupted search keeps every finished trial.

    Raises ScenarioError for a scenario without a rate, and ExperimentError.
    """
    try:
        plan.trial(plan.goal.start_rps)
    except ValueError as error:
        raise ScenarioError(str(error)) from None
    with SearchFolder(folder, "capacity", plan.document()) as search:
        search.resume(on_note)
        while True:
            trials = [point.trial() for point in search.points]
            step = bisection.next_trial(trials, plan.goal)
            if isinstance(step, bisection.Outcome):
                search.finish(msgspec.to_builtins(step))
                return step
            on_trial(len(trials) + 1, step, bisection.judgements(trials, plan.goal))
            rate = step.rate_rps
            repeat = 1 + sum(point.rate_rps == rate for point in search.points)
            scenario, path, seed = plan.trial(rate), search.run_path(rate, repeat), search.next_seed()
            point = plan.target.measure(
                scenario,
                path,
                progress,
                rate_rps=rate,
                repeat=repeat,
                seed=seed,
                warm_up=step.warm_up,
                unit=plan.goal.unit,
            )
            trials.append(point.trial())
            sentence = bisection.trial_sentence(trials[-1], bisection.judgements(trials, plan.goal), plan.goal.unit)
            search.add(point, on_note, f"trial {len(trials)}: {sentence}")
