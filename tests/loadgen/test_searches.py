"""Sweeps and capacity searches with real runs against a scripted server: kept when cut short, gone on with, refused."""

import numpy as np
import pytest

from loadgen.capacity import CapacityPlan, find_capacity
from loadgen.points import Target, at_rate
from loadgen.processes import ExperimentError
from loadgen.scenario_faults import ScenarioError
from loadgen.schedule import build_schedule
from loadgen.search_folder import SearchFolder
from loadgen.sweep import SweepPlan, rate_grid, rate_list, run_sweep
from metrics.goodput import after_warmup
from metrics.objectives import parse_bounds
from metrics.rundir import RunDirectory, RunError
from metrics.search import Goal
from metrics.search_file import read_search
from tests.loadgen.scenarios import scenario
from tests.loadgen.scripted_server import Script, ScriptedServer
from tests.metrics.search_documents import point

SHORT = {"process": "poisson", "rate_rps": 1, "count": 12}


def sweep(url: str, **changes) -> SweepPlan:
    given = {"scenario": scenario(SHORT), "rates_rps": (20.0, 40.0), "repeats": 1, "seed": 7,
             "target": Target(base_url=url)}  # fmt: skip
    return SweepPlan(**given | changes)


@pytest.mark.slow  # four experiments
def test_an_interrupted_sweep_keeps_finished_runs_and_goes_on_with_the_others(tmp_path):
    server, told = ScriptedServer(Script()).start(), []

    def interrupt_second(progress) -> None:
        if len(told) == 2 and progress.sent:
            raise KeyboardInterrupt

    plan = sweep(server.url)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(plan, tmp_path / "s", on_point=lambda *told_now: told.append(told_now), progress=interrupt_second)
    kept = read_search(tmp_path / "s" / "sweep.json").points
    assert [made.rate_rps for made in kept] == [20.0] and told == [(1, 2, 20.0), (2, 2, 40.0)]
    asked = len(server.seen)
    search = run_sweep(plan, tmp_path / "s", on_point=lambda *told_now: told.append(told_now), progress=lambda _: None)
    assert told[2:] == [(2, 2, 40.0)] and len(server.seen) == asked + 12
    assert search.points[0] == kept[0] and [made.seed for made in search.points] == [7, 8]
    for made in search.points:
        assert made.valid and made.sent == 12 and made.attainment == 1
        run = RunDirectory.open(tmp_path / "s" / made.run)
        assert run.meta()["scenario"]["arrivals"]["rate_rps"] == made.rate_rps
    before = len(server.seen)
    assert run_sweep(plan, tmp_path / "s", on_point=lambda *_: None, progress=lambda _: None).points == search.points
    assert len(server.seen) == before, "a finished sweep sends nothing"
    with pytest.raises(ExperimentError, match=r"holds another sweep: seed is 7 there and 8 here"):
        run_sweep(sweep(server.url, seed=8), tmp_path / "s", on_point=lambda *_: None, progress=lambda _: None)


@pytest.mark.slow  # three experiments
def test_a_search_of_a_server_that_only_fails_ends_with_no_rate_and_goes_on_from_disk(tmp_path):
    server, asked = ScriptedServer(Script(status=500)).start(), []
    goal = Goal(start_rps=80, lowest_rps=40, most_trials=1)
    plan = CapacityPlan(scenario(SHORT), goal, 0.1, 20, 1, Target(base_url=server.url))

    def tell(number, proposal, known) -> None:
        asked.append((number, proposal.rate_rps, proposal.warm_up))

    outcome = find_capacity(plan, tmp_path / "c", on_trial=tell, progress=lambda _: None)
    assert not outcome.resolved and "1 trials were not enough" in outcome.reason
    assert asked == [(1, 80, True), (2, 80, False)]
    more = CapacityPlan(scenario(SHORT), Goal(start_rps=80, lowest_rps=40), 0.1, 20, 1, Target(base_url=server.url))
    outcome = find_capacity(more, tmp_path / "c", on_trial=tell, progress=lambda _: None)
    assert asked[2:] == [(3, 40, False)] and not outcome.resolved and outcome.meets_rps is None
    assert outcome.misses_rps == 40 and "no rate down to 40" in outcome.reason
    assert read_search(tmp_path / "c" / "capacity.json").result["resolved"] is False


