"""Sensors of GPUs: what is a problem, and what any device at work shows."""

import pytest

from sojourn.interop.held.held import Held, Reading
from sojourn.triage.conclude import conclude

THERMAL, POWER_CAP = 0x20, 0x4


def of(**values):
    readings = [
        Reading(device="GPU 0", name=name, unit="", value=value) for name, value in values.items() for _ in range(6)
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
