"""Joules of known powers."""

import math
from itertools import pairwise

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.terminal.report import render
from sojourn.metrics.machine.power import joules_between
from sojourn.metrics.records import SystemRecord
from sojourn.metrics.records.tables import SCHEMAS, row
from sojourn.metrics.request.goodput import window_ns
from sojourn.metrics.results.energy import energy_use, joules
from sojourn.metrics.run.segments import replace_table
from tests.metrics.synthetic import synthetic_run

S = 1_000_000_000


def sample(second: float, gpu: float | None = None, cpu: float | None = None) -> SystemRecord:
    return SystemRecord(
        ns=round(second * S), host_cpu_percent=0.0, front_cpu_percent=None, core_cpu_percent=None, core_rss_bytes=None,
        host_available_bytes=0, gpu_power_watts=gpu, cpu_power_watts=cpu,
    )  # fmt: skip


def table(samples: list[SystemRecord]) -> pd.DataFrame:
    return pd.DataFrame([row(record) for record in samples])


def test_constant_power_is_power_times_time():
    system = table([sample(second, 250.0) for second in range(11)])
    assert joules(system, "gpu", 2 * S, 7 * S) == pytest.approx(1250)
    assert joules(system, "gpu", round(2.3 * S), round(2.5 * S)) == pytest.approx(50)


def test_a_ramp_is_its_trapezoid():
    system = table([sample(second, 100.0 * second) for second in range(5)])
    assert joules(system, "gpu", S, 3 * S) == pytest.approx(400)
    assert joules(system, "gpu", round(0.5 * S), round(1.5 * S)) == pytest.approx(100)


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=20))
def test_what_is_counted_sample_by_sample_is_what_the_whole_window_gives(watts):
    samples = [sample(second, power) for second, power in enumerate(watts)]
    counted = sum(joules_between(earlier, later, "gpu") for earlier, later in pairwise(samples))
    assert math.isclose(counted, joules(table(samples), "gpu", 0, (len(watts) - 1) * S), abs_tol=1e-6)


def test_without_a_sensor_nobody_knows():
    system = table([sample(second) for second in range(5)])
    assert joules(system, "gpu", 0, 4 * S) is None
    assert joules_between(sample(0), sample(1), "cpu") is None
    assert joules(pd.DataFrame({"ns": [0, S]}), "gpu", 0, S) is None  # a run that was recorded before there was one
    use = energy_use(system, pd.DataFrame({"token_ns": [[S, 2 * S]]}), 0, 4 * S)
    assert use.joules == {"gpu": None, "cpu": None} and use.joules_per_token is None and use.output_tokens == 2


@pytest.mark.parametrize("seconds", [[0, 1, 8, 9], [7, 8, 9], [0, 1, 2], []])
def test_a_stretch_without_samples_is_not_guessed(seconds):
    system = table([sample(second, 100.0) for second in seconds] or [sample(0)])
    assert joules(system, "gpu", 0, 9 * S) is None
    assert joules_between(sample(0, 100.0), sample(6, 100.0), "gpu") is None


def test_all_sensors_count_and_only_the_windows_tokens():
    system = table([sample(second, 200.0, 50.0) for second in range(11)])
    requests = pd.DataFrame({"token_ns": [[S, 5 * S], [6 * S, 20 * S], None]})
    use = energy_use(system, requests, 0, 10 * S)
    assert use.joules == {"gpu": pytest.approx(2000), "cpu": pytest.approx(500)}
    assert use.output_tokens == 3 and use.joules_per_token == pytest.approx(2500 / 3)


@pytest.fixture(scope="module")
def steady_run(tmp_path_factory):
    return synthetic_run(tmp_path_factory.mktemp("energy") / "run", requests=30)


def test_a_diagnosis_says_what_a_token_cost(steady_run):
    begin, end = window_ns(steady_run.requests())
    assert diagnose(steady_run).energy is None, "the machine has no sensor"
    samples = [row(sample(stamp / S, 400.0)) for stamp in range(begin - S, end + 2 * S, S)]
    replace_table(steady_run.path / "system.parquet", pa.Table.from_pylist(samples, schema=SCHEMAS["system"]))
    diagnosis = diagnose(steady_run)
    tokens = sum(len(stamps) for stamps in steady_run.requests().token_ns)
    assert diagnosis.energy.joules["gpu"] == pytest.approx(400 * (end - begin) / S)
    assert diagnosis.energy.joules_per_token == pytest.approx(400 * (end - begin) / S / tokens)
    console = Console(width=120)
    with console.capture() as shown:
        console.print(render(diagnosis))
    assert "J of the GPU in" in shown.get() and "J per output token" in shown.get()
