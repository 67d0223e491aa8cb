"""Sensors beside a vLLM that is simulated step by step: what each planted course is blamed for, and what is silent."""

from copy import deepcopy
from functools import cache

import pandas as pd
import pytest

from sojourn.diagnosis.sensor_facts import sensor_facts
from sojourn.diagnosis.statements.sensors import device_lines
from sojourn.interop.sources.page import read_page
from sojourn.live.watch.devices import Devices
from sojourn.live.watch.observer import Observer
from tests.live.watch.simulated_vllm import Load, SimulatedVllm
from tests.live.watch.test_simulated import BUSY_CPU, SLO, S

THERMAL, POWER_CAP, SETTING, IDLE = 0x40, 0x4, 0x2, 0x1
SOUND = {
    "gpu_utilisation": 0.97, "sm_activity": 0.7, "tensor_activity": 0.3, "memory_bandwidth": 0.5, "sm_clock": 1965e6,
    "sm_clock_limit": 1980e6, "power": 600.0, "power_limit": 700.0, "power_limit_default": 700.0, "throttle": 0,
    "pcie_rx": 0.2e9, "pcie_tx": 0.1e9, "pcie_generation": 5, "pcie_lanes": 16, "xid": 0, "ecc_uncorrected": 0,
}  # fmt: skip
CPU_SOUND = {"cpu_busy": 0.4, "cpu_steal": 0.0, "cpu_clock": 2.9e9, "cpu_clock_limit": 3.8e9}
OVERLOAD = dict(loads=(Load(7),), cap=128, device=BUSY_CPU)
USUAL = dict(loads=(Load(2.6),), device=BUSY_CPU)
BURSTS = dict(loads=(Load(0.1, burst=6),), device=BUSY_CPU)
SIMULATED = {repr(each): each for each in (OVERLOAD, USUAL, BURSTS)}


def sound(**other):
    return {"GPU 0": SOUND | other}


def rows_of(courses, seconds):
    """Each value is one number, or a function of the second; None is no reading."""
    rows = [
        (second * S, device, name, value(second) if callable(value) else value)
        for second in range(seconds) for device, values in courses.items() for name, value in values.items()
        if value is not None
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["ns", "device", "name", "value"])


def watched(settings, courses, objectives, seconds=60):
    """The pages are added once for each server; each course has a copy of the observer."""
    table = rows_of(courses, seconds + 1)
    observer, holder = deepcopy(_seen(repr(settings), tuple(objectives.items()), seconds))
    holder.append(table)
    return observer.watched()


class Holder(list):
    def __call__(self, begin, end):
        return self[0][self[0].ns.between(begin, end)]


@cache
def _seen(settings, objectives, seconds):
    holder = Holder()
    observer = Observer("x", "x", dict(objectives), window_s=60.0, devices=Devices(holder))
    for second, body in SimulatedVllm(**SIMULATED[settings]).pages(seconds):
        observer.add(second * S, *read_page(body, second * S, 0.01, observer.window.wants))
    return observer, holder


COMPUTES = dict(tensor_activity=0.7, sm_activity=0.9, power=698.0)
# Situation → what sensors show beside a server in which requests wait, and the first cause with a word of it.
PLANTED = {
    "heat": (sound(throttle=THERMAL, sm_clock=1005e6), "slow_device", "heat"),
    "heat by dmon": (sound(throttle=None, thermal_violation=1, sm_clock=1005e6), "slow_device", "heat"),
    "a lowered power cap": (
        sound(throttle=POWER_CAP, sm_clock=1200e6, power=349, power_limit=350), "slow_device", "350 W"),
    "a clock that was set": (sound(throttle=SETTING, sm_clock=990e6), "slow_device", "setting"),
    "a low clock without a reason": (sound(throttle=None, sm_clock=990e6, power=300), "slow_device", "no sensor names"),
    "one of two devices": (
        sound(throttle=THERMAL, sm_clock=1005e6) | {"GPU 1": SOUND}, "slow_device", "GPU 0"),
    "an idle device": (sound(gpu_utilisation=0.3, sm_activity=0.1), "slow_host", "works 30%"),
    "an idle device and idle others": (
        sound(gpu_utilisation=0.3, sm_activity=0.1) | {"GPU 1": SOUND | {"gpu_utilisation": 0.0}}, "slow_host",
        "GPU 0"),
    "PCIe": (sound(sm_activity=0.15, memory_bandwidth=0.1, pcie_rx=50e9), "pcie_bound", "50.0 GB/s"),
    "PCIe of few lanes": (
        sound(sm_activity=0.15, memory_bandwidth=0.1, pcie_rx=3e9, pcie_generation=3, pcie_lanes=4), "pcie_bound",
        "3.0 GB/s"),
    "stolen time": (sound() | {"CPU": CPU_SOUND | {"cpu_steal": 0.45}}, "noisy_neighbour", "45%"),
}  # fmt: skip


