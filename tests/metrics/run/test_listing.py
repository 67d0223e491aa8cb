"""Which run of a folder is the newest, which belongs to another, and which of two is the one before."""

from sojourn.metrics.run.directory import REQUIRED, RunDirectory
from sojourn.metrics.run.listing import ListedRun, before_and_after, list_runs, newest, run_beside
from tests.metrics.synthetic import synthetic_run

STARTED_NS = 1_700_000_000_000_000_000


def never_ended(records) -> None:
    """As of a load that was stopped before its first request: the schedule stands, and no server recorded anything."""
    records.client[:] = [each.__class__(request_id=each.request_id, due_ns=each.due_ns, status="missing", scenario="")
                         for each in records.client]  # fmt: skip
    records.requests.clear()
    records.steps.clear()


def made(folder, second: int, scenario: str = "chat", **options) -> RunDirectory:
    run = synthetic_run(folder, requests=5, **options)
    run.update_meta(
        wall_anchor={"monotonic_ns": 0, "unix_ns": STARTED_NS + second * 10**9},
        scenario={"name": scenario}, workload={"requests": 5},
    )  # fmt: skip
    return run


def test_the_newest_run_has_answers_can_be_read_and_is_no_part_of_another(tmp_path):
    made(tmp_path / "load", 1)
    made(tmp_path / "first-2-alone", 2, scenario="first-alone")
    made(tmp_path / "first-2", 3, scenario="first")
    made(tmp_path / "stopped", 4, keep=never_ended)
    begun = RunDirectory.create(tmp_path / "begun", dict.fromkeys(REQUIRED))
    begun.update_meta(wall_anchor={"unix_ns": STARTED_NS + 5 * 10**9})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    runs = {run.name: run for run in list_runs(tmp_path)}
    assert list(runs) == ["damaged", "begun", "stopped", "first-2", "first-2-alone", "load"]
    assert newest(list(runs.values())).name == "first-2"
    assert {name for name, run in runs.items() if run.is_passed_over} == {
        "damaged",
        "begun",
        "stopped",
        "first-2-alone",
    }
    assert "no request of it has ended" in runs["stopped"].note and "rate of first-2" in runs["first-2-alone"].note


def test_requests_one_at_a_time_that_no_load_followed_are_the_newest_and_are_explained(tmp_path):
    made(tmp_path / "load", 1)
    made(tmp_path / "first-2-alone", 2, scenario="first-alone")
    runs = list_runs(tmp_path)
    assert newest(runs).name == "first-2-alone" and "no load followed" in runs[0].note
    made(tmp_path / "mine-alone", 3)  # a name of the user's own says nothing
    assert newest(list_runs(tmp_path)).name == "mine-alone" and not list_runs(tmp_path)[0].note


def test_a_run_is_compared_with_the_one_before_it_of_its_scenario(tmp_path):
    for second, (name, scenario) in enumerate(
        [("a", "demo"), ("b", "other"), ("c", "demo"), ("d", "other"), ("e", "demo")]
    ):
        made(tmp_path / name, second, scenario=scenario)
    runs = list_runs(tmp_path)
    assert {name: run_beside(runs, name).name for name in "abcde"} == {"a": "c", "b": "d", "c": "a", "d": "b", "e": "c"}
    assert run_beside(runs[:1], "e") is None
    a, e = tmp_path / "a", tmp_path / "e"
    assert before_and_after(e, a) == before_and_after(a, e) == (a, e)


def test_an_imported_run_that_names_no_date_is_listed_by_the_date_of_its_import(tmp_path):
    run = made(tmp_path / "imported", 0)
    run.update_meta(wall_anchor={"monotonic_ns": 0, "unix_ns": 0})
    assert not list_runs(tmp_path)[0].recorded_at.startswith("1970")


def test_verdict_of_a_run_that_is_not_valid_says_so():
    cases = (("healthy", False), ("healthy", True), ("healthy", None), ("invalid", False), (None, False))
    runs = (
        ListedRun(
            name="a", recorded_at=None, scenario=None, model=None, requests=9, headline=None, valid=valid, state=state
        )
        for state, valid in cases
    )
    assert [run.verdict for run in runs] == ["healthy, not valid", "healthy", "healthy", "invalid", ""]
