"""Normal speed: what earlier runs expect of this run's steps."""

import threading
import warnings

import msgspec
import numpy as np
import pytest

from sojourn.metrics.compute.speed_reference import (
    FAST_END,
    MOST_ENTRIES,
    Line,
    SpeedEntry,
    SpeedFile,
    _fast_end,
    add_entry,
    expected,
    expected_line,
    family_of,
    line,
    read_entries,
    recorded_entries,
)
from sojourn.metrics.compute.step_time import NUM_FEATURES
from sojourn.metrics.machine.store import changing, store


def entry(identity: int, factor: float = 1.0, **changes) -> SpeedEntry:
    return SpeedEntry(
        **{"name": f"run {identity}", "identity": identity, "measured_at": "2026-01-01T00:00:00+00:00",
           "settings": {"threads": 2}, "step_ns": [1000.0 * factor] * NUM_FEATURES, "steps": 100} | changes
    )  # fmt: skip


def test_the_reference_is_the_fast_end_of_the_entries():
    found = np.ones((3, NUM_FEATURES))
    normal = expected([entry(1), entry(2), entry(3), entry(4, 5.0)], found, np.ones(3))
    assert normal.device_ns == pytest.approx([1000.0 * NUM_FEATURES] * 3)
    assert FAST_END < 50


def test_a_step_that_no_entry_knows_has_no_expectation():
    unknown = entry(1, step_ns=[None, *[1.0] * (NUM_FEATURES - 1)])
    found = np.eye(NUM_FEATURES)[:2]
    normal = expected([unknown], found, np.ones(2)).device_ns
    assert np.isnan(normal[0]) and normal[1] == 1.0
    assert expected([unknown, entry(2)], found, np.ones(2)).device_ns[0] == 1000.0


def test_a_line_is_what_it_was_made_of_and_never_below_nought():
    units = np.arange(1.0, 40.0)
    assert line(units, 300.0 + 7.0 * units).unit_ns == pytest.approx(7.0, rel=0.05)
    steep = line(units, 7.0 * units - 3.0)
    assert steep.once_ns == 0.0 and steep.unit_ns > 0
    assert line(units, 100.0 - units).unit_ns == 0.0


def test_readings_that_are_none_do_not_bend_a_line():
    units = np.arange(1.0, 41.0)
    ns = 300.0 + 7.0 * units
    spoilt = ns.copy()
    spoilt[[3, 20]] = np.nan, -1.0
    assert line(units, spoilt).at(units) == pytest.approx(line(units, ns).at(units), rel=0.02)


def test_lines_give_their_fast_end():
    assert expected_line([None, None], np.ones(1)) is None
    found = expected_line([Line(10.0, 1.0), None, Line(90.0, 1.0)], np.array([5.0]))
    assert 15.0 <= found[0] < 55.0


def test_the_newest_entries_of_each_settings_stay(tmp_path):
    path = tmp_path / "speed.json"
    add_entry("model", entry(-1, settings={"threads": 1}), path)
    for identity in range(MOST_ENTRIES + 3):
        add_entry("model", entry(identity), path)
    add_entry("model", entry(MOST_ENTRIES + 2, 2.0), path)  # the same run once more
    identities = [each.identity for each in read_entries("model", path)]
    assert identities == [-1, *range(3, MOST_ENTRIES + 3)]
    assert read_entries("another model", path) == [] and read_entries("model", tmp_path / "none") == []


def test_two_runs_that_end_together_both_leave_their_entry(tmp_path):
    path = tmp_path / "speed.json"
    with changing(path):
        other = threading.Thread(target=add_entry, args=("model", entry(2), path))
        other.start()
        other.join(0.05)
        assert other.is_alive()  # it waits
        store(SpeedFile("model", [entry(1)]), path)
    other.join()
    assert [each.identity for each in read_entries("model", path)] == [1, 2]


def test_a_file_that_cannot_be_read_is_no_reference(tmp_path):
    (tmp_path / "speed.json").write_text("{")
    assert read_entries("model", tmp_path / "speed.json") == []


def test_entries_that_another_version_recorded_are_no_reference():
    entries = msgspec.to_builtins([entry(1, step_ns=[1.0]), entry(2)])
    assert [each.identity for each in recorded_entries({"family": "model", "entries": entries})] == [2]
    assert recorded_entries({"family": "model", "entries": [{"name": 3}]}) == []


def test_formats_of_weights_are_one_family_and_models_are_not():
    meta = {"model_shape": {"vocab_size": 10, "weight_bytes": 1}, "core": {"device": "cpu"},
            "hardware": {"cpu": "x", "cores": 2}, "versions": {"sojourn": "1", "torch": "2"}}  # fmt: skip
    assert family_of(meta) == family_of(meta | {"model_shape": {"vocab_size": 10, "weight_bytes": 2}})
    for other in ({"model_shape": {"vocab_size": 11}}, {"hardware": {"cpu": "x", "cores": 4}}, {"versions": {}}):
        assert family_of(meta) != family_of(meta | other)
    assert family_of({}) is None


def test_build_of_a_foreign_engine_is_its_own_version():
    meta = {"model_shape": {"vocab_size": 10}, "core": {"device": "cpu"}, "hardware": {"cpu": "x", "cores": 2},
            "probe": {"engine": "vllm"}, "versions": {"vllm": "0.32.0", "sojourn-probe": "1"}}  # fmt: skip
    assert family_of(meta) == family_of(meta | {"versions": {"vllm": "0.32.0", "sojourn-probe": "2"}})
    assert family_of(meta) != family_of(meta | {"versions": {"vllm": "0.30.0"}})


def test_the_fast_end_is_the_percentile_of_what_is_known():
    guesses = np.random.default_rng(0).uniform(1, 9, (7, 50))
    guesses[np.random.default_rng(1).uniform(size=guesses.shape) < 0.4] = np.nan
    guesses[:, 3] = np.nan
    with warnings.catch_warnings(action="ignore"):  # of the column without any
        wanted = np.nanpercentile(guesses, FAST_END, axis=0)
    assert _fast_end(guesses) == pytest.approx(wanted, nan_ok=True)
