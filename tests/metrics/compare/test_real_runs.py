"""`sojourn compare` on real runs of our engine: the same system again and again, and one with slowed steps.

One stream that decodes, several runs a side. Two runs of the same engine on the same machine differ by some per cent of
every step (where a process happens to lie in memory, what else the host does), which no single run can tell: so the
margin of every time is 25 %. A step that sticks out alone is told against those around it, to 2.5 %. What other
machines took is left out.
"""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sojourn.loadgen.run.experiment import run_scenario
from sojourn.metrics.compare.runs import compare_runs
from sojourn.metrics.compare.samples import read_run
from sojourn.metrics.compare.steal import undisturbed_requests
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server.planted import SITE
from tests.loadgen.scenarios import scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]  # up to ATTEMPTS experiments of some fifteen seconds
SAME, SLOWED, SIDE, ATTEMPTS, REPEATS, REQUESTS, OUTPUT_TOKENS = 24, 12, 12, 100, 20, 32, 128
MARGIN, MARGINS, MAX_STEAL = 0.25, {"steady_steps": 0.025}, 0.02
FEWEST = 0.25  # of the requests of a run, which is else measured again
ROOT = Path(__file__).parents[3]


def experiment(folder: Path) -> RunDirectory | None:
    """None where other machines took part of this one nearly all the while."""
    chosen = scenario(
        {"process": "concurrency", "in_flight": 1, "count": REQUESTS},
        [{"klass": "chat", "prompt_tokens": 64, "output_tokens": OUTPUT_TOKENS, "ignore_eos": True}],
        engine={"model": "tiny-model"}, measure={"seed": 5, "warmup_requests": 2},
        objectives=[{"ttft_ms": 500, "tpot_ms": 50, "source": "made up"}],
    )  # fmt: skip
    whole = read_run(run_scenario(chosen, folder))
    try:
        ((kept,),) = undisturbed_requests([[whole]], 100 * MAX_STEAL)
    except InputError:
        return None
    return whole.run if len(kept.requests) >= FEWEST * len(whole.requests) else None


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[list[RunDirectory], list[RunDirectory]]:
    """Of the engine as it is, and of the slowed one, in turns."""
    folder, same, slowed = tmp_path_factory.mktemp("compare"), [], []
    for number in range(ATTEMPTS):
        with pytest.MonkeyPatch.context() as patch:
            if is_slowed := len(slowed) < len(same) * SLOWED // SAME:
                patch.setenv("PYTHONPATH", os.pathsep.join([str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]))
                patch.setenv("SOJOURN_STRETCH", "10:0.2")
            if (run := experiment(folder / f"{number}")) is not None:
                (slowed if is_slowed else same).append(run)
        if len(same) == SAME and len(slowed) == SLOWED:
            return same, slowed
    pytest.skip(f"other machines took CPU time in all but {len(same) + len(slowed)} of {ATTEMPTS} runs")


def tally(pairs) -> Counter:
    """Verdicts, and of which metrics; what was found is in the message of a test that fails."""
    told: Counter = Counter()
    for a, b in pairs:
        found = compare_runs(a, b, margin=MARGIN, margins=MARGINS, max_steal=MAX_STEAL)
        told[found.verdict] += 1
        told.update((each.metric, each.verdict) for each in found.metrics)
        if told.total() == 1 + len(found.metrics):  # of the first draw also how much
            print([(each.metric, each.ratio, each.low, each.high) for each in found.metrics])
    print(told)
    return told


def draws(same: list[RunDirectory]):
    """Each time the runs of the same engine in another order."""
    random = np.random.default_rng(0)
    for _ in range(REPEATS):
        yield [same[place] for place in random.permutation(SAME)]


def test_the_same_system_is_no_worse_than_itself(runs):
    told = tally((drawn[:SIDE], drawn[SIDE:]) for drawn in draws(runs[0]))
    assert told["worse"] == 0 and told["no worse"] >= 0.95 * REPEATS, told


def test_a_tenth_of_the_steps_slowed_by_a_fifth_is_worse(runs):
    told = tally((drawn[:SIDE], runs[1]) for drawn in draws(runs[0]))
    assert told["worse"] >= 0.95 * REPEATS, told