@pytest.mark.parametrize("objectives", [{}, pytest.param(SLO, marks=pytest.mark.thorough)], ids=["plain", "objectives"])
@pytest.mark.parametrize("name", PLANTED)
def test_what_sensors_show_beside_lost_time_is_its_cause(name, objectives):
    courses, key, word = PLANTED[name]
    found = watched(OVERLOAD, courses, objectives)
    assert found.findings and found.findings[0].key == key, found.headline
    assert word in found.findings[0].cause and found.findings[0].probe.rival
    assert found.devices and not any(word in each for each in found.warnings)


# Healthy servers and devices, however they look at first sight.
CONTROLS = {
    "a sound device": sound() | {"CPU": CPU_SOUND},
    "its own power cap": sound(throttle=POWER_CAP, sm_clock=1500e6, power=699.0),
    "a default of the clock": sound(throttle=SETTING, sm_clock=1600e6),
    "an old Xid": sound(xid=79, ecc_uncorrected=3),
    "a fault of a program": sound(xid=lambda second: 31 * (second > 30)),
    "an idle device beside it": sound() | {
        "GPU 1": SOUND | {"gpu_utilisation": 0.0, "sm_clock": 345e6, "throttle": IDLE}},
    "new errors of memory": sound(ecc_uncorrected=lambda second: 2.0 * (second > 30)),
    "few sensors": {"GPU 0": {"gpu_utilisation": 0.9, "sm_clock": 1700e6, "temperature": 60}},
    "bound by memory": sound(memory_bandwidth=0.85, tensor_activity=0.1),
    "a slow heat limit": sound(throttle=THERMAL, sm_clock=1900e6),
    "a CPU at work": sound() | {"CPU": CPU_SOUND | {"cpu_steal": 0.004, "cpu_clock": 2.2e9, "cpu_busy": 0.95}},
}  # fmt: skip
WARNED = {"an old Xid": "Xid 79", "a fault of a program": "Xid 31", "new errors of memory": "new uncorrected"}


@pytest.mark.parametrize("objectives", [pytest.param({}, marks=pytest.mark.thorough), SLO], ids=["plain", "objectives"])
@pytest.mark.parametrize("name", CONTROLS)
def test_a_healthy_device_is_blamed_for_nothing(name, objectives):
    found = watched(USUAL, CONTROLS[name], objectives, 60)
    assert found.state == "healthy" and not found.findings
    told = [each for each in found.warnings if "window has" not in each]
    assert bool(told) == (name in WARNED) and all(WARNED[name] in each for each in told[:1]), told
    lost = watched(OVERLOAD, CONTROLS[name], objectives)
    assert {each.key for each in lost.findings} <= {"overload", "batch_cap"}, lost.headline


def test_a_device_that_works_when_requests_come_is_not_idle():
    """Bursts of a few seconds in a minute: utilisation over the whole minute is low, and over the bursts it is not."""
    found = watched(BURSTS, sound(gpu_utilisation=lambda second: 0.97 * (second % 10 < 2)), SLO)
    assert not {each.key for each in found.findings} & {"slow_host", "pcie_bound", "slow_device"}


@pytest.mark.parametrize(("shows", "word"), [
    (COMPUTES, "bound by what it can compute"),
    (dict(memory_bandwidth=0.85, tensor_activity=0.1), "bound by memory bandwidth"),
    (dict(sm_activity=0.1, memory_bandwidth=0.1), "too small to fill it"), ({}, "SMs 70%"),
    (dict(gpu_utilisation=0.3), "the host holds it up"),
])  # fmt: skip
def test_low_utilisation_is_said_with_what_bounds_it(shows, word):
    assert word in watched(OVERLOAD, sound(**shows), SLO).devices[0]


@pytest.mark.parametrize(("are_all", "word"), [(True, "need not be the server's"), (False, "the host holds it up")])
def test_an_idle_device_is_a_problem_where_it_is_known_to_be_the_servers(are_all, word):
    courses = sound() | {"GPU 1": SOUND | {"gpu_utilisation": 0.0, "throttle": THERMAL}}
    lines = device_lines(sensor_facts(rows_of(courses, 20), are_all=are_all))
    assert word in lines[1] and "held down" not in lines[1] and word not in lines[0]


def test_a_line_names_the_sensor_that_would_show_what_stays_open():
    line = watched(OVERLOAD, CONTROLS["few sensors"], SLO).devices[0]
    assert "DCGM_FI_PROF_SM_ACTIVE" in line and "EVENT_REASONS" not in line
    falls = {"gpu_utilisation": 0.9, "sm_clock": lambda second: 1900e6 if second < 3 else 900e6}
    assert "DCGM_FI_DEV_CLOCKS_EVENT_REASONS" in watched(OVERLOAD, {"GPU 0": falls}, SLO).devices[0]


def test_a_throttle_without_lost_time_is_a_warning():
    found = watched(USUAL, sound(throttle=THERMAL, sm_clock=1005e6), {})
    assert found.state == "healthy" and "held down by heat" in " ".join(found.warnings)
