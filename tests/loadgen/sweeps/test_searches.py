"""Sweeps and capacity searches with real runs against a scripted server: kept when cut short, gone on with, refused."""

import msgspec
import numpy as np
import psutil
import pytest

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.search.bisection import Goal, judge
from sojourn.loadgen.search.points import read_search
from sojourn.loadgen.sweeps.capacity import CapacityPlan, find_capacity
from sojourn.loadgen.sweeps.folder import SearchFolder
from sojourn.loadgen.sweeps.run_point import Target, at_rate
from sojourn.loadgen.sweeps.sweep import SweepPlan, rate_grid, rate_list, run_sweep
from sojourn.metrics.errors import ExperimentError, RunDataError
from sojourn.metrics.request.goodput import after_warmup
from sojourn.metrics.request.objectives import parse_bounds
from sojourn.metrics.run.directory import RunDirectory
from tests.loadgen.scenarios import scenario
from tests.loadgen.scripted_server import Script, ScriptedServer
from tests.loadgen.search.search_documents import point

SHORT = {"process": "poisson", "rate_rps": 1, "count": 12}


def sweep(url: str, **changes) -> SweepPlan:
    given = {"scenario": scenario(SHORT), "rates_rps": (20.0, 40.0), "repeats": 1, "seed": 7,
             "target": Target(base_url=url)}  # fmt: skip
    return SweepPlan(**given | changes)


@pytest.mark.server
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
    plan = sweep(server.url, target=Target(base_url=server.url, processes=2))
    search = run_sweep(plan, tmp_path / "s", on_point=lambda *told_now: told.append(told_now), progress=lambda _: None)
    assert told[2:] == [(2, 2, 40.0)] and len(server.seen) == asked + 12
    assert search.points[0] == kept[0] and [made.seed for made in search.points] == [7, 9], "8 was cut short"
    for made in search.points:
        assert made.valid and made.sent == 12 and made.attainment == 1
        run = RunDirectory.open(tmp_path / "s" / made.run)
        assert run.meta()["scenario"]["arrivals"]["rate_rps"] == made.rate_rps
    assert len(RunDirectory.open(tmp_path / "s" / search.points[1].run).meta()["load_processes"]) == 2
    before = len(server.seen)
    assert run_sweep(plan, tmp_path / "s", on_point=lambda *_: None, progress=lambda _: None).points == search.points
    assert len(server.seen) == before, "a finished sweep sends nothing"
    with pytest.raises(ExperimentError, match=r"holds another sweep: seed is 7 there and 8 here"):
        run_sweep(sweep(server.url, seed=8), tmp_path / "s", on_point=lambda *_: None, progress=lambda _: None)


@pytest.mark.server
@pytest.mark.slow  # four experiments
def test_a_search_of_a_server_that_only_fails_ends_with_its_error_and_begins_anew(tmp_path):
    server, asked, notes = ScriptedServer(Script(status=500)).start(), [], []
    goal = Goal(start_rps=80, lowest_rps=40, most_trials=1)
    plan = CapacityPlan(scenario(SHORT), goal, 0.1, 20, 1, Target(base_url=server.url))

    def tell(number, proposal, known) -> None:
        asked.append((number, proposal.rate_rps, proposal.warm_up))

    outcome = find_capacity(plan, tmp_path / "c", on_trial=tell, progress=lambda _: None, on_note=notes.append)
    assert not outcome.resolved and ": HTTP 500" in outcome.reason and "most often: HTTP 500" in notes[1]
    assert notes[0].startswith("trial 1: 0 of ") and notes[2].endswith("misses")
    assert asked == [(1, 80, True), (2, 80, False)]
    server.script.status = 200
    outcome = find_capacity(plan, tmp_path / "c", on_trial=tell, progress=lambda _: None, on_note=notes.append)
    assert notes[4] == "2 gave no result and are measured again"
    assert asked[2:] == [(1, 80, True), (2, 80, False)] and "1 trials were not enough" in outcome.reason
    found = read_search(tmp_path / "c" / "capacity.json")
    assert found.result["resolved"] is False and [each.seed for each in found.points] == [3, 4], "never a seed twice"


