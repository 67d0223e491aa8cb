"""Device time and energy: the shares of a step's members sum to the step."""

from random import Random

import msgspec
import pytest

from sojourn.engine.server.gateway.usage.device_shares import DeviceShares, PowerMeter
from sojourn.metrics.records import SystemRecord
from tests.engine.simulated import SHAPE
from tests.metrics.random_records import random_step


def step(new: dict[str, int], device_ns: int, past: int = 0):
    return msgspec.structs.replace(
        random_step(Random(1), 1), request_ids=list(new), new_tokens=list(new.values()), past_tokens=[past] * len(new),
        kinds=["decode"] * len(new), device_ns=device_ns,
    )  # fmt: skip


def test_a_step_is_divided_by_the_work_of_its_members():
    shares = DeviceShares()
    shares.shape = SHAPE
    shares.count(["a", "b", "c"])
    shares.add(step({"a": 1, "b": 1}, 1000, past=64))
    shares.add(step({"a": 1, "c": 500}, 100_000))
    shares.add(step({"gone": 5}, 777))
    a_ns, c_ns = shares.take(["a"]), shares.take(["c"])
    assert 500 < a_ns < 800 and c_ns > 99_000 and shares.take(["b"]) == 500
    assert a_ns + c_ns + 500 == pytest.approx(101_000)
    assert shares.take(["a"]) == 0


def test_before_the_model_is_loaded_tokens_stand_for_work():
    shares = DeviceShares()
    shares.count(["a", "b"])
    shares.add(step({"a": 3, "b": 1}, 1000))
    assert shares.take(["a"]) == 750 and shares.take(["b"]) == 250


def sample(second: float, gpu: float | None, cpu: float | None = None) -> SystemRecord:
    return SystemRecord(int(second * 1e9), 0.0, None, None, None, 1, gpu_power_watts=gpu, cpu_power_watts=cpu)


def test_a_device_second_costs_the_mean_power_of_all_sensors_since_the_call_began():
    meter = PowerMeter()
    assert meter.watts_since(meter.reading) is None
    meter.add(sample(0, 100.0, 20.0))
    assert meter.watts_since(meter.reading) == 120  # no stretch yet: the power of now
    begun = meter.reading
    meter.add(sample(1, 200.0, 20.0))
    meter.add(sample(2, 300.0, 20.0))
    assert meter.watts_since(begun) == 200 + 20
    meter.add(sample(60, 900.0, 20.0))  # too long a gap: unknown
    assert meter.watts_since(begun) == 200 + 20


def test_a_machine_without_a_sensor_has_no_joules():
    meter = PowerMeter()
    for second in range(3):
        meter.add(sample(second, None))
    assert meter.watts_since((0.0, 0.0)) is None
