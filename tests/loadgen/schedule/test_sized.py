"""A scenario or a trace as the load that a server is sized for."""

import numpy as np
import pytest

from sojourn.loadgen.scenario.scenario import bundled_scenarios, load_scenario
from sojourn.loadgen.schedule.sized import sized_load, traced_load, traced_requests


@pytest.mark.parametrize("name", bundled_scenarios())
def test_every_bundled_scenario_is_a_load(name):
    load = sized_load(load_scenario(name), fewest=400)
    assert len(load) >= 400 and load.mean_prompt > 0 and load.mean_output > 0
    hashes = load.hashes(16)
    if hashes is not None:
        for place in range(0, len(load), 97):
            assert len(hashes(place)) == (load.prompt_tokens[place] + load.output_tokens[place]) // 16


def test_a_longer_load_keeps_the_rate_of_its_scenario():
    scenario = load_scenario("steady-chat")
    assert sized_load(scenario, 2000).rate_rps == pytest.approx(scenario.arrivals.rate_rps, rel=0.05)


def test_a_turn_finds_the_whole_conversation_before_it():
    load = sized_load(load_scenario("sessions"), 100)
    hashes = load.hashes(16)
    later = np.flatnonzero(load.follows >= 0)
    assert len(later) and hashes is not None
    for place in later.tolist():
        before = int(load.follows[place])
        assert load.prompt_tokens[place] > load.prompt_tokens[before] + load.output_tokens[before] - 1
        whole = hashes(before)
        assert hashes(place)[: len(whole)] == whole
    assert np.isnan(load.offset_s[later]).all() and (load.pause_s[later] > 0).any()


def test_a_copy_of_a_trace_shares_no_block_with_the_trace():
    load = sized_load(load_scenario("mooncake"), 500)
    count = len(sized_load(load_scenario("mooncake"), 1))
    hashes = load.hashes(16)
    assert hashes is not None and len(load) > count
    first = {block for place in range(count) for block in hashes(place)}
    second = {block for place in range(count, min(2 * count, len(load))) for block in hashes(place)}
    assert not first & second


def test_a_trace_is_a_load():
    rows, block_tokens = traced_requests("AzureLLMInferenceTrace_conv.csv")
    load = traced_load("azure", rows, block_tokens, 1000)
    assert len(load) == 1000 and not load.paths
    assert 3.87 < load.rate_rps < 20  # of the whole trace, and of its busiest part