@pytest.mark.slow  # starts our engine
def test_a_server_that_dies_of_its_load_is_a_point_of_the_search_and_a_miss(tmp_path):
    def kill(progress) -> None:
        for child in psutil.Process().children() if progress.sent else ():
            if child.status() != psutil.STATUS_ZOMBIE and "serve" in child.cmdline():
                child.kill()

    chosen = scenario({"process": "poisson", "rate_rps": 5, "count": 40}, engine={"model": "tiny-model"})
    died = Target().measure(chosen, tmp_path / "run", kill, rate_rps=5, repeat=1, seed=1)
    assert died.died and not died.valid and died.sent == 40 > died.completed
    assert judge([died.trial()], Goal()).verdict == "misses" and "exit code -9 during the run" in died.trial().error


def new_folder(folder, plan, kind: str = "sweep") -> SearchFolder:
    """One that is closed at once: what it found remains."""
    with SearchFolder(folder, kind, plan) as held:
        return held


def test_a_folder_keeps_finished_points_only_and_refuses_another_plan(tmp_path):
    plan = {"rates_rps": [2.0, 4.0], "scenario": {"name": "chat"}, "repeats": 1, "versions": {"torch": "2.6"}}
    with SearchFolder(tmp_path / "s", "sweep", plan) as first:
        first.write()
        for name in ("rate-2-1", "rate-4-1", "notes"):
            (tmp_path / "s" / name).mkdir()
        first.add(point(2, 1.0))
        with pytest.raises(ExperimentError, match="another sweep is under way in"):
            SearchFolder(tmp_path / "s", "sweep", plan)
    again = new_folder(tmp_path / "s", plan)
    assert again.points == [point(2, 1.0)] == read_search(tmp_path / "s" / "sweep.json").points
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["notes", "rate-2-1", "sweep.json"]
    with pytest.raises(ExperimentError, match=r'scenario.name is "chat" there and "code" here'):
        new_folder(tmp_path / "s", plan | {"scenario": {"name": "code"}})
    with pytest.raises(ExperimentError, match=r'versions.torch is "2.6" there and "2.7" here; choose another folder'):
        new_folder(tmp_path / "s", plan | {"versions": {"torch": "2.7"}})
    with pytest.raises(ExperimentError, match="not empty and holds no capacity"):
        new_folder(tmp_path / "s", plan, "capacity")
    with pytest.raises(ExperimentError, match="cannot be used"):
        new_folder(tmp_path / "s" / "sweep.json", plan)
    (tmp_path / "s" / "sweep.json").write_text("{")
    with pytest.raises(RunDataError, match="cannot be read"):
        new_folder(tmp_path / "s", plan)


def test_a_finished_sweep_says_that_it_measured_nothing_and_how_to_measure_again(tmp_path):
    plan, notes = sweep("http://127.0.0.1:1"), []
    with SearchFolder(tmp_path / "s", "sweep", plan.document()) as held:
        for rate in plan.rates_rps:
            held.add(msgspec.structs.replace(point(rate, 1.0), begun_unix_ns=1_760_000_000_000_000_000))
    kept = run_sweep(plan, tmp_path / "s", on_point=None, progress=None, on_note=notes.append)
    assert [made.rate_rps for made in kept.points] == [20, 40]
    assert notes[0].startswith("2 of 2 runs kept from 2025-10-0") and f"remove {tmp_path / 's'} and" in notes[0]
    assert "give another --seed" in notes[0], "a server that runs has seen the prompts"


