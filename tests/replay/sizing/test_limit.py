"""The largest load of a device whose times are a formula can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from sojourn.replay.device.estimate import DeviceStep
from sojourn.replay.device.recorded_steps import error_of_mean
from sojourn.replay.device.simulate import server_config
from sojourn.replay.sizing.corrected import CorrectedEstimate, Correction
from sojourn.replay.sizing.limit import Server, largest_rate, largest_slots
from sojourn.replay.sizing.load import SizedLoad
from tests.replay.device.simulated_device import FormulaDevice


def even_load(count: int = 600, prompt: int = 50, output: int = 11, rate: float = 10.0, **more) -> SizedLoad:
    return SizedLoad(
        name="even", klass=np.full(count, "all", dtype=object), prompt_tokens=np.full(count, prompt),
        output_tokens=np.full(count, output), offset_s=np.arange(count) / rate, follows=np.full(count, -1),
        pause_s=np.zeros(count), **more,
    )  # fmt: skip


def server(device, load: SizedLoad, **bounds: float) -> Server:
    return Server(device, server_config(device), load, [{"klass": "all", **bounds}])


def test_the_largest_rate_is_that_of_a_full_device():
    """A step takes 1 ms for each of its tokens, and a request has 50 + 10 of them."""
    device = FormulaDevice(base_ms=0, token_ms=1.0)
    found = largest_rate(server(device, even_load(), ttft_ms=1000.0), 0.9, start_rps=5.0)
    assert found.kept is not None and found.missed is not None
    assert found.kept.rate_rps == pytest.approx(1000 / 60, rel=0.06)
    assert not found.missed.keeps_up or found.missed.attainment < 0.9


def test_tokens_per_second_of_an_open_load_are_its_rate_times_its_answers():
    """Long answers of few requests: the time in which the last ones end is no part of the rate."""
    load = even_load(100, prompt=1, output=401)
    trial = server(FormulaDevice(base_ms=10, token_ms=0.001), load, ttft_ms=1000.0).at_rate(10.0)
    assert trial.keeps_up and trial.output_tokens_per_s == pytest.approx(10 * 401, rel=0.01)
    assert trial.in_flight == pytest.approx(10 * trial.mean_e2e_ms / 1e3)


def test_a_bound_on_tokens_ends_a_closed_loop_at_its_batch():
    """A decode step of n sequences takes 10 + n ms. Prompts of one token cost as much as a decode."""
    device = FormulaDevice(base_ms=10, token_ms=1.0)
    found = largest_slots(server(device, even_load(prompt=1, output=101), tpot_ms=30.5), 0.9, start=3)
    assert found.kept is not None and found.kept.slots == 20
    assert found.missed is not None and found.missed.slots == 21


@pytest.mark.parametrize("spread", [0, 90])
def test_tokens_per_second_of_a_closed_loop_are_those_of_full_slots(spread):
    """The time in which the last slots run empty is no part of them. A step of 20 sequences takes 30 ms."""
    outputs = np.random.default_rng(1).integers(101 - spread, 102 + spread, 600)
    load = replace(even_load(prompt=1), output_tokens=outputs)
    trial = server(FormulaDevice(base_ms=10, token_ms=1.0), load, tpot_ms=1e6).at_slots(20)
    assert trial.in_flight == pytest.approx(20, rel=0.01)
    assert trial.output_tokens_per_s == pytest.approx(20 / 0.030, rel=0.005)


def test_an_impossible_bound_keeps_nothing():
    device = FormulaDevice(base_ms=100)
    assert largest_rate(server(device, even_load(), tpot_ms=20.0), 0.9, 5.0).kept is None


def test_a_correction_changes_decodes_and_prompts_apart():
    device = FormulaDevice(base_ms=10, token_ms=0.1)
    twice = CorrectedEstimate(device, Correction(decode=2.0, prompt=3.0, host_ns=5.0, kv_tokens=7, source="a run"))
    decodes, both = DeviceStep((), 10, 100), DeviceStep(((50, 0),), 10, 100)
    assert twice.device_ns(decodes) == pytest.approx(2 * 11e6)
    assert twice.device_ns(both) == pytest.approx(2 * 11e6 + 3 * 5e6)
    assert (twice.host_ns, twice.kv_tokens) == (5.0, 7) and "a run" in twice.provenance


def test_shared_segments_give_shared_blocks():
    load = even_load(3, prompt=40, output=8, paths=[[("a", 32)], [("a", 32)], [("b", 32)]])
    hashes = load.hashes(16)
    assert hashes is not None
    one, two, three = (hashes(request) for request in range(3))
    assert len(one) == 3 and one[:2] == two[:2] and one[2] != two[2] and not set(one) & set(three)
    found = server(FormulaDevice(), even_load(300, prompt=40, paths=[[("a", 32)]] * 300), ttft_ms=1e6).at_rate(1.0)
    assert found.hit_rate == pytest.approx(32 / 40, abs=0.01)


def test_an_interval_from_a_mean_error_holds_80_percent():
    errors = np.random.default_rng(1).normal(0, 0.1, 100_000)
    found = error_of_mean("a fit", float(np.abs(errors).mean()))
    assert ((found.low <= 1 + errors) & (1 + errors <= found.high)).mean() == pytest.approx(0.8, abs=0.01)
    assert found.median == pytest.approx(np.median(np.abs(errors)), rel=0.02)
    assert found.p90 == pytest.approx(np.quantile(np.abs(errors), 0.9), rel=0.02)
