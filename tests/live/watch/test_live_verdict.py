"""Verdicts on windows of a vLLM whose truth is planned: faults are named, healthy and idle ones are silent."""

from dataclasses import replace

import pytest
from msgspec import structs

from sojourn.interop.sources.gain import gap_gain
from sojourn.live.watch.document import exit_code
from sojourn.live.watch.moments import Moment, modelled_gain, seen_gain
from sojourn.live.watch.steady import GONE_S, STANDS_S, Steady
from tests.metrics.foreign import S, VllmPage, finish, steady
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
    """TTFT is 64 ms, the first bucket ends at 100: a bound of 70 or 90 ms is neither missed nor met for certain."""
    server = observed(BUSY, 40, lambda _: (4, 0, 0.2), {"ttft_ms": 90.0}).watched()
    assert (server.met[0].at_least, server.met[0].at_most, server.state) == (0.0, 1.0, "cannot tell")
    assert server.met[0].between_ms == (0.0, 100.0)
    assert "counts at 100 ms" in server.headline and "0% and 100%" in server.headline
    between = observed(BUSY, 40, lambda _: (4, 0, 0.2), {"tpot_ms": 15.0}).watched()
    assert between.state == "cannot tell" and "counts at 10 and 25 ms" in between.headline
    exact = observed(BUSY, 40, lambda _: (4, 0, 0.2), {"ttft_ms": 100.0}).watched()
    assert exact.state == "healthy" and exact.met[0].between_ms is None


def test_nothing_is_healthy_that_was_not_checked():
    for lives, objectives, why in (
        (steady(100, every_s=0.4, reason="abort"), {}, "given up by their clients"),
        (steady(100, every_s=0.4, output_tokens=1), SLO | {"tpot_ms": 50.0}, None),
        (steady(40, every_s=1.0, decode_s=500.0), {"tpot_ms": 50.0}, "shows its tpot yet"),
        (steady(4, every_s=9.0, queue_s=2.0), {}, "too few for a verdict"),
    ):
        waiting = 2 if why and "few" in why else 0
        server = observed(lives, 30, lambda _, line=waiting: (4, line, 0.2), objectives).watched()
        assert why is None or (server.state, why in server.headline) == ("cannot tell", True), server.headline
    begun = observed(steady(40, every_s=1.0, decode_s=500.0), 40, lambda _: (3, 0, 0.2)).watched()
    assert begun.state == "healthy" and "none ended yet" in begun.headline


@pytest.mark.parametrize("objectives", [{}, SLO, {"tpot_ms": 50.0}], ids=["own work", "objective", "another objective"])
@pytest.mark.parametrize("lives", [steady(20, every_s=2.0), steady(20, every_s=2.0, reason="abort"), []],
                         ids=["few end soon", "clients leave", "none ends"])  # fmt: skip
def test_requests_that_wait_are_lost_time_before_any_histogram_shows_them(lives, objectives):
    server = observed(lives, 40, lambda _: (1, 190, 0.3), objectives).watched()
    assert server.state in ("degraded", "overloaded", "cannot tell") and "190 requests wait" in server.headline


def test_a_line_that_empties_in_time_is_healthy():
    """Ten wait, and ten end each second: a second each."""
    server = observed(steady(400, every_s=0.1), 40, lambda _: (20, 10, 0.3)).watched()
    assert server.state == "healthy"


def test_failed_requests_are_told():
    lives = steady(100, every_s=0.4, reason="error")
    server = observed(lives, 40, lambda _: (4, 0, 0.2)).watched()
    assert server.state == "cannot tell" and "the server failed them" in server.headline


