"""What a watch says of a vLLM that is simulated step by step: one verdict, whatever it is told, and soon."""

from itertools import pairwise

import pytest

from sojourn.interop.sources.page import read_page
from sojourn.live.watch.observer import Observer
from sojourn.live.watch.steady import Steady
from tests.live.watch.simulated_vllm import Device, Load, SimulatedVllm

S = 1_000_000_000
SLO = {"ttft_ms": 1000.0, "tpot_ms": 75.0}
BUSY_CPU = Device(step_s=0.012, prompt_token_s=0.0006, decode_s=0.0035)  # serves 5 of the usual requests per second
FREE = Device(step_s=0.012, prompt_token_s=0.0006, decode_s=0.0005)
SHORT_PROMPTS = Device(step_s=0.012, prompt_token_s=0.0001, decode_s=0.0005)
LONG = Load(3, prompt_tokens=1900, output_tokens=5)
# Situation → server, seconds, the second in which the watch begins, and what may be its last word (first finding).
SITUATIONS = {
    "overload after a quiet time": (
        dict(loads=(Load(1, 0, 20), Load(10, 20)), cap=128, device=BUSY_CPU),
        75, 0, "overloaded", {"overload", "batch_cap"}),
    "overload from the start": (
        dict(loads=(Load(10),), cap=128, device=BUSY_CPU), 70, 0, "overloaded", {"overload", "batch_cap"}),
    "overload that the watch came late to": (
        dict(loads=(Load(10),), cap=128, device=BUSY_CPU), 80, 50, "overloaded", {"overload", "batch_cap"}),
    "cap of 1": (dict(loads=(Load(3.5),), cap=1, device=FREE), 50, 0, "degraded", {"batch_cap"}),
    "cap of 2": (dict(loads=(Load(4.5),), cap=2, device=FREE), 50, 0, "degraded", {"batch_cap"}),
    "cap of 4": (dict(loads=(Load(8),), cap=4, device=FREE), 50, 0, "degraded", {"batch_cap"}),
    "cap of 16": (dict(loads=(Load(25),), cap=16, device=SHORT_PROMPTS), 40, 0, "overloaded", {"batch_cap"}),
    "cap of 16 on a full device": (
        dict(loads=(Load(10),), cap=16, device=BUSY_CPU), 50, 0, "overloaded", {"batch_cap", "overload"}),
    "prompts fill the steps": (dict(loads=(LONG,), device=FREE), 60, 0, "overloaded", {"overload"}),
    "small KV pool": (
        dict(loads=(Load(4, prompt_tokens=150, output_tokens=230),), kv_tokens=2560, device=FREE),
        50, 0, "degraded", {"kv_pool"}),
    "a third of the load": (dict(loads=(Load(1.7),), device=BUSY_CPU), 80, 0, "healthy", set()),
    "half of the load": (dict(loads=(Load(2.6),), device=BUSY_CPU), 80, 0, "healthy", set()),
}  # fmt: skip
ALWAYS = {"overload after a quiet time", "cap of 2", "prompts fill the steps", "small KV pool", "half of the load"}


def said(settings: dict, seconds: int, begin: int, objectives: dict) -> tuple[list, Observer]:
    """(second, state, first finding) of each change, and the observer at the end."""
    observer, steady, changes = Observer("x", "x", objectives, window_s=60.0), Steady(), []
    for second, body in SimulatedVllm(**settings).pages(seconds):
        if second < begin:
            continue
        if body:
            observer.add(second * S, *read_page(body, second * S, 0.01, observer.window.wants))
        else:
            observer.add_failure(second * S, "no answer within 5 s")
        for change in steady.take(second * S, observer.watched())[1]:
            found = observer.watched().findings
            changes.append((second, change.state, found[0].key if found else "", change.sentence))
    return changes, observer


