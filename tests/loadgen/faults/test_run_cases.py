import fcntl
import os

import pytest

from sojourn.diagnosis.score.truth import read_fault
from sojourn.loadgen.faults.case import load_case
from sojourn.loadgen.faults.run_cases import Campaign, FailedRun, plan_runs, surroundings_of
from sojourn.metrics.errors import ExperimentError, ServerError
from sojourn.metrics.records import ClientRecord
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.directory import REQUIRED, RunDirectory
from sojourn.metrics.run.segments import write_segment

OBJECTIVES = [{"klass": "all", "ttft_ms": 300}]
MS = 1_000_000


class Runs:
    """Makes run directories in no time. `slow` names cases whose first tokens come late."""

    def __init__(self, slow: tuple[str, ...] = (), stop_at: int | None = None, broken: str = ""):
        self.slow, self.stop_at, self.broken, self.names = slow, stop_at, broken, []

    def __call__(self, planned, path, progress) -> RunDirectory:
        if len(self.names) == self.stop_at:
            path.mkdir()  # what Ctrl-C leaves
            raise KeyboardInterrupt
        self.names.append(planned.name)
        if planned.case.name == self.broken:
            raise ServerError("the server was not ready")
        ttft_ms = 900 if planned.case.name in self.slow else 20
        run = RunDirectory.create(path, dict.fromkeys(REQUIRED) | {"objectives": OBJECTIVES})
        records = [
            ClientRecord(
                f"r{index}", "chat", due_ns=index * MS, status="ok", sent_ns=index * MS,
                first_token_ns=(index + ttft_ms) * MS, last_byte_ns=(index + 1000) * MS,
            )
            for index in range(10)
        ]  # fmt: skip
        write_segment(path, "client", [row(record) for record in records], "1")
        run.compact()
        return run


@pytest.fixture
def planned():
    return plan_runs([load_case("batch-cap"), load_case("chat"), load_case("kv-pool")], repeats=2)


def test_first_repeat_comes_first_and_bases_before_their_cases(planned):
    names = [each.name for each in planned]
    assert names[:3] == ["chat--0--1", "batch-cap--1--1", "batch-cap--2--1"]
    assert names[len(names) // 2] == "chat--0--2"
    assert planned[0].seed == planned[1].seed != planned[-1].seed


def test_steps_are_profiled_where_that_was_asked_for_also_without_a_fault_around():
    (healthy,), (hit,) = (load_case(name).variants[:1] for name in ("chat", "network-delay"))
    assert surroundings_of(healthy, profiles=False) is None
    assert surroundings_of(healthy, profiles=True)._burst is not None
    assert surroundings_of(hit, profiles=False)._burst is None
    assert surroundings_of(hit, profiles=True)._burst is not None


def test_what_is_finished_is_not_run_again_and_what_was_cut_short_is(planned, tmp_path):
    stopped = Runs(stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        list(Campaign(tmp_path, stopped).run(planned))
    assert stopped.names == ["chat--0--1", "batch-cap--1--1", "batch-cap--2--1"]
    again = Runs()
    assert len(list(Campaign(tmp_path, again).run(planned))) == len(planned) - 3 == len(again.names)
    assert again.names[0] == planned[3].name
    assert list(Campaign(tmp_path, Runs()).run(planned)) == []


def test_a_run_says_whether_its_fault_hurt(planned, tmp_path):
    done = {each.planned.name: each for each in Campaign(tmp_path, Runs(slow=("batch-cap",))).run(planned)}
    assert done["batch-cap--2--1"].hurts is True and done["batch-cap--2--1"].attainment == 0
    assert done["kv-pool--1--1"].hurts is False and done["chat--0--1"].hurts is None
    assert done["batch-cap--1--1"].seconds_left is not None and done[planned[-1].name].seconds_left == 0


def test_the_truth_lies_beside_the_run(planned, tmp_path):
    list(Campaign(tmp_path, Runs()).run(planned[:2]))
    record = read_fault(tmp_path / "batch-cap--1--1")
    assert (record.case, record.workload, record.severity, record.repeat, record.base) == (
        "batch-cap", "chat", 1, 1, "chat"
    )  # fmt: skip
    assert record.truths[0].keys == ["batch_cap"] and record.control is None
    control = read_fault(tmp_path / "chat--0--1")
    assert control.control == "healthy" and control.base is None and control.truths == []


def test_two_programs_do_not_share_a_folder(planned, tmp_path):
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ExperimentError, match=r"cases run in .* already"):
        list(Campaign(tmp_path, Runs()).run(planned))
    os.close(lock)


def test_a_case_that_cannot_run_does_not_end_the_others(planned, tmp_path):
    made = list(Campaign(tmp_path, Runs(broken="batch-cap")).run(planned))
    failed = [each for each in made if isinstance(each, FailedRun)]
    assert len(made) == len(planned) and {each.planned.case.name for each in failed} == {"batch-cap"}
    again = Runs()
    list(Campaign(tmp_path, again).run(planned))
    assert again.names == [each.planned.name for each in failed]
