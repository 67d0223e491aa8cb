"""A load on a device whose times are a formula: each answer can be worked out by hand."""

import numpy as np
import pytest

from sojourn.metrics.errors import ReplayError
from sojourn.replay.device.simulate import Load, server_config, simulate
from tests.replay.device.simulated_device import FormulaDevice


def closed(count: int, prompt: int, output: int, concurrency: int) -> Load:
    return Load(np.full(count, prompt), np.full(count, output), concurrency=concurrency)


def test_one_request_at_a_time_takes_the_sum_of_its_steps():
    device = FormulaDevice(base_ms=10, token_ms=0.01, host_ns=1e6)
    found = simulate(device, closed(3, prompt=100, output=11, concurrency=1))
    decode_ms = 10 + 0.01 + 1
    np.testing.assert_allclose(found.answers.ttft_ms, 10 + 1 + 1)
    np.testing.assert_allclose(found.answers.tpot_ms, decode_ms)
    np.testing.assert_allclose(found.answers.e2e_ms, 12 + 10 * decode_ms)
    assert found.steps == 33
    assert found.span_ns == pytest.approx(3 * (12 + 10 * decode_ms) * 1e6)


def test_open_loop_waits_for_its_moments():
    load = Load(np.full(3, 100), np.full(3, 1), due_ns=np.array([0.0, 1e6, 1e9]))
    found = simulate(FormulaDevice(base_ms=10, token_ms=0), load)
    np.testing.assert_allclose(found.answers.ttft_ms, [10, 19, 10])


def kinds(device: FormulaDevice) -> list[tuple[int, int]]:
    """(prompts, decodes) of each step with prompts."""
    return [(len(step.chunks), step.decodes) for step in device.asked if step.chunks]


@pytest.mark.parametrize("composition", ["mixed", "prefill-first", "whole-prompts"])
def test_a_backend_fills_its_steps_in_its_own_order(composition):
    device = FormulaDevice(composition)
    load = Load(np.full(4, 300), np.full(4, 20), due_ns=np.array([0.0, 50e6, 51e6, 52e6]))
    config = server_config(device, max_num_batched_tokens=700)
    simulate(device, load, config)
    beside = kinds(device)[1:]
    chunks = [chunk for step in device.asked for chunk in step.chunks]
    if composition == "prefill-first":
        assert all(decodes == 0 for _, decodes in beside)
    else:
        assert all(decodes for _, decodes in beside)
    cut = [new for new, past in chunks if new < 300]
    assert bool(cut) == (composition == "mixed" or composition == "prefill-first"), "only TensorRT-LLM cuts no prompt"


def test_a_prompt_longer_than_a_step_is_computed_in_several():
    device = FormulaDevice("whole-prompts")
    found = simulate(device, closed(2, 1500, 3, 2), server_config(device, max_num_batched_tokens=700))
    assert found.answers.served.all()
    assert sum(new for step in device.asked for new, _ in step.chunks) == 3000


def test_a_pool_too_small_for_a_request_is_refused():
    with pytest.raises(ReplayError, match="a request of 120 tokens does not fit in the 96"):
        simulate(FormulaDevice(kv_tokens=100), closed(2, 100, 20, 1))


def test_a_small_pool_preempts_and_still_answers():
    found = simulate(FormulaDevice(kv_tokens=400), closed(6, 64, 100, 6))
    assert found.answers.served.all() and found.preemptions > 0 and found.most_running < 6


def test_shared_blocks_are_not_computed_twice():
    hashes = [bytes([place]) * 16 for place in range(10)]
    load = Load(np.full(3, 161), np.full(3, 1), due_ns=np.array([0.0, 1e9, 2e9]), hashes=lambda number: hashes)
    device = FormulaDevice()
    found = simulate(device, load)
    assert found.cached_tokens == 320
    assert [step.chunks or step.decodes for step in device.asked] == [((161, 0),), 1, 1]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_turn_is_due_a_pause_after_the_end_of_the_turn_before(is_open):
    moments = {"due_ns": np.array([0.0, np.nan, np.nan, 5e6])} if is_open else {"concurrency": 1}
    load = Load(
        np.full(4, 100), np.full(4, 1), follows=np.array([-1, 0, 1, -1]), pause_ns=np.array([0, 2e9, 1e9, 0]), **moments
    )
    found = simulate(FormulaDevice(base_ms=10, token_ms=0), load).answers
    ends_ms = found.last_ns / 1e6
    np.testing.assert_allclose(ends_ms[:3], [10, 2020, 3030])
    assert ends_ms[3] == pytest.approx(20 if is_open else 3040)
