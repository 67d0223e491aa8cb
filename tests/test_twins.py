"""The benchmark that tells what telemetry costs: twin servers, and what is made of their turns."""

from itertools import pairwise

import numpy as np
import pytest

from tests.bench import overhead, twins, workloads
from tests.bench.results import BenchError


def a_twin(turns_ms: list[tuple[float, float]], text_ms: list[list[float]]) -> twins.Served:
    """By the clock of all of them; its own front took a tenth of each turn."""
    turns = [twins.Turn(round(b * 1e6), round(e * 1e6), {"front": (e - b) / 1e4, "core": 0.0}) for b, e in turns_ms]
    served = twins.Served(turns)
    served.text_ns = [served.own_ns(np.array(stamps) * 1e6) for stamps in text_ms]
    return served


def test_a_twins_own_time_stands_still_between_its_turns():
    served = a_twin([(10, 20), (50, 55), (60, 80)], [[12, 19, 51, 61, 63]])
    assert (served.text_ns[0] / 1e6).tolist() == [2, 9, 11, 16, 18]
    assert (served.own_ns([0, 30, 90 * 10**6]) / 1e6).tolist() == [0, 0, 35]
    assert served.gaps_ms()[0].tolist() == [7, 2], "not those in which the turn changed"
    assert served.cpu_seconds()["front"] == pytest.approx(0.0035)


def test_progress_counts_what_came_with_the_next_piece():
    at_ns, tokens = a_twin([(0, 100)], [[10, 20, 30, 40], [15, 35]]).progress(4)
    assert (at_ns / 1e6).tolist() == [10, 15, 20, 30, 35, 40] and tokens.tolist() == [1, 3, 4, 5, 7, 8]


@pytest.mark.parametrize("slower", [0.0, 0.02])
def test_overhead_finds_what_one_twin_is_slower_by_on_a_machine_that_is_slow_in_turns(slower):
    """The machine takes twice as long for a while, in the middle of the load; both meet that in their turns."""
    now, at, served = 0.0, {"full": 0.0, "off": 0.0}, {}
    turns, text = {name: [] for name in at}, {name: [] for name in at}
    dice = np.random.default_rng(0)
    for turn in range(400):
        for name in at:
            begin, end = now, now + dice.uniform(25, 75)
            step = (2 if 150 < turn < 250 else 1) * (1 + slower * (name == "full"))
            while now + step * (1 - at[name]) < end:
                now += step * (1 - at[name])
                at[name] = 0.0
                text[name].append(now)
            at[name] += (end - now) / step
            now = end
            turns[name].append((begin, end))
    for name in at:
        count = len(text[name]) // 128
        served[name] = a_twin(turns[name], np.array(text[name][: count * 128]).reshape(-1, 128).tolist())
    loads = overhead.loads_of(served, 1, 128)
    found = overhead.costs([loads["full"]], [loads["off"]])
    assert list(found) == list(overhead.COLUMNS)
    lost, step_us = found["tokens/s lost, %"], found["us a step"]
    assert lost.low <= 100 * slower / (1 + slower) <= lost.high and lost.high - lost.low < 4
    assert lost.median == pytest.approx(100 * slower, abs=0.5)
    assert step_us.median == pytest.approx(1.3e3 * slower, abs=8)
    assert found["p50 ITL gained, %"].median == pytest.approx(100 * slower, abs=0.2)
    assert found["front, us a step"].median == pytest.approx(130 * slower, abs=2)


@pytest.mark.slow
def test_twins_serve_the_same_requests_in_turns():
    workload = workloads.streams(6, 16, 24, seed=1, vocabulary=2500)
    settings = {"max_model_len": 64, "num_kv_blocks": 64}
    with twins.Twins("tiny-model", settings, {"full": "full", "off": "off"}) as both:
        served = both.serve(workload, 3, turn_seconds=0.02)
    for name, each in served.items():
        assert len(each.turns) > 2 and all(turn.begin_ns < turn.end_ns for turn in each.turns)
        assert len(each.text_ns) == 6 and all(np.all(np.diff(stamps) >= 0) for stamps in each.text_ns), name
        assert each.cpu_seconds()["core"] > 0 < each.cpu_seconds()["front"]
    ordered = sorted((turn.begin_ns, turn.end_ns) for each in served.values() for turn in each.turns)
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(ordered)), "one at a time"
    loads = overhead.loads_of(served, 3, 24)
    assert loads["off"].steps == pytest.approx(48, rel=0.2)


def test_twins_that_cannot_start_say_why(tmp_path):
    with pytest.raises(BenchError, match="did not start"), twins.Twins(str(tmp_path), {}, {"full": "full"}):
        pass
