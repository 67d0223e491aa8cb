"""A run against normal speed: a device that is slow from the first step on, and who had the CPUs."""

import msgspec
import numpy as np
import pandas as pd
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.metrics.compute.cost_model import shape_from
from sojourn.metrics.compute.machine_facts import machine_facts
from sojourn.metrics.compute.speed_facts import _with_context
from sojourn.metrics.compute.speed_reference import fit_entry, step_features
from sojourn.metrics.compute.speed_run import entry_of_run
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.request.goodput import measured, measured_steps
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.steps import Steps, rows_of
from tests.metrics.sampled_machine import known, turns, with_requests, with_system
from tests.metrics.simulated_server import Device
from tests.metrics.synthetic import Plant, synthetic_run

S = 1_000_000_000


def slow_run(path, factor: float, **changes) -> RunDirectory:
    return synthetic_run(path, plant=Plant(device=Device(slowdown=factor, slow_from=0.0), **changes), requests=120)


@pytest.fixture(scope="module")
def normal(tmp_path_factory):
    """An entry of a healthy run of the same model."""
    run = known(synthetic_run(tmp_path_factory.mktemp("normal") / "run", requests=120, seed=3))
    entry = entry_of_run(run, run.meta())
    return msgspec.structs.replace(entry, identity=1)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_device_that_is_slow_all_the_time_is_slow_against_earlier_runs(tmp_path, normal, factor):
    speed = read_evidence(known(slow_run(tmp_path / "run", factor), [normal])).speed()
    assert speed.source == "reference" and speed.covered > 0.7
    assert speed.device.slowdown == pytest.approx(factor, rel=0.15)
    assert max(speed.quarters) / min(speed.quarters) < 1.2


def test_without_a_reference_a_slow_part_shows_and_a_slow_whole_does_not(tmp_path):
    whole = read_evidence(known(slow_run(tmp_path / "whole", 3.0))).speed()
    part = Plant(device=Device(slowdown=3.0, slow_from=0.99))  # of the clock, which begins at 1,000 s: half of 20 s
    found = read_evidence(known(synthetic_run(tmp_path / "part", plant=part, requests=120))).speed()
    assert whole.source == found.source == "own quarter"
    assert max(whole.quarters) < 1.3 and max(found.quarters) > 2.0


def test_a_run_is_not_its_own_reference(tmp_path):
    run = known(slow_run(tmp_path / "run", 3.0))
    own = entry_of_run(run, run.meta())
    assert read_evidence(known(run, [own])).speed().source == "own quarter"


def test_a_slow_device_is_named_where_its_own_steps_say_overload(tmp_path, normal):
    run = known(slow_run(tmp_path / "run", 6.0, rate_rps=8.0), [normal])
    first = diagnose(run).findings[0]
    assert first.key == "slow_device"
    assert any("normal speed" in fact.statement and fact.supports for fact in first.evidence)


@pytest.mark.parametrize(("factors", "grows"), [((3.0, 3.0), False), ((1.0, 20.0), True)])
def test_a_slow_kernel_of_attention_slows_steps_by_their_context_and_a_slow_device_all(factors, grows):
    dice = np.random.default_rng(0)
    rows = dice.integers(1, 6, 400)
    pairs = rows * dice.uniform(50, 400, 400)  # a larger batch has more context
    other, attention = 1e6 + 2e5 * rows, 500 * pairs
    took = (factors[0] * other + factors[1] * attention) * dice.normal(1, 0.05, 400)
    assert (_with_context(took / (other + attention), rows, pairs) > 1.2) == grows
    assert _with_context(took[:20], rows[:20], pairs[:20]) is None


def system(**columns) -> pd.DataFrame:
    """Samples of four seconds; a list is of each sample, another value of all."""
    rows = pd.DataFrame({name: pd.Series([None] * 4, dtype=object) for name in SCHEMAS["system"].names})
    for name, value in ({"ns": [S, 2 * S, 3 * S, 4 * S]} | columns).items():
        rows[name] = pd.Series(value if isinstance(value, list) else [value] * 4, dtype=object)
    return rows


def facts_of(rows: pd.DataFrame, *, with_steps: bool = True, **more):
    steps = pd.DataFrame({"step": [0], "begin_ns": [S], "end_ns": [4 * S]}).iloc[: int(with_steps)]
    meta = {"hardware": {"cores": 2}, "core": {"threads": 2}, "load_use": {"cpu_cores": 0.1, "cpu_cores_max": 0.2}}
    return machine_facts(meta | more, rows, steps, pd.DataFrame(), (0.0, 5.0 * S))


