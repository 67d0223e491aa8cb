"""Sensors of GPUs: what is a problem, and what any device at work shows."""

import pytest

from sojourn.interop.held.held import Held, Reading
from sojourn.triage.conclude import conclude, triage_given

THERMAL, POWER_CAP = 0x20, 0x4


def of(looks=6, **values):
    readings = [
        Reading(device="GPU 0", name=name, unit="", value=value) for name, value in values.items() for _ in range(looks)
    ]
    return conclude([Held(kind="nvidia-smi", name="smi", sensors=readings)], {})


@pytest.mark.parametrize(("values", "is_problem", "cause"), [
    ({"throttle": THERMAL, "gpu_utilisation": 1.0}, True, "held down by heat"),
    ({"throttle": POWER_CAP, "gpu_utilisation": 1.0, "power": 690, "power_limit": 700}, False, ""),
    ({"gpu_utilisation": 1.0, "power": 150, "power_limit": 700}, True, ""),
    ({"gpu_utilisation": 0.9, "power": 500, "power_limit": 700}, False, ""),
    ({"gpu_utilisation": 0.1}, False, ""),
    ({"xid": 79}, True, ""),
    ({"xid": 0, "ecc_uncorrected": 0}, False, ""),
])  # fmt: skip
def test_a_sensor_is_a_problem_only_where_no_healthy_device_shows_it(values, is_problem, cause):
    found = of(**values)
    assert any(each.is_problem for each in found.certain) == is_problem
    assert (found.likely[0].cause if found.likely else "").find(cause) >= 0 and bool(found.likely) == bool(cause)


@pytest.mark.parametrize("values", [
    {"throttle": THERMAL, "gpu_utilisation": 1.0}, {"gpu_utilisation": 1.0, "power": 150, "power_limit": 700},
    {"gpu_utilisation": 0.0},
])  # fmt: skip
def test_one_look_is_no_problem(values):
    found = of(looks=1, **values)
    assert not found.likely and not any(each.is_problem for each in found.certain), found.certain


@pytest.mark.parametrize(("running", "shift_s", "blamed"), [(8.0, 0, True), (0.0, 0, False), (8.0, 7200, False)])
def test_an_idle_device_is_a_problem_where_a_log_shows_requests_at_that_time(running, shift_s, blamed):
    """A log of two hours before says nothing of it."""
    begin_s, second = 1_800_000_000, 10**9
    smi = Held(kind="nvidia-smi dmon", name="dmon", sensors=[
        Reading(device=f"GPU {index}", name="gpu_utilisation", unit="share", value=used, ns=(begin_s + at) * second)
        for at in range(30) for index, used in enumerate((0.2, 0.0))
    ])  # fmt: skip
    log = Held(kind="vLLM log", name="log", server="vllm", series=[
        {"ns": (begin_s + shift_s + at) * second, "name": "vllm:num_requests_running", "labels": [], "value": running}
        for at in range(0, 40, 10)
    ])  # fmt: skip
    found = conclude([log, smi], {})
    assert ([each.key for each in found.likely if each.source == "dmon"] == ["slow_host"]) == blamed
    assert any("GPU 0" in each.sentence and each.is_problem for each in found.certain) == blamed


@pytest.mark.parametrize(("clocks", "used", "is_said"), [
    ((1980, 1110), (1.0, 1.0), True), ((1980, 1700), (1.0, 1.0), False), ((1980, 210), (1.0, 0.0), False),
])  # fmt: skip
def test_a_device_with_a_much_lower_clock_than_its_twin_is_said_and_is_no_problem_by_itself(clocks, used, is_said):
    rows = [f"{gpu} 400 {60 + gpu} - {used[gpu] * 100:.0f} 40 2619 {clock}" for gpu, clock in enumerate(clocks)] * 6
    head = "# gpu pwr gtemp mtemp sm mem mclk pclk\n# Idx W C C % % MHz MHz\n"
    found = triage_given(texts={"dmon": head + "\n".join(rows)})
    assert any("GPU 1 works at 1,110 MHz, at 61" in each.sentence for each in found.certain) == is_said
    assert found.state == "cannot tell" and ("-d PERFORMANCE" in found.next) == is_said
    assert not any("-s pucvmet" in each for each in found.unknowable)