@pytest.mark.parametrize("objectives", [{}, SLO], ids=["plain", "objectives"])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough) for name in SITUATIONS
])  # fmt: skip
def test_the_cause_is_named_and_stays(name, objectives):
    settings, seconds, begin, state, keys = SITUATIONS[name]
    changes, observer = said(settings, seconds, begin, objectives)
    assert changes[-1][1] == state and changes[-1][2] in (keys or {""}), changes
    assert observer.watched().state == state
    assert "full device" not in name or "the device may be full" in changes[-1][3]  # the cap alone is not the cause
    named = [each for each in changes if each[2]]
    assert {key for _, _, key, _ in named} <= keys, changes
    assert all(before[1:3] != after[1:3] for before, after in pairwise(changes))
    assert len([each for each in changes if each[1] == "healthy"]) <= 1, changes


CHAT = Load(1.5)
HUGE = Load(1 / 15, prompt_tokens=8000, output_tokens=5, burst=1)
# Situation → server, seconds, the states that may be said, and the last one with the second by which it is.
COURSES = {
    "overload that ends": (
        dict(loads=(Load(8, 0, 60),), cap=64, device=BUSY_CPU), 130, {"healthy", "cannot tell", "overloaded"},
        ("idle", 120)),
    "load that steps up and down": (
        dict(loads=(Load(1), Load(8, 40, 70)), cap=64, device=BUSY_CPU), 130, {"overloaded", "cannot tell"},
        ("healthy", 125)),
    "restart into an overload": (
        dict(loads=(Load(2, 0, 40), Load(9, 40)), cap=64, device=BUSY_CPU, restart_s=40), 80,
        {"healthy", "cannot tell"}, ("overloaded", 70)),
    "restart out of an overload": (
        dict(loads=(Load(9, 0, 40), Load(2, 40)), cap=64, device=BUSY_CPU, restart_s=40), 70,
        {"healthy", "cannot tell", "overloaded"}, ("healthy", 52)),
    "long prompts at times": (dict(loads=(CHAT, HUGE), device=FREE), 160, {"healthy", "cannot tell", "degraded"}, None),
    "bursts": (dict(loads=(Load(0.3), Load(1, burst=40)), device=BUSY_CPU), 160, {"healthy", "cannot tell"}, None),
    "all clients give up": (
        dict(loads=(Load(9, patience_s=4),), cap=64, device=BUSY_CPU), 60, set(), ("cannot tell", 10)),
    "one of two engines hangs": (
        dict(loads=(Load(2),), device=BUSY_CPU, engines=2, hangs=(40, 80)), 75, {"healthy"}, ("stuck", 52)),
    "two engines": (dict(loads=(Load(2),), device=BUSY_CPU, engines=2), 60, set(), ("healthy", 10)),
    "preemptions": (
        dict(loads=(Load(6, prompt_tokens=150, output_tokens=230),), kv_tokens=2560, device=FREE), 60, set(),
        ("degraded", 10)),
    "prompts from the cache": (
        dict(loads=(Load(2, prompt_tokens=1000, cached=0.9),), device=FREE), 60, set(), ("healthy", 10)),
    "ten minutes at a third": (dict(loads=(Load(1.6),), device=BUSY_CPU), 600, set(), ("healthy", 10)),
    "a step of five seconds": (
        dict(loads=(Load(2),), device=BUSY_CPU, hangs=(40.0, 45.0)), 90, {"healthy", "degraded"}, ("healthy", 80)),
}  # fmt: skip
SOON = {"all clients give up", "a step of five seconds"}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("objectives", [{}, SLO], ids=["plain", "objectives"])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in SOON else pytest.mark.thorough) for name in COURSES
])  # fmt: skip
def test_a_course_is_followed(name, objectives, seed):
    """What is said follows the server within half a minute, and does not flip where nothing changes."""
    settings, seconds, before, last = COURSES[name]
    changes, _ = said(settings | {"seed": seed}, seconds, 0, objectives)
    states = [state for _, state, _, _ in changes]
    if last is None:
        assert set(states) <= before and len(states) == len(set(states)), changes
        return
    state, by = last
    assert states[-1] == state and changes[-1][0] <= by, changes
    assert set(states[:-1]) <= before | {"healthy"} and len(states) <= 5, changes