def test_the_other_servers_of_a_fleet_are_counted_apart_from_strangers():
    own = system(host_cpu_percent=100.0, front_cpu_seconds=[0, 0, 0, 0], core_cpu_seconds=[0, 0, 0, 0])
    sibling = system(front_cpu_seconds=[0.0, 0.1, 0.2, 0.3], core_cpu_seconds=[None, 1.0, 1.5, 2.0])
    meta = {"hardware": {"cores": 2}}
    found = machine_facts(meta, own, pd.DataFrame(), pd.DataFrame(), (0.0, 5.0 * S), [sibling])
    assert found.others_cores == pytest.approx(2.0)
    assert found.siblings_cores == pytest.approx(1.2 / 3, rel=0.01), "of three seconds, from its first whole sample on"
    alone = machine_facts(meta, own, pd.DataFrame(), pd.DataFrame(), (0.0, 5.0 * S), [system()])
    assert alone.siblings_cores == 0.0 and alone.others_cores == found.others_cores


def test_other_processes_have_what_ours_do_not_have_of_the_cpus():
    found = facts_of(system(host_cpu_percent=100.0, front_cpu_seconds=[0.0, 0.1, 0.2, 0.3],
                            core_cpu_seconds=[0.0, 0.8, 1.6, 2.4], core_queued_ns=[0, S, 2 * S, 3 * S]))  # fmt: skip
    assert found.others_cores == pytest.approx(2.0 - 0.1 - 0.8 - 0.1)
    assert found.core_queued == pytest.approx(0.5)
    assert found.core_queued_by_others == pytest.approx(0.5 * 1.0 / 1.2)  # the front and the load have a sixth of it


def test_load_generator_of_another_machine_takes_nothing_of_the_servers_cores():
    rows = system(host_cpu_percent=50.0, front_cpu_seconds=[0.0, 0.1, 0.2, 0.3],
                  core_cpu_seconds=[0.0, 0.8, 1.6, 2.4], core_queued_ns=[0, S, 2 * S, 3 * S])  # fmt: skip
    found = facts_of(rows, hardware={"cores": 2, "boot_id": "a"}, server_hardware={"cores": 4, "boot_id": "b"})
    assert found.cores == 4 and found.load_cores is None and found.load_cores_worst == 0.2
    assert found.others_cores == pytest.approx(2.0 - 0.1 - 0.8)


def test_processes_of_ours_that_have_the_cores_are_no_neighbour():
    found = facts_of(system(host_cpu_percent=95.0, front_cpu_seconds=[0.0, 0.9, 1.8, 2.7],
                            core_cpu_seconds=[0.0, 0.9, 1.8, 2.7], core_queued_ns=[0, S, 2 * S, 3 * S]))  # fmt: skip
    assert found.core_queued == pytest.approx(0.5) and found.core_queued_by_others == 0.0


