"""The normal speed of a model, measured with real steps."""

import pytest

from sojourn.engine.measure_speed import FEWEST_STEPS, MORE_SECONDS, _is_enough, measure
from sojourn.metrics.compute.speed_reference import HOST_STAGES

CASES = [(10 * FEWEST_STEPS, -0.1, False), (FEWEST_STEPS, 0.0, True), (FEWEST_STEPS - 1, 1.0, False),
         (3, MORE_SECONDS, True)]  # fmt: skip


@pytest.mark.parametrize(("steps", "over_seconds", "enough"), CASES)
def test_it_measures_for_its_time_and_longer_only_where_steps_are_few(steps, over_seconds, enough):
    assert _is_enough(steps, over_seconds) == enough


@pytest.mark.slow
def test_an_entry_of_the_bundled_model_tells_steps_stages_draws_and_texts():
    family, entry = measure("tiny-model", {"device": "cpu", "threads": 1}, seconds=0.2)
    assert "on " in family and entry.settings["threads"] == 1 and entry.steps >= FEWEST_STEPS
    assert set(entry.host) == set(HOST_STAGES) and entry.sampling.once_ns + entry.sampling.unit_ns > 0
    assert sum(ns or 0.0 for ns in entry.step_ns) > 0
    assert entry.encoding.unit_ns > 0 and entry.decoding.unit_ns > 0