@pytest.mark.parametrize("created", [False, True], ids=["counters fall", "counters are larger"])
@pytest.mark.parametrize("objectives", [{}, SLO], ids=["own work", "objective"])
def test_no_figure_crosses_a_restart(objectives, created):
    """A healthy server, then one in which all wait: of the first nothing is left from the first page on."""
    observer, steady = observed(BUSY, 30, lambda _: (4, 0, 0.2), objectives), Steady()
    assert steady.take(observer.window.last_ns, observer.watched())[0].state == "healthy"
    page = _used_page(observer) if created else VllmPage()
    shown = []

    def judge(observer):
        shown.append(steady.take(observer.window.last_ns, observer.watched())[0])

    observed(WAITING, 14, lambda _: (4, 6, 0.2), page=page, observer=_later(observer, judge))
    assert observer.take_events() == ["the server began anew: its counters fell"]
    early = [each for each in shown if each.window_s < 10]
    assert len(early) == 5 and {each.state for each in early} == {"cannot tell"}
    assert all("Looking" in each.headline and not each.findings for each in early)
    for server in shown:
        assert (server.view.finished if server.view else 0) <= 2.5 * server.window_s + 1
        assert max((each.requests for each in server.met), default=0) <= 2.5 * server.window_s + 2
        assert server.now is None or (server.now.requests_per_s or 0) < 4
    assert shown[-1].findings[0].key == "batch_cap" and observer.batch_gain() is None
    moments = [each for each in observer.history if each.ns == observer.window.first_ns]
    assert [each.output_tokens_per_s for each in moments] == [None]


def _used_page(observer):
    """A page that has counted more of everything than the last one of the observer."""
    page = VllmPage()
    finish(page, BUSY * 3, float("-inf"), 1e9)
    return page


def _later(observer, then=lambda observer: None):
    add, begin = observer.add, observer.window.answered[-1].ns

    def added(ns, rows):
        add(begin + ns - 1_000 * S + S, rows)
        then(observer)

    observer.add = added
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


def test_where_no_gain_was_seen_both_a_cap_and_a_full_device_are_named():
    small, large = (observed(WAITING, 40, lambda _: (cap, 6, 0.2), SLO).watched() for cap in (4, 64))  # noqa: B023
    assert [each.key for each in small.findings] == ["batch_cap"] and small.state == "degraded"
    assert [each.key for each in large.findings] == ["batch_cap", "overload"] and "because either" in large.headline
    assert large.state == "overloaded"
    for server in (small, large):
        assert any("the batch has not varied" in sentence for sentence in server.unknown)


@pytest.mark.parametrize(
    ("gap_ms", "gain"),
    [
        (lambda batch: 4 + 0.0 * batch, None),
        (lambda batch: 4 + 0.4 * batch, 1.14),
        (lambda batch: 4 + 0.05 * batch, 1.56),
        (lambda batch: 0.5 * batch, 1.0),
    ],
)
def test_gaps_at_several_batches_tell_what_twice_the_batch_gives(gap_ms, gain):
    def moments(batches):
        return [(gap_ms(batch) / 1e3, float(batch)) for batch in batches]

    seen = gap_gain(moments([1, 8, 32, 32, 32, 32, 31, 32]))
    assert seen == (gain if gain is None else pytest.approx(gain, abs=0.01))
    assert gap_gain(moments([32] * 20)) is None and gap_gain(moments([1, 2, 3, 3, 3, 3])) is None


def test_a_pool_without_room_for_a_prompt_is_full():
    """64 blocks of 16 hold five prompts of 200 tokens: at 85 % no further one fits."""
    lives = steady(100, every_s=0.4, queue_s=2.0, prompt_tokens=200)
    page = VllmPage()
    small = observed(lives, 40, lambda _: (4, 6, 0.85), page=SmallPool()).watched()
    assert [each.key for each in small.findings] == ["kv_pool"]
    assert "kv_pool" not in {
        each.key for each in observed(lives, 40, lambda _: (4, 6, 0.85), page=page).watched().findings
    }


class SmallPool(VllmPage):
    def render(self) -> bytes:
        return super().render().replace(b'num_gpu_blocks="4096"', b'num_gpu_blocks="64"')


