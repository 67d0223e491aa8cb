"""A search by lines and shared simulations finds what halving finds with simulations of its own."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from sojourn.replay.device.estimate import Deployment
from sojourn.replay.device.roofline import Roofline
from sojourn.replay.device.simulate import server_config
from sojourn.replay.sizing.corrected import CorrectedEstimate, Correction
from sojourn.replay.sizing.limit import Server, largest_rate, largest_slots
from sojourn.replay.sizing.load import plain_load
from sojourn.replay.sizing.search import Tried, search
from tests.replay.device.simulated_device import FormulaDevice

# Margins by value: a queue near its capacity, a straight line, a cliff, a curve that is flat until a cliff, a backlog.
CURVES = {
    "queue": lambda x: 3.01 * (1 - x / 90.4), "line": lambda x: 40.5 / x, "cliff": lambda x: 50.0 if x < 37.2 else 0.02,
    "flat": lambda x: 1.3 - (x / 80) ** 9, "backlog": lambda x: 1.9 - x / 100 if x < 51.3 else math.nan,
}  # fmt: skip


def halved(is_kept, low: float, high: float, tolerance: float) -> float:
    """The largest that is kept, between one that is and one that is not."""
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return low


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("start", [11.0, 30.0, 170.0])
def test_a_search_finds_what_halving_finds(name, start):
    curve = CURVES[name]

    def run(value: float) -> Tried:
        margin = curve(value)
        return Tried(value, margin >= 1, margin if margin > 0 else math.nan)

    for tolerance in (0.1, 0.03):
        found, plain = search(run, start, tolerance), halved(lambda x: curve(x) >= 1, 0.1, 1e4, 1e-9)
        assert found.kept.value <= plain * (1 + 1e-6) and plain * (1 - 1e-6) <= found.missed.value
        assert found.width <= 1 + 1.01 * tolerance
        assert len(found.tried) <= 14
    whole = search(run, round(start), 0.0, most=900)
    assert (whole.kept.value, whole.missed.value) == (math.floor(plain), math.floor(plain) + 1)


def test_a_line_takes_few_trials():
    for curve in (CURVES["queue"], lambda x: 2.2 * (1 - x / 140)):
        found = search(lambda x: Tried(x, curve(x) >= 1, curve(x) if curve(x) > 0 else math.nan), 30.0, 0.03)  # noqa: B023
        assert len(found.tried) <= 5


def test_the_smallest_and_the_largest_number_end_a_search():
    for most in (10, None):
        none = search(lambda value: Tried(value, is_kept=False, margin=0.5, is_least=value <= 1), 6.0, 0.0, most=most)
        assert none.kept is None and none.missed.value <= 1 < none.tried[1].value
    everything = search(lambda value: Tried(value, is_kept=True, margin=2.0), 6.0, 0.0, most=10)
    assert everything.missed is None and everything.kept.value == 10


DEVICES = {
    "a host": FormulaDevice(base_ms=4, token_ms=0.05, host_ns=3e6),
    "prompts first": FormulaDevice("prefill-first", base_ms=6, token_ms=0.02, host_ns=1e6),
    "whole prompts": FormulaDevice("whole-prompts", base_ms=6, token_ms=0.02),
    "a small pool": FormulaDevice(base_ms=4, token_ms=0.1, kv_tokens=2000),
    "peak rates": Roofline(Deployment(model="Llama-3.1-8B", device="l40s")),
}  # fmt: skip
LOAD = plain_load(120, 12, 400)
BOUNDS = [{"klass": "all", "ttft_ms": 400.0, "tpot_ms": 45.0}]


def slow(server: Server, factor: float) -> Server:
    """With simulations of its own."""
    correction = Correction(decode=factor, prompt=factor, host_ns=factor * server.estimate.host_ns)
    return Server(CorrectedEstimate(server.estimate, correction), server.config, server.load, BOUNDS, at_a_time=20)


@pytest.mark.parametrize("name", DEVICES)
def test_a_slower_server_is_the_same_simulation_by_another_clock(name):
    device = DEVICES[name]
    server = Server(device, server_config(device), LOAD, BOUNDS, at_a_time=20)
    for factor in (3.0, 0.7):
        for value, closed in ((12.0, False), (9, True)):
            server.trial(value, closed=closed)
            own = value if closed else value / factor
            made, plain = len(server._made), slow(server, factor).trial(own, closed=closed)
            shared = server.slower(factor).trial(own, closed=closed)
            assert len(server._made) == made
            said, own_said = (
                {k: v for k, v in msgspec.structs.asdict(each).items() if v is not None} for each in (shared, plain)
            )
            quantiles = {name: (said.pop(name), own_said.pop(name)) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
            assert said == pytest.approx(own_said, rel=1e-4)
            assert all(one == pytest.approx(two, rel=1e-4) for one, two in quantiles.values())


@pytest.mark.parametrize("name", DEVICES)
def test_a_search_that_finds_no_miss_says_that_its_load_was_too_short(name):
    """Also one that finds the trials of another made."""
    server = Server(DEVICES[name], server_config(DEVICES[name]), plain_load(30, 12, 100), None, at_a_time=20)
    for factor in (1.0, 1.0, 1.3, 1.6, 0.8, 0.7, 1.0):
        found = largest_rate(server.slower(factor), 0.9, 5.0)
        assert (found.missed is None) == found.ends_early


@pytest.mark.parametrize("name", DEVICES)
def test_limits_of_slower_servers_are_those_of_simulations_of_their_own(name):
    device = DEVICES[name]
    server = Server(device, server_config(device), LOAD, BOUNDS, at_a_time=20)
    largest_rate(server, 0.9, 5.0)
    for factor in (1.0, 1.6, 0.8):
        found, alone = largest_rate(server.slower(factor), 0.9, 5.0), slow(server, factor)
        assert alone.at_rate(found.kept.rate_rps).is_kept(0.9) and found.missed.rate_rps < 1.031 * found.kept.rate_rps
        assert not alone.at_rate(found.missed.rate_rps).is_kept(0.9)
        slots = largest_slots(server.slower(factor), 0.9, 5)
        assert slots.missed is None or not alone.at_slots(slots.missed.slots).is_kept(0.9)
        assert slots.kept is None or alone.at_slots(slots.kept.slots).is_kept(0.9)


def test_pauses_do_not_become_longer_on_a_slower_device():
    places = np.arange(len(LOAD))
    paused = replace(LOAD, follows=np.where(places % 4, places - 1, -1), pause_s=np.full(len(LOAD), 0.2))
    server = Server(DEVICES["a host"], server_config(DEVICES["a host"]), paused, BOUNDS, at_a_time=20)
    whole, own, plain = (each.at_slots(8).served_rps for each in (server, server.slower(2.0), slow(server, 2.0)))
    assert own == plain and own != pytest.approx(whole / 2, rel=0.01)