def test_points_that_tell_nothing_are_measured_again(tmp_path):
    """Not valid, or of a search in which nothing was ever served; where the server died, that is a result."""
    plan = {"seed": 5}
    spoilt = point(4, 1.0, valid=False)
    died = msgspec.structs.replace(point(8, 0.5, valid=False), died=True)
    with SearchFolder(tmp_path / "s", "sweep", plan) as held:
        assert [held.next_seed(), held.next_seed()] == [5, 6]
        for each in (point(2, 1.0), spoilt, died):
            held.add(each)
    again = new_folder(tmp_path / "s", plan)
    assert again.points == [point(2, 1.0), died] and "1 gave no result and are measured again" in again.earlier_runs(3)
    assert again.next_seed() == 7, "the server has seen the prompts of the seeds before"
    with SearchFolder(tmp_path / "t", "sweep", plan) as held:
        held.add(msgspec.structs.replace(point(2, 0.0), completed=0))
    assert new_folder(tmp_path / "t", plan).points == []


def test_the_same_search_is_of_the_same_machine_programs_and_engine():
    ours, theirs = Target(engine_overrides={"block_size": 8}), Target(base_url="http://127.0.0.1:1")
    for target in (ours, theirs):
        told = target.document()
        assert told["versions"]["python"] and told["hardware"]["cpu"] and "boot_id" not in told["hardware"]
    assert ours.document()["target"]["engine_build"] and theirs.document()["target"]["engine_build"] is None
    assert Target(processes=4).document() == Target().document(), "the load is the same, however many send it"


def test_a_trial_is_long_enough_and_its_begin_is_not_counted():
    plan = CapacityPlan(scenario(SHORT), Goal(), 20.0, 100, 1, Target())
    for rate, counted in ((1.0, 100), (50.0, 1000)):
        schedule = build_schedule(plan.trial(rate), 1, "t")
        due_ns = np.array([request.due_offset_ns for request in schedule])
        measured = after_warmup(due_ns, plan.trial(rate).measure.warmup_s, 0).sum()
        assert len(schedule) == pytest.approx(counted / 0.75, abs=1) and measured == pytest.approx(counted, rel=0.1)


def test_trials_that_cannot_tell_by_themselves_are_named_before_the_search_begins():
    short, enough = (
        CapacityPlan(scenario(SHORT), Goal(most_trials=5), 1.0, number, 0, Target()) for number in (20, 55)
    )
    (told,) = short.doubts()
    assert "--requests 55" in told and "3 times or more" in told and not enough.doubts()


def test_a_trial_keeps_the_price_and_leaves_out_the_prelude_as_well_as_its_begin():
    measure = {"warmup_requests": 3, "usd_per_hour": 2.0}
    plan = CapacityPlan(scenario(SHORT, measure=measure), Goal(), 20.0, 100, 1, Target())
    made = plan.trial(1.0)
    assert (made.measure.warmup_requests, made.measure.usd_per_hour) == (3, 2.0) and made.measure.warmup_s > 20
    assert Scenario(**made.model_dump(mode="json")).measure == made.measure, "the load generator reads it again"
    schedule = build_schedule(made, 1, "t")
    due_ns = np.array([request.due_offset_ns - 30 * 10**9 * request.prelude for request in schedule])
    counts = after_warmup(due_ns, made.measure.warmup_s, 3)
    alone = after_warmup(due_ns[3:], made.measure.warmup_s, 0)
    assert not counts[:3].any() and (counts[3:] == alone).all() and 0 < alone.sum() < len(alone)


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


def test_command_line_objectives_are_those_of_vllm_and_wrong_ones_are_explained():
    assert parse_bounds("ttft:500 tpot:50, e2el:9000") == {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 9000}
    for text, ms in (("ttft:1s", 1000), ("ttft:250ms", 250), ("ttft=0.5s", 500), ("ttft:.5", 0.5), ("ttft:1e3", 1000)):
        assert parse_bounds(text) == {"ttft_ms": ms}
    for wrong, says in (("itl:5", "names no latency"), ("ttft:0", "above 0"), ("ttft", "above 0"), ("", "no objective"),
                        ("ttft:1 ttft:2", "twice"), ("ttft:inf", "above 0"), ("ttft:nan", "above 0"),
                        ("ttft:1h", "a time in s, such as ttft:500 or"), ("ttft:-1s", "above 0")):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            parse_bounds(wrong)
