"""What a load generator took of the CPUs, from readings of its counters."""

import os

import pytest

from sojourn.loadgen.run.load_use import LoadUse


def use_of(readings: list[tuple[float, tuple[float, int | None]]]) -> LoadUse:
    clock, counters = iter([at for at, _ in readings]), iter([(*reading, {1, 2}) for _, reading in readings])
    use = LoadUse(1, lambda: next(clock), lambda pid: next(counters))
    for _ in readings:
        use.look()
    return use


def test_the_mean_is_of_the_whole_load_and_the_maximum_of_its_busiest_second():
    found = use_of([(0.0, (10.0, 0)), (1.0, (10.1, 0)), (2.0, (11.0, 500_000_000))]).summary()
    assert found == {
        "seconds": 2.0, "cpu_cores": 0.5, "cpu_cores_max": pytest.approx(0.9), "queued_share": 0.25, "pids": [1, 2],
    }  # fmt: skip


def test_looks_of_one_second_are_one_reading():
    assert use_of([(0.0, (1.0, 0)), (0.2, (9.0, 0)), (0.9, (9.0, 0))]).summary() is None


def test_a_kernel_that_counts_no_run_queue_leaves_it_open():
    assert use_of([(0.0, (1.0, None)), (2.0, (2.0, None))]).summary()["queued_share"] is None


def test_a_process_that_is_gone_takes_no_reading_with_it():
    use = LoadUse(2**22 + os.getpid())
    use.look()
    assert use.summary() is None
