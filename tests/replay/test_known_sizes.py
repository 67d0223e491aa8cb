"""Sizes of steps that a run never had get their time from other runs of the model, as slow as the run was."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pandas as pd
import pytest

from sojourn.metrics.compute.speed_reference import SPEED_SETTINGS, SpeedEntry, settings_of
from sojourn.metrics.records import STAGES
from sojourn.replay.known_sizes import known_sizes
from sojourn.replay.spread import LEAST_ERROR_BEYOND, USUAL_ERROR_BEYOND, _error_beyond
from sojourn.replay.step_fit import StepTimes
from sojourn.replay.steps_table import step_columns

US = 1_000
SHAPE = {
    "vocab_size": 100, "hidden_size": 8, "attention_parameters": 100, "mlp_parameters": 100, "pair_flops": 4,
    "windows": [[None, 1]], "kv_bytes_per_token": 8, "weight_bytes": 100, "experts": None,
}  # fmt: skip
ENGINE = dict.fromkeys(SPEED_SETTINGS, "auto")
# 1 ms a step; 200 µs a row to the fourth, then 20 µs: a batch of nine costs little more than one of four.
NORMAL = [1000 * US, 0, 0, 0, 100 * US, 0, 0, 200 * US, *[20 * US] * 5]


def entry(number: int, factor: float = 1.0) -> SpeedEntry:
    return SpeedEntry(
        name=f"run {number}", identity=number, measured_at="", settings=settings_of({"core": {}}, ENGINE),
        step_ns=[factor * ns for ns in NORMAL], steps=1000,
    )  # fmt: skip


def meta(*entries: SpeedEntry) -> dict:
    reference = {"family": "f", "entries": [{**_fields(each)} for each in entries]}
    return {"model_shape": SHAPE, "core": {"device": "cpu"}, "engine": ENGINE, "speed_reference": reference}


def _fields(each: SpeedEntry) -> dict:
    names = ("name", "identity", "measured_at", "settings", "step_ns", "steps", "most_decodes", "largest_tokens")
    return {name: getattr(each, name) for name in names}


def of_sizes(each: SpeedEntry, most_decodes: float, largest_tokens: float) -> SpeedEntry:
    return msgspec.structs.replace(each, most_decodes=most_decodes, largest_tokens=largest_tokens)


def small_steps(slowdown: float) -> pd.DataFrame:
    """One or two decodes a step, and a prompt of sixty tokens in every tenth."""
    rows = []
    for number in range(300):
        decodes = 1 + number % 2
        new = [1] * decodes + [60] * (number % 10 == 0)
        tokens = sum(new)
        device = 1000 + 200 * min(tokens - 1, 3) + 20 * max(tokens - 4, 0) + 100 * (len(new) > decodes)
        rows.append(
            {"step": number, "begin_ns": number * 10**7, "device_ns": slowdown * device * US, "sampling_ns": 0,
             "device_end_ns": None, "new_tokens": np.array(new), "past_tokens": np.array([100] * len(new)),
             "kinds": ["decode"] * decodes + ["prefill"] * (len(new) - decodes), "graph": "eager",
             "padding_tokens": 0, "logit_rows": len(new), **{f"stage_{stage}_ns": 1000 for stage in STAGES}}
        )  # fmt: skip
    return pd.DataFrame(rows)


def time_of_nine(slowdown: float, *entries: SpeedEntry) -> float:
    steps = small_steps(slowdown)
    columns = step_columns(steps, overlap=False)
    known = known_sizes(meta(*entries), steps, columns)
    times = StepTimes(columns, None if known is None else known.steps)
    return times.device_ns(9, 9, 9 * 101, 0, 0, 9)


@pytest.mark.parametrize("slowdown", [1.0, 2.5])
def test_a_batch_that_the_run_never_had_takes_what_other_runs_say_times_the_slowdown_of_this_one(slowdown):
    usual = 1000 + 3 * 200 + 5 * 20
    assert time_of_nine(slowdown, entry(1), entry(2, 1.4)) == pytest.approx(slowdown * usual * US, rel=0.03)
    assert time_of_nine(slowdown) > 1.3 * slowdown * usual * US  # its own line goes on


def test_entries_that_differ_in_speed_show_how_much_runs_differ():
    steps = small_steps(1.0)
    columns = step_columns(steps, overlap=False)
    alike = known_sizes(meta(entry(1), entry(2), entry(3)), steps, columns)
    differing = known_sizes(meta(entry(1), entry(2, 1.1), entry(3, 1.2)), steps, columns)
    assert alike.speed_spread == pytest.approx(0, abs=1e-6) and differing.speed_spread == pytest.approx(0.13, abs=0.03)
    assert differing.error == pytest.approx(0, abs=1e-6)  # in the shape they agree
    assert known_sizes(meta(entry(1)), steps, columns).error is None


def test_nothing_is_taken_from_runs_of_other_settings():
    steps = small_steps(1.0)
    found = meta(entry(1)) | {"engine": ENGINE | {"dtype": "float16"}}
    assert known_sizes(found, steps, step_columns(steps, overlap=False)) is None


def test_runs_that_had_no_such_steps_tell_nothing_of_them_however_well_they_agree():
    steps = small_steps(1.0)
    columns = step_columns(steps, overlap=False)
    small = [of_sizes(entry(number), most_decodes=1, largest_tokens=61) for number in (1, 2, 3)]
    alone = known_sizes(meta(*small), steps, columns)
    assert not alone.tells_beyond and alone.error is None and alone.speed_spread is not None
    found = known_sizes(meta(*small, of_sizes(entry(4), most_decodes=32, largest_tokens=64)), steps, columns)
    assert (
        found.tells_beyond and found.steps.decodes.max() == 48 and found.error is None
    )  # one entry alone agrees with itself
    times = StepTimes(columns, found.steps)
    assert times.told_decodes == 48 and times.told_tokens == 1.5 * 61
    longer_ns = times.device_ns(1000, 0, 0, 1, 0, 1) - times.device_ns(200, 0, 0, 1, 0, 1)
    assert longer_ns == pytest.approx(800 * 20 * US, rel=0.2)  # the last slope goes on


def test_the_error_beyond_the_run_is_largest_where_nothing_is_known():
    times = SimpleNamespace(error=0.02)
    errors = [_error_beyond(SimpleNamespace(known=known, times=times)) for known in (
        None, SimpleNamespace(tells_beyond=False, error=None), SimpleNamespace(tells_beyond=True, error=None),
        SimpleNamespace(tells_beyond=True, error=0.001))]  # fmt: skip
    assert errors == [USUAL_ERROR_BEYOND, USUAL_ERROR_BEYOND, USUAL_ERROR_BEYOND / 2, LEAST_ERROR_BEYOND]


def test_sizes_in_a_gap_of_the_run_are_told_by_other_runs():
    columns = step_columns(small_steps(1.0), overlap=False)
    found = known_sizes(meta(entry(1)), small_steps(1.0), columns).steps
    prompts = found.tokens[found.decodes == 0]
    assert 16 in prompts and 48 not in prompts  # the run has steps of 61 and 62 tokens with prompts


def test_the_host_takes_what_the_run_took_times_what_other_runs_say_of_more_sequences():
    columns = step_columns(small_steps(1.0), overlap=False)
    told = meta(entry(1))
    told["speed_reference"]["entries"][0]["host"] = {stage: {"once_ns": 900.0, "unit_ns": 100.0} for stage in STAGES}
    found = known_sizes(told, small_steps(1.0), columns).steps
    alone = found.chunks == 0
    usual = 1000 * (900 + 100 * found.decodes[alone]) / (900 + 100 * 1.5)  # the run has one or two sequences a step
    assert found.publish_ns[alone] == pytest.approx(usual, rel=0.06) and not found.publish_ns[~alone].any()
