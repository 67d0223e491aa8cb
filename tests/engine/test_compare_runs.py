"""`sojourn compare` on real runs of our engine: the same system, again and again, is never called worse than itself.

One stream that decodes, several runs a side: two runs of the same engine on the same machine differ by some per cent of
every step (where a process happens to lie in memory, what else the host does), which no single run can tell. What a
planted slowdown comes to is held on simulated runs (tests/metrics/test_compare.py), whose noise is known.
"""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from loadgen.experiment import run_scenario
from metrics.compare_runs import compare_runs
from metrics.machine import company
from metrics.rundir import RunDirectory
from tests.loadgen.scenarios import scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # eight experiments of some ten seconds
RUNS, SIDE, REQUESTS, OUTPUT_TOKENS, MARGIN = 8, 4, 24, 128, 0.10


def experiment(folder: Path) -> RunDirectory:
    chosen = scenario(
        {"process": "concurrency", "in_flight": 1, "count": REQUESTS},
        [{"klass": "chat", "prompt_tokens": 64, "output_tokens": OUTPUT_TOKENS, "ignore_eos": True}],
        engine={"model": "tiny-model"}, measure={"seed": 5, "warmup_requests": 2},
        objectives=[{"ttft_ms": 500, "tpot_ms": 50, "source": "made up"}],
    )  # fmt: skip
    return run_scenario(chosen, folder)


def test_the_same_system_is_not_called_worse_than_itself_beyond_the_stated_confidence(tmp_path):
    """Every way to put half of the runs on one side, but for one of the two orders."""
    runs = []
    for number in range(RUNS):
        if busy := company():  # steps of a busy machine differ by more than anything that could be told
            pytest.skip(f"{busy}; run it on a quiet machine")
        runs.append(experiment(tmp_path / f"{number}"))
    chosen = [side for side in itertools.combinations(runs, SIDE) if runs[0] in side]
    told: Counter = Counter()
    for side in chosen:
        found = compare_runs(side, [run for run in runs if run not in side], margin=MARGIN)
        told[found.verdict] += 1
        told.update((each.metric, each.verdict) for each in found.metrics)
    print(told)
    assert told["worse"] <= 0.05 * len(chosen), told
    assert told["no worse"] > 0 and told["step_p50", "no worse"] >= 0.9 * len(chosen), told