def test_a_folder_keeps_finished_points_removes_what_was_cut_short_and_refuses_another_plan(tmp_path):
    plan = {"rates_rps": [2.0, 4.0], "scenario": {"name": "chat"}, "repeats": 1}
    first = SearchFolder(tmp_path / "s", "sweep", plan)
    first.write()
    for name in ("rate-2-1", "rate-4-1", "notes"):
        (tmp_path / "s" / name).mkdir()
    first.add(point(2, 1.0))
    again = SearchFolder(tmp_path / "s", "sweep", plan)
    assert again.points == [point(2, 1.0)] == read_search(tmp_path / "s" / "sweep.json").points
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["notes", "rate-2-1", "sweep.json"]
    with pytest.raises(ExperimentError, match=r'scenario.name is "chat" there and "code" here'):
        SearchFolder(tmp_path / "s", "sweep", plan | {"scenario": {"name": "code"}})
    with pytest.raises(ExperimentError, match="not empty and holds no capacity"):
        SearchFolder(tmp_path / "s", "capacity", plan)
    (tmp_path / "s" / "sweep.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        SearchFolder(tmp_path / "s", "sweep", plan)


def test_a_trial_is_long_enough_and_its_begin_is_not_counted():
    plan = CapacityPlan(scenario(SHORT), Goal(), 20.0, 100, 1, Target())
    for rate, counted in ((1.0, 100), (50.0, 1000)):
        schedule = build_schedule(plan.trial(rate), 1, "t")
        due_ns = np.array([request.due_offset_ns for request in schedule])
        measured = after_warmup(due_ns, plan.trial(rate).measure.warmup_s, 0).sum()
        assert len(schedule) == pytest.approx(counted / 0.75, abs=1) and measured == pytest.approx(counted, rel=0.1)


def test_only_a_process_with_a_rate_can_be_searched():
    assert at_rate(scenario(SHORT), 3.5).arrivals.rate_rps == 3.5
    with pytest.raises(ScenarioError, match="at_once, which has no rate_rps"):
        at_rate(scenario({"process": "at_once", "count": 3}), 3.5)


def test_rates_are_a_grid_or_a_list_and_wrong_ones_are_explained():
    assert rate_grid(1, 32, 6, "log") == (1, 2, 4, 8, 16, 32) and rate_grid(1, 4, 4, "linear") == (1, 2, 3, 4)
    assert rate_list("1,2.5") == (1, 2.5)
    for wrong, says in (
        (lambda: rate_grid(4, 1, 6, "log"), "--rate-from 4"), (lambda: rate_grid(1, 4, 1, "log"), "--points is 1"),
        (lambda: rate_list("1,x"), "'x'"), (lambda: rate_list("1,-2"), "'-2'"), (lambda: rate_list("2,2"), "--repeats"),
        (lambda: rate_list("nan"), "'nan'"),
    ):  # fmt: skip
        with pytest.raises(ScenarioError, match=says):
            wrong()


def test_objectives_on_the_command_line_are_those_of_vllm_and_wrong_ones_are_explained():
    assert parse_bounds("ttft:500 tpot:50, e2el:9000") == {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 9000}
    for wrong, says in (("itl:5", "names no latency"), ("ttft:0", "above 0"), ("ttft", "above 0"), ("", "no objective"),
                        ("ttft:1 ttft:2", "twice"), ("ttft:inf", "above 0"), ("ttft:nan", "above 0")):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            parse_bounds(wrong)