def test_without_steps_the_time_on_a_core_tells_how_long_threads_waited_for_one():
    rows = system(host_cpu_percent=100.0, front_cpu_seconds=0.0, core_cpu_seconds=[0.0, 0.5, 1.0, 1.5],
                  core_queued_ns=[0, S // 2, S, 3 * S // 2])  # fmt: skip
    assert facts_of(rows, with_steps=False).core_queued == pytest.approx(0.5)


def test_waits_of_threads_that_no_step_waits_for_are_not_those_of_the_engine():
    """A process whose threads wait 2.2 s for a core in each second, while the one that runs its steps waits 0.05 s."""
    columns = dict(host_cpu_percent=[50.0] * 4, front_cpu_seconds=[0.0, 0.1, 0.2, 0.3],
                   core_cpu_seconds=[0.0, 1.2, 2.4, 3.6], core_queued_ns=[0, 2.2 * S, 4.4 * S, 6.6 * S])  # fmt: skip
    loop = {"core_loop_queued_ns": [0, S // 20, S // 10, 3 * S // 20], "core_loop_cpu_ns": [0, S, 2 * S, 3 * S]}
    assert facts_of(system(**columns)).core_queued == 1.0
    found = facts_of(system(**columns, **loop))
    assert found.core_queued == pytest.approx(0.05) and found.bound_delay(found.core_queued) == pytest.approx(0.1)
    idle = loop | {"core_loop_cpu_ns": [0, S // 50, S // 25, S // 15]}  # it waits for workers that compute
    assert facts_of(system(**columns, **idle)).core_queued == 1.0


def test_a_loop_that_sleeps_is_busy_and_on_no_core():
    found = facts_of(system(loop_busy_ns=[0, S, 2 * S, 3 * S], front_loop_cpu_ns=[0, S // 10, S // 5, 3 * S // 10],
                            front_loop_queued_ns=0, loop_turn_begin_ns=[[], [S], [], []],
                            loop_turn_ns=[[], [S], [], []])).front  # fmt: skip
    assert found.busy == pytest.approx(1.0) and found.on_cpu == pytest.approx(0.1)
    assert found.queued == 0.0
    assert found.long_turns == 1 and found.longest_ms == pytest.approx(1000.0)


def test_a_core_that_began_anew_counts_from_nothing():
    found = facts_of(system(core_queued_ns=[5 * S, S, 2 * S, 3 * S]))
    assert found.core_queued == pytest.approx(0.5)


def test_without_samples_nothing_is_known():
    assert machine_facts({}, system().iloc[:1], pd.DataFrame(), pd.DataFrame(), (0.0, 1.0)) is None
    assert facts_of(system()).core_queued is None and facts_of(system()).front is None


def test_a_held_event_loop_is_named_and_an_idle_one_is_not(tmp_path):
    held = with_system(synthetic_run(tmp_path / "held", plant="slow_stream", requests=80), **turns(1.0, 600.0))
    assert diagnose(held).findings[0].key == "blocked_front"
    idle = with_system(synthetic_run(tmp_path / "idle", plant="slow_network", requests=60), **turns(1.0, 3.0))
    keys = [finding.key for finding in diagnose(idle).findings]
    assert keys[0] == "slow_network" and "blocked_front" not in keys


def test_a_neighbour_is_named_where_threads_wait_for_a_core(tmp_path):
    busy = {"host_cpu_percent": lambda s: 95.0, "front_cpu_seconds": lambda s: 0.05 * s,
            "core_cpu_seconds": lambda s: 0.4 * s}  # fmt: skip
    slow = "slow_device"
    waits = with_system(known(synthetic_run(tmp_path / "waits", plant=slow), threads=2), **busy,
                        core_queued_ns=lambda s: int(0.8e9 * s))  # fmt: skip
    waits.update_meta(hardware={"cpu": "simulated", "cores": 2})
    free = with_system(known(synthetic_run(tmp_path / "free", plant=slow), threads=2), **busy,
                       core_queued_ns=lambda s: int(0.01e9 * s))  # fmt: skip
    assert "noisy_neighbour" in [finding.key for finding in diagnose(waits).findings]
    keys = [finding.key for finding in diagnose(free).findings]
    assert keys[0] == "slow_device" and "noisy_neighbour" not in keys


def test_slow_writes_are_the_servers_and_not_the_loops(tmp_path):
    run = with_system(synthetic_run(tmp_path / "run", plant="slow_stream", requests=80), **turns(1.0, 20.0))
    with_requests(run, writing_ns=lambda rows: (0.95 * rows.ledger_request_stream_ns).astype("int64"))
    assert diagnose(run).findings[0].key == "slow_writer"


@pytest.mark.parametrize("bad", [lambda ns: 0 * ns, lambda ns: 0 * ns + 1000, lambda ns: -ns, lambda ns: 100 * ns])
def test_three_bad_steps_leave_no_other_speed_behind(tmp_path, bad):
    run = known(synthetic_run(tmp_path / "run", requests=120, seed=3))
    meta = run.meta()
    steps = measured_steps(run.table("steps"), measured(run.requests(), meta))
    spoilt = steps.copy()
    spoilt.loc[spoilt.index[40:43], "device_ns"] = bad(steps.device_ns.iloc[40:43])
    shape = shape_from(meta)
    found = step_features(shape, Steps(rows_of(steps)))

    def expected_ns(table):
        entry = fit_entry(shape, rows_of(table), name="run", identity=1, measured_at="", settings={})
        return found @ [ns or 0.0 for ns in entry.step_ns]

    assert len(steps) > 500 and expected_ns(spoilt) == pytest.approx(expected_ns(steps), rel=0.02)
