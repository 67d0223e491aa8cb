"""Runs of foreign servers with sensors beside them: the cause, the audit, the symptom, and who may read them."""

from dataclasses import replace

import numpy as np
import pytest

from sojourn.diagnosis.audit.audits import audited
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.sensor_facts import flight_of, sensor_facts
from sojourn.metrics.run.segments import write_segment
from tests.live.watch.test_devices import CONTROLS, SOUND, THERMAL, rows_of, sound
from tests.metrics.foreign import START_NS, VllmPage, foreign_run, steady

SLOW = steady(60, every_s=0.25, queue_s=0.6, decode_s=4.0)
GPU_AND_CPU = {
    "slow_device": sound(throttle=THERMAL, sm_clock=1005e6),
    "slow_host": sound(gpu_utilisation=0.3, sm_activity=0.1),
    "pcie_bound": sound(sm_activity=0.15, memory_bandwidth=0.1, pcie_rx=50e9),
    "noisy_neighbour": sound() | {"CPU": {"cpu_steal": 0.6, "cpu_busy": 0.4}},
}


def run_with(path, courses, *, has_page=True, lives=SLOW):
    run = foreign_run(path, lives, VllmPage(), objectives=[{"klass": "all", "tpot_ms": 60.0}])
    if not has_page:
        for file in run.sources("scrapes"):
            file.unlink()
    rows = rows_of(courses, 22).assign(ns=lambda table: table.ns + START_NS)
    write_segment(run.path, "sensors", rows.to_dict("records"), "0")
    run.compact()
    return run


@pytest.mark.parametrize("has_page", [True, False], ids=["page", "client alone"])
@pytest.mark.parametrize("key", GPU_AND_CPU)
def test_sensors_name_the_cause_of_a_foreign_server(key, has_page, tmp_path):
    run = run_with(tmp_path / "run", GPU_AND_CPU[key], has_page=has_page)
    found = diagnose(run)
    assert found.findings[0].key == key, found.headline
    audits = {each.key: each for each in audited(found, read_evidence(run))}
    group = {"slow_host": "host", "noisy_neighbour": "neighbours"}.get(key, "device")
    assert audits[group].status == "fail" and found.findings[0].cause in audits[group].says
    assert found.devices and not any(found.findings[0].cause in each for each in found.warnings)
    assert key not in {each.key for each in diagnose(run, level="client").findings}  # whom no sensor was shown


@pytest.mark.parametrize("name", CONTROLS)
def test_sound_devices_are_no_cause(name, tmp_path):
    found = diagnose(run_with(tmp_path / "run", CONTROLS[name]))
    assert not {each.key for each in found.findings} & set(GPU_AND_CPU), found.headline


def test_low_utilisation_is_a_symptom_that_sensors_answer(tmp_path):
    low, full = (diagnose(run_with(tmp_path / name, sound(gpu_utilisation=used)))
                 for name, used in (("low", 0.3), ("full", 0.97)))  # fmt: skip
    status = [next(check for check in each.checks if check.symptom == "low_device_utilisation") for each in (low, full)]
    assert [each.status for each in status] == ["present", "absent"] and "30%" in status[0].reason


def test_only_readings_with_requests_throughout_count():
    """A sensor shows the second before it: one that a request came or went in says little."""
    second = 10**9
    flight = flight_of(np.array([2, 10]) * second, np.array([6, 12]) * second)
    rows = rows_of({"GPU 0": SOUND | {"gpu_utilisation": lambda at: float(3 <= at < 6)}}, 15)
    facts = sensor_facts(rows, flight)
    assert facts.devices[0].readings == 4 and facts.devices[0].used == pytest.approx(3 / 4)
    assert facts.in_flight == pytest.approx(4 / 15)


@pytest.mark.parametrize(("number", "is_own"), [(79, True), (31, False)])
def test_an_error_of_the_device_is_a_cause_of_requests_that_fail_with_it(number, is_own, tmp_path):
    """A program's own fault is no fault of the device; both are said."""
    lives = [replace(life, cut_s=1.5 if life.due_s > 6 else 99.0) for life in SLOW]
    run = run_with(tmp_path / "run", sound(xid=lambda second: number * (second > 6)), lives=lives)
    found = diagnose(run)
    assert ("slow_device" in {each.key for each in found.findings}) == is_own
    assert any(f"Xid {number}" in each for each in (*found.warnings, *(each.cause for each in found.findings)))
