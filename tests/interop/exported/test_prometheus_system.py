"""The machine on the page: what no sensor tells is not there, and nothing is counted twice."""

from random import Random

import msgspec
import pytest

from sojourn.interop.exported.prometheus import Exporter
from sojourn.metrics.catalog.metric import LAG_BOUNDS
from sojourn.metrics.compute.kernels import CLASSES
from sojourn.metrics.machine.sampler import THROTTLE_REASONS
from sojourn.metrics.records import SystemRecord
from tests.interop.exported.scraped_page import scraped, value
from tests.metrics.random_records import MS, random_system

BARE = SystemRecord(
    ns=0, host_cpu_percent=1, front_cpu_percent=None, core_cpu_percent=None, core_rss_bytes=None, host_available_bytes=1
)


def page(*records: SystemRecord) -> dict:
    exporter = Exporter("tiny")
    for record in records:
        exporter.system.observe(record)
    return scraped(exporter)


def test_machine_without_sensors_has_no_series_for_them():
    of_sensors = (
        "power", "energy", "clock", "throttle", "temperature", "utilisation", "device_used", "resident", "steal",
    )  # fmt: skip
    seen = page(random_system(Random(1)), BARE, BARE)
    assert not [name for name, _ in seen if any(word in name for word in of_sensors)]


def test_gauges_are_those_of_the_last_sample_in_base_units():
    sample = msgspec.structs.replace(
        random_system(Random(2)),
        gpu_sm_clock_mhz=1500.0,
        gpu_utilisation_percent=25.0,
        gpu_throttle_reasons=["sw_thermal"],
        host_steal_percent=30.0,
    )
    seen = page(random_system(Random(1)), sample)
    assert value(seen, "compute_sm_clock_hertz") == 1.5e9
    assert value(seen, "compute_utilisation_ratio") == 0.25
    assert value(seen, "compute_steal_ratio") == pytest.approx(0.3)
    assert value(seen, "compute_power_watts", device="gpu") == sample.gpu_power_watts
    assert value(seen, "memory_resident_bytes", process="core") == sample.core_rss_bytes
    active = {r: value(seen, "compute_throttle_active", reason=r) for r in THROTTLE_REASONS.values()}
    assert active == {reason: reason == "sw_thermal" for reason in active}


def test_energy_is_power_over_time():
    first = msgspec.structs.replace(random_system(Random(1), 0), gpu_power_watts=100.0)
    later = msgspec.structs.replace(random_system(Random(1), 2), gpu_power_watts=300.0)
    assert value(page(first, later), "compute_energy_joules_total", device="gpu") == 400


def test_cpu_time_of_a_core_that_was_restarted_goes_on():
    spent = [5.0, 6.5, 0.25, 1.0]  # the second core begins at 0 again
    records = [
        msgspec.structs.replace(random_system(Random(1), second), core_cpu_seconds=seconds)
        for second, seconds in enumerate(spent)
    ]
    assert value(page(*records), "compute_cpu_seconds_total", process="core") == pytest.approx(1.5 + 0.25 + 0.75)


def test_lag_of_the_loop_is_taken_over_as_it_is_and_bursts_add_up():
    exporter = Exporter("tiny")
    counts = [0] * (len(LAG_BOUNDS) + 1)
    counts[3] = 5
    for _ in range(2):
        exporter.system.observe_loop_lag(counts, 7 * MS)
    for _ in range(2):
        exporter.system.observe_burst({"gemm": 40 * MS, "gap": 10 * MS})
    seen = scraped(exporter)
    assert value(seen, "request_loop_lag_seconds_count") == 5
    assert value(seen, "request_loop_lag_seconds_sum") == 0.007
    assert sum(value(seen, "compute_kernel_seconds_total", klass=klass) for klass in CLASSES) == pytest.approx(0.1)