@pytest.mark.parametrize("caching", [False, True])
def test_prompts_that_take_the_time_beside_a_cache_that_is_off(caching):
    lives = steady(100, every_s=0.4, prefill_s=0.6, prompt_tokens=900)
    server = observed(lives, 40, lambda _: (4, 0, 0.2), SLO, page=VllmPage(prefix_caching=caching)).watched()
    assert [each.key for each in server.findings] == ([] if caching else ["prefix_cache_off"])
    if not caching:
        assert any(not fact.supports for fact in server.findings[0].evidence)  # nobody knows whether they repeat


class StallingPage(VllmPage):
    """One gap in ten is of 300 ms, the others of 5 ms."""

    def finished(self, life):
        own, observe = self.of[life.engine]["itl"], self.of[life.engine]["itl"].observe
        own.observe = lambda _: None
        super().finished(life)
        own.observe = observe
        for gap in range(life.output_tokens - 1):
            observe(0.3 if gap % 10 == 0 else 0.005)


@pytest.mark.parametrize(("page", "prompt_tokens", "keys"), [
    (StallingPage, (50, 50, 900), ["token_budget_large"]), (StallingPage, (900,), []), (StallingPage, (5,), []),
    (VllmPage, (50, 50, 900), []),
], ids=["stalls beside long prompts", "prompts of one length", "stalls without prompts", "even gaps"])  # fmt: skip
def test_tokens_that_stall_beside_long_prompts(page, prompt_tokens, keys):
    lives = steady(100, every_s=0.4, decode_s=0.7)
    lives = [replace(each, prompt_tokens=prompt_tokens[place % len(prompt_tokens)]) for place, each in enumerate(lives)]
    server = observed(lives, 40, lambda _: (4, 0, 0.2), {"tpot_ms": 10.0}, page=page()).watched()
    assert [each.key for each in server.findings] == keys
    assert server.state == ("degraded" if keys else "cannot tell")


def test_a_verdict_is_said_once_it_stands_and_taken_back_once_it_is_gone():
    healthy = observed(BUSY, 40, lambda _: (4, 0, 0.2)).watched()
    capped = observed(WAITING, 40, lambda _: (4, 6, 0.2)).watched()
    steady_, said = Steady(), []
    for second in range(60):
        shown, changes = steady_.take(second * S, capped if 10 <= second < 12 or 20 <= second < 35 else healthy)
        said += [(second, change.state) for change in changes]
        assert shown.state == said[-1][1]
    assert said == [(0, "healthy"), (20 + int(STANDS_S), "degraded"), (35 + int(GONE_S), "healthy")]


def test_findings_that_alternate_are_said_too():
    healthy = observed(BUSY, 11, lambda _: (4, 0, 0.2)).watched()
    capped = observed(WAITING, 11, lambda _: (4, 6, 0.2)).watched()
    overloaded = structs.replace(capped, state="overloaded", findings=capped.findings[1:])
    steady_, said = Steady(), []
    for second in range(40):
        now = healthy if second < 10 else (capped if second % 2 else overloaded)
        _, changes = steady_.take(second * S, now)
        said += [(second, change.state) for change in changes]
    assert said == [(0, "healthy"), (10 + int(STANDS_S), "degraded")]


def test_nothing_is_said_of_a_server_that_was_hardly_looked_at():
    shown, changes = Steady().take(0, observed(WAITING, 5, lambda _: (4, 6, 0.2)).watched())
    assert (shown.state, changes) == ("cannot tell", []) and shown.headline.startswith("Looking")


@pytest.mark.parametrize("shown", [97.0, -0.1, 1.01])
def test_a_kv_use_outside_0_to_1_is_unknown_and_told(shown):
    server = observed(BUSY, 40, lambda _: (4, 0, shown)).watched()
    assert server.now.kv_use is None
    assert any("kv_cache_usage_perc" in each and f"{shown:g}" in each for each in server.unknown)


def test_a_kv_use_of_1_with_a_rounding_error_is_a_share():
    server = observed(BUSY, 40, lambda _: (4, 0, 1.0 + 1e-7)).watched()
    assert server.now.kv_use is not None
    assert not any("no share" in each for each in server.unknown)
