"""Where the core's threads run, and how they wait."""

import os

import pytest

from sojourn.engine.process import SPIN_COUNT, keep_cupti, let_threads_sleep, num_cores


def test_threads_are_the_cores_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    assert num_cores() == 3
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 2)  # the three are threads of two cores
    assert num_cores() == 2
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None)  # not every system tells
    assert num_cores() == 3


@pytest.mark.parametrize(
    ("environment", "loaded", "after"),
    [
        ({}, ["os"], {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "7000"}, ["os"], {"GOMP_SPINCOUNT": "7000"}),
        ({}, ["os", "torch"], {}),
    ],
    ids=["of itself", "as the user says", "too late to matter"],
)
def test_threads_sleep_while_they_wait_unless_torch_or_the_user_was_first(environment, loaded, after):
    let_threads_sleep(environment, loaded)
    assert environment == after


def test_cupti_stays_between_two_bursts_unless_the_user_says_otherwise():
    environment = {"TEARDOWN_CUPTI": "1"}
    keep_cupti(environment)
    assert environment == {"TEARDOWN_CUPTI": "1", "DISABLE_CUPTI_LAZY_REINIT": "1"}
