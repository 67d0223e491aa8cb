"""Verdicts on windows of a vLLM whose truth is planned: faults are named, healthy and idle ones are silent."""

import pytest

from metrics.live.document import exit_code
from metrics.live.observer import Moment, modelled_gain, seen_gain
from metrics.live.steady import GONE_S, STANDS_S, Steady
from tests.metrics.foreign import S, VllmPage, steady
from tests.metrics.live_pages import observed

BUSY = steady(100, every_s=0.4, queue_s=0.01)
WAITING = steady(100, every_s=0.4, queue_s=2.0)
SLO = {"ttft_ms": 500.0}


def test_a_healthy_server_and_an_idle_one_have_no_finding():
    healthy = observed(BUSY, 40, lambda _: (4, 0, 0.2), SLO).watched()
    assert (healthy.state, healthy.findings) == ("healthy", [])
    assert healthy.met[0].at_least == 1.0 and exit_code(healthy.state) == 0
    assert observed(BUSY, 40, lambda _: (4, 0, 0.2)).watched().state == "healthy"
    assert observed([], 20, lambda _: (0, 0, 0.0)).watched().state == "idle"


def test_figures_of_the_window_are_the_planned_ones():
    server = observed(BUSY, 40, lambda _: (4, 0, 0.2)).watched()
    assert {part.name: part.mean_ms for part in server.parts} == pytest.approx(
        {"decode": 400, "prefill": 50, "queue": 10, "rest": 4}
    )
    assert server.ttft_ms == pytest.approx(64) and server.tpot_ms == pytest.approx(20)
    assert (server.now.running, server.now.kv_use) == (4, 0.2)
    assert server.now.requests_per_s == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize("objectives", [{}, SLO], ids=["own work", "objective"])
def test_waiting_with_free_kv_and_a_batch_of_one_size_is_a_cap(objectives):
    server = observed(WAITING, 40, lambda _: (4, 6, 0.2), objectives).watched()
    assert (server.state, server.findings[0].key) == ("degraded", "batch_cap")
    assert exit_code(server.state) == 6
    assert all(fact.value == fact.value for found in server.findings for fact in found.evidence)  # no NaN


def test_waiting_beside_a_full_cache_is_the_pool():
    server = observed(WAITING, 40, lambda _: (4, 6, 0.99)).watched()
    assert server.findings[0].key == "kv_pool"


def test_a_full_device_is_overload_and_no_cap():
    """The batch grew from 8 to 16, and gave hardly more tokens."""
    lives = steady(150, every_s=0.25, queue_s=2.0)
    server = observed(lives, 40, lambda second: (8 if second < 15 else 16, 6, 0.2)).watched()
    assert (server.state, server.findings[0].key) == ("overloaded", "overload")


def test_time_that_no_metric_explains_is_no_verdict():
    slow = steady(100, every_s=0.4, prefill_s=1.5)
    server = observed(slow, 40, lambda _: (4, 0, 0.2), SLO).watched()
    assert (server.state, server.findings, exit_code(server.state)) == ("cannot tell", [], 3)
    assert any("sojourn-probe" in sentence for sentence in server.unknown)
    assert observed(slow, 40, lambda _: (4, 0, 0.2)).watched().state == "healthy"  # its own work takes so long


def test_an_objective_between_two_buckets_is_missed_for_certain_or_not_at_all():
    """TTFT is 64 ms, the buckets end at 100 and 250: a bound of 70 or 90 ms cannot be said to be missed."""
    server = observed(BUSY, 40, lambda _: (4, 0, 0.2), {"ttft_ms": 90.0}).watched()
    assert (server.met[0].at_least, server.met[0].at_most, server.state) == (0.0, 1.0, "healthy")


def test_failed_requests_are_told():
    lives = steady(100, every_s=0.4, reason="error")
    server = observed(lives, 40, lambda _: (4, 0, 0.2)).watched()
    assert server.state == "cannot tell" and "the server failed them" in server.headline


def test_a_restart_is_told_and_the_window_goes_on():
    observer = observed(BUSY, 10, lambda _: (4, 0, 0.2))
    observed(BUSY, 30, lambda _: (4, 0, 0.2), page=VllmPage(), observer=_later(observer))
    assert observer.take_events() == ["the server began anew: its counters fell"]
    assert observer.watched().state == "healthy"


def _later(observer):
    add, begin = observer.add, observer.window.answered[-1].ns
    observer.add = lambda ns, rows: add(begin + ns - 1_000 * S + S, rows)
    return observer


def test_what_a_larger_batch_gives_is_seen_or_modelled():
    def moments(sizes, rate, seconds):
        return [Moment(at * S, size, 0, 0.1, rate(size), 0.0, 1.0, float(size), seconds(size))
                for at, size in enumerate(sizes)]  # fmt: skip

    full, empty = lambda _: 100.0, lambda size: 10.0 * size
    both = [8] * 5 + [16] * 5
    assert seen_gain(moments(both, full, lambda _: 1.0)) == pytest.approx(1.0)
    assert seen_gain(moments(both, empty, lambda _: 1.0)) == pytest.approx(2.0)
    assert seen_gain(moments([16] * 10, full, lambda _: 1.0)) is None
    assert modelled_gain(moments(range(10, 40), full, lambda size: 0.001 * size)) == pytest.approx(1.0)
    assert modelled_gain(moments(range(10, 40), full, lambda size: 0.1 + 1e-6 * size)) == pytest.approx(2.0, rel=1e-3)
    assert modelled_gain(moments([16] * 20, full, lambda size: 0.001 * size)) is None


def test_a_verdict_is_said_once_it_stands_and_taken_back_once_it_is_gone():
    healthy = observed(BUSY, 40, lambda _: (4, 0, 0.2)).watched()
    capped = observed(WAITING, 40, lambda _: (4, 6, 0.2)).watched()
    steady_, said = Steady(), []
    for second in range(60):
        shown, changes = steady_.take(second * S, capped if 10 <= second < 12 or 20 <= second < 35 else healthy)
        said += [(second, change.state) for change in changes]
        assert shown.state == said[-1][1]
    assert said == [(0, "healthy"), (20 + int(STANDS_S), "degraded"), (35 + int(GONE_S), "healthy")]


def test_nothing_is_said_of_a_server_that_was_hardly_looked_at():
    shown, changes = Steady().take(0, observed(WAITING, 5, lambda _: (4, 6, 0.2)).watched())
    assert (shown.state, changes) == ("cannot tell", []) and shown.headline.startswith("Looking")
