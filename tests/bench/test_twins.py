"""The benchmark that tells what telemetry costs: twin servers, and what is made of their turns."""

import io
import re
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from bench import overhead, twins, workloads
from bench.results import BenchError, Report, read_report, write_report


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
    assert served.cpu_us(np.array([0, 5e6, 15e6, 35e6]))["front"].tolist() == pytest.approx([0, 500, 1500, 3500])


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
    count = min(map(len, text.values())) // 128
    for name in at:
        served[name] = a_twin(turns[name], np.array(text[name][: count * 128]).reshape(-1, 128).tolist())
    loads = {name: overhead.load_of(each, 1, 128) for name, each in served.items()}
    found = overhead.costs([loads["full"]] * 2, [loads["off"]] * 2)
    assert set(found) == set(overhead.COLUMNS)
    lost, step_us = found["tokens/s lost, %"], found["us a step"]
    assert lost.low <= 100 * slower / (1 + slower) <= lost.high and lost.high - lost.low < 4
    assert lost.value == pytest.approx(100 * slower, abs=0.5)
    assert step_us.value == pytest.approx(1.3e3 * slower, abs=8)
    assert found["p50 ITL gained, %"].value == pytest.approx(100 * slower, abs=0.2)
    assert found["front, us a step"].value == pytest.approx(130 * slower, abs=2)


@pytest.mark.slow
def test_twins_serve_the_same_requests_in_turns(tmp_path):
    workload = workloads.streams(6, 16, 24, seed=1, vocabulary=2500)
    settings = {"max_model_len": 64, "num_kv_blocks": 64}
    with twins.Twins("tiny-model", settings, overhead.TELEMETRY) as both:
        served = both.serve(workload, 3, turn_seconds=0.02)
    for name, each in served.items():
        assert len(each.turns) > 2 and all(turn.begin_ns < turn.end_ns for turn in each.turns)
        assert len(each.text_ns) == 6 and all(np.all(np.diff(stamps) >= 0) for stamps in each.text_ns), name
    ordered = sorted((turn.begin_ns, turn.end_ns) for each in served.values() for turn in each.turns)
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(ordered)), "one at a time"
    report = Report("overhead", "t", "c", "d", {}, {})
    loads = {name: overhead.load_of(each, 3, 24) for name, each in served.items()}
    for name, load in loads.items():
        assert load.steps == pytest.approx(48) and min(taken.sum() for taken in load.cpu_us.values()) > 0
        report.at(name, "c=3").add(overhead.figures_of(load, 3, 24, 1.5))
    report.at("full", "c=3").facts = overhead.facts_of([loads["full"]], [loads["off"]])
    write_report(report, tmp_path / "report.json")
    console = Console(width=300, file=io.StringIO())
    console.print(overhead.table(read_report(tmp_path / "report.json"), [3]))
    cell = r" +[+-][\d.,]+ \([+-][\d.,]+ to [+-][\d.,]+\) │"
    assert re.search(rf"c=3 │ full │ +[\d,.]+ │ +1.5 │({cell}){{6}}", console.file.getvalue())


def test_turns_that_are_shorter_than_a_step_are_refused():
    short = a_twin([(0, 1), (2, 3), (4, 5)], [[0.5, 2.5, 4.5]])
    with pytest.raises(BenchError, match="--turn-ms"):
        overhead.load_of(short, 1, 3)


def test_twins_that_cannot_start_say_why(tmp_path):
    with pytest.raises(BenchError, match="did not start"), twins.Twins(str(tmp_path), {}, {"full": overhead.FULL}):
        pass
