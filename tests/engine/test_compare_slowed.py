"""`sojourn compare` on real runs of our engine: the same system twice, and one with a tenth of its steps slowed.

One stream that decodes: steps that are all alike, so that a fifth more of some can be seen. Two runs of the same engine
on the same machine differ by some per cent of every step (where a process happens to lie in memory, what else the
host does), which no single run can tell: so several runs stand on a side, and what is asked is a difference of 10 %.
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]  # a dozen experiments of some ten seconds
SAME, SLOWED, SIDE, REQUESTS, OUTPUT_TOKENS = 8, 4, 4, 24, 128
MARGIN = 0.10
ROOT = Path(__file__).parents[2]


def experiment(folder: Path) -> RunDirectory:
    chosen = scenario(
        {"process": "concurrency", "in_flight": 1, "count": REQUESTS},
        [{"klass": "chat", "prompt_tokens": 64, "output_tokens": OUTPUT_TOKENS, "ignore_eos": True}],
        engine={"model": "tiny-model"}, measure={"seed": 5, "warmup_requests": 2},
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
        found = compare_runs(a, b, margin=MARGIN)
        told[found.verdict] += 1
        told.update((each.metric, each.verdict) for each in found.metrics)
    print(told)
    return told


def test_the_same_system_is_not_worse_than_itself_at_the_stated_confidence(sides):
    """Every way to put half of its runs on one side, but for one of the two orders."""
    chosen = [side for side in itertools.combinations(sides[0], SIDE) if sides[0][0] in side]
    told = tally((side, [run for run in sides[0] if run not in side]) for side in chosen)
    assert told["worse"] <= 0.05 * len(chosen), told
    assert told["no worse"] >= 20, told


def test_a_tenth_of_the_steps_slowed_by_a_fifth_is_worse(sides):
    chosen = list(itertools.combinations(sides[0], SIDE))[::3]
    told = tally((side, sides[1]) for side in chosen)
    assert told["worse"] >= 0.9 * len(chosen), told