QUIET_THEN_CHAT = (Load(2, 0, 36), Load(1.5, 41))
OVERLOAD_THEN_CHAT = (Load(9, 0, 40), Load(1.5, 60))
# What stops → server, and the second in which it does. A stopped front ends a scrape each five seconds.
STOPS = {
    "requests in flight": (dict(loads=(Load(2),)), 40, "hangs"),
    "none in flight, and some come": (dict(loads=QUIET_THEN_CHAT), 40, "hangs"),
    "after an overload": (dict(loads=OVERLOAD_THEN_CHAT, cap=128), 110, "hangs"),
    "the front": (dict(loads=(Load(2),)), 40, "front_stops"),
}


@pytest.mark.parametrize("seconds", [5, 22, pytest.param(10, marks=pytest.mark.thorough),
                                     pytest.param(60, marks=pytest.mark.thorough)])  # fmt: skip
@pytest.mark.parametrize("stops", STOPS)
def test_what_stops_is_named_while_it_does_and_is_the_cause_of_what_is_late_then(stops, seconds):
    settings, at, what = STOPS[stops]
    end = at + seconds
    changes, observer = said(settings | {what: (at, end), "device": BUSY_CPU}, end + 35, 0, {})
    during = [state for second, state, *_ in changes if at + 1 < second < end]
    after = [(state, sentence) for second, state, _, sentence in changes if second > end]
    if seconds >= 20:
        assert ("unreachable" if what == "front_stops" else "stuck") in during, changes
    assert not {"idle", "healthy", "overloaded"} & set(during), changes
    assert not observer.watched().findings
    for state, sentence in after:
        assert state == "healthy" or "No token came" in sentence or "stood still" in sentence, changes


def test_connections_that_stay_open_at_an_idle_server_are_in_doubt_and_a_pool_of_them_is_not():
    """Each second two more, until they give up, or all at once: no token comes in both."""
    for per_s, states in ((2, ["idle", "stuck", "cannot tell"]), (50, ["idle"])):
        observer, steady, found = Observer("x", "x", {}, window_s=60.0), Steady(), []
        server = SimulatedVllm(loads=(), idle_fds=39)
        for second, _ in server.pages(60):
            server.idle_fds += per_s if 20 <= second < 20 + 50 // per_s else -50 * (second == 55)
            server.show_files()
            observer.add(second * S, *read_page(server.page.render(), second * S, 0.01, observer.window.wants))
            found += [each.state for each in steady.take(second * S, observer.watched())[1]]
        assert found == states


@pytest.mark.parametrize("objectives", [{}, SLO], ids=["plain", "objectives"])
def test_a_stall_that_is_over_is_the_cause_of_its_backlog(objectives):
    settings = dict(loads=(Load(2),), device=BUSY_CPU, hangs=(30.0, 60.0))
    changes, observer = said(settings, 90, 0, objectives)
    assert [state for _, state, _, _ in changes] == ["healthy", "stuck", "degraded"], changes
    assert "stood still for" in changes[-1][3] and not observer.watched().findings


def test_a_line_within_a_step_is_no_line():
    """Some 5 requests come while a step of half a second runs: none of them waits longer."""
    device = Device(step_s=0.5, prompt_token_s=0.0, decode_s=0.0)
    changes, _ = said(dict(loads=(Load(10, output_tokens=4),), device=device), 40, 0, {})
    assert {state for _, state, _, _ in changes} == {"healthy"}, changes


@pytest.mark.parametrize("budget", [16, pytest.param(32, marks=pytest.mark.thorough)])
def test_prompts_in_many_short_steps_are_neither_a_cap_nor_an_overload(budget):
    """A token budget far below the prompts leaves few running: so few are no limit on the batch."""
    load = Load(3, prompt_tokens=900, output_tokens=25)
    changes, _ = said(dict(loads=(load,), budget=budget, device=SHORT_PROMPTS), 45, 0, {"ttft_ms": 500.0})
    assert not {key for _, _, key, _ in changes} & {"batch_cap", "overload"}, changes
