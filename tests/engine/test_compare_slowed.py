"""`sojourn compare` on real runs of our engine: the same system twice, and one with a tenth of its steps slowed.

Every pair of the runs of a side is compared: seven runs of the same system give 21 comparisons of it with itself.
"""

import itertools
import os
from collections import Counter
from pathlib import Path

import pytest

from loadgen.experiment import run_scenario
from metrics.compare_runs import compare_runs
from metrics.machine import company
from metrics.rundir import RunDirectory
from tests.engine.planted import SITE
from tests.loadgen.scenarios import scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]  # ten experiments of half a minute
SAME, SLOWED, REQUESTS, RATE_RPS = 7, 3, 200, 8.0
ROOT = Path(__file__).parents[2]


def experiment(folder: Path) -> RunDirectory:
    chosen = scenario(
        {"process": "poisson", "rate_rps": RATE_RPS, "count": REQUESTS},
        [{"klass": "chat", "prompt_tokens": 64, "output_tokens": 32, "ignore_eos": True}],
        engine={"model": "tiny-model", "threads": 1}, measure={"seed": 5, "warmup_s": 3},
        objectives=[{"ttft_ms": 500, "tpot_ms": 50, "source": "made up"}],
    )  # fmt: skip
    return run_scenario(chosen, folder)


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> tuple[list[RunDirectory], list[RunDirectory]]:
    """Runs of the engine as it is and of the slowed one, in turns."""
    folder, same, slowed = tmp_path_factory.mktemp("compare"), [], []
    for number in range(SAME):
        if busy := company():  # steps of a busy machine differ by more than anything that is planted here
            pytest.skip(f"{busy}; run it on a quiet machine")
        same.append(experiment(folder / f"same-{number}"))
        if number < SLOWED:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]))
                patch.setenv("SOJOURN_STRETCH", "10:0.2")
                slowed.append(experiment(folder / f"slowed-{number}"))
    return same, slowed


def tally(pairs) -> Counter:
    """Verdicts, and of which metrics; what was found is in the message of a test that fails."""
    told: Counter = Counter()
    for a, b in pairs:
        found = compare_runs([a], [b])
        told[found.verdict] += 1
        told.update((each.metric, each.verdict) for each in found.metrics)
    return told


def test_two_runs_of_the_same_system_are_not_worse_at_the_stated_confidence(sides):
    told = tally(itertools.combinations(sides[0], 2))
    print(told)
    assert told["worse"] <= 1, told
    assert told["no worse"] >= 20, told


def test_a_tenth_of_the_steps_slowed_by_a_fifth_is_worse(sides):
    told = tally(itertools.product(sides[0], sides[1]))
    print(told)
    assert told["worse"] >= 20, told


def test_several_runs_a_side_tell_it_too(sides):
    same, slowed = sides
    found = compare_runs(same[:3], slowed, metrics=["step_p50", "step_p95"])
    print(found)
    assert found.verdict == "worse", found
