"""What is planned for each request of a foreign server is what its scrapes tell, through restarts, gaps and ranks."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from sojourn.interop.sources import scrapes
from sojourn.interop.sources.pressure import KV_USE, RUNNING, WAITING
from sojourn.interop.sources.view import ServerView, observe, timeline
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.foreign import START_NS, Life, S, SglangPage, VllmPage, foreign_run, steady

QUEUE_S = 0.3
LIVES = steady(60, queue_s=QUEUE_S, cached_tokens=40)


@cache
def viewed_at(path: Path) -> ServerView:
    run = RunDirectory.open(path)
    requests = run.requests()
    return observe(run, requests, requests)


def viewed(run: RunDirectory) -> ServerView:
    return viewed_at(run.path)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> RunDirectory:
    return foreign_run(tmp_path_factory.mktemp("vllm") / "run", LIVES, VllmPage())


@pytest.fixture(scope="module")
def sglang(tmp_path_factory) -> RunDirectory:
    return foreign_run(tmp_path_factory.mktemp("sglang") / "run", LIVES, SglangPage())


def test_spans_of_vllm_are_the_planned_times(vllm):
    view = viewed(vllm)
    means = {span.name: span.mean_ms for span in view.spans}
    assert means == pytest.approx({"queue": 300, "prefill": 50, "decode": 400})
    life = LIVES[0]
    latency_ms, ttft_ms = 1e3 * (life.read_last_s - life.due_s), 1e3 * (life.read_first_s - life.due_s)
    assert {s.name: s.share for s in view.spans} == pytest.approx({k: v / latency_ms for k, v in means.items()})
    to_first = {s.name: s.ttft_share for s in view.spans}
    assert to_first == {"queue": pytest.approx(300 / ttft_ms), "prefill": pytest.approx(50 / ttft_ms), "decode": None}


def test_what_no_metric_explains_is_inside_or_outside_of_the_server_s_own_latency(vllm):
    view, life = viewed(vllm), LIVES[0]
    assert view.inside_ms == pytest.approx(1e3 * (life.encode_s + life.back_s), abs=1e-3)
    assert view.outside_ms == pytest.approx(1e3 * (life.way_in_s + life.way_out_s), abs=1e-3)
    lag_ms = 1e3 * life.lag_s
    whole = sum(span.mean_ms for span in view.spans) + view.inside_ms + view.outside_ms + lag_ms
    assert whole == pytest.approx(1e3 * (life.read_last_s - life.due_s))


def test_totals_gauges_and_latencies_stand_under_our_names(vllm):
    view = viewed(vllm)
    assert view.totals['sojourn_request_finished_total{outcome="length"}'] == 60
    assert view.totals['sojourn_request_finished_total{outcome="stop"}'] == 0
    assert view.totals["sojourn_token_prompt_tokens_total"] == 6000
    assert view.totals["sojourn_token_generated_tokens_total"] == 60 * 21
    assert view.totals['sojourn_memory_prefix_tokens_total{result="miss"}'] == 3600
    assert view.hit_rate == pytest.approx(0.4) and view.preemptions == 0 and view.finished == 60
    ttft = view.latencies["sojourn_request_ttft_seconds"]
    assert ttft.count == 60 and ttft.mean == pytest.approx(0.354) and ttft.between["p99"] == (0.25, 0.5)
    assert view.latencies["sojourn_request_itl_seconds"].mean == pytest.approx(0.02)
    assert view.gauges[KV_USE].largest == 0.3
    assert view.reported_settings == {"block_size": "16", "num_kv_blocks": "4096", "prefix_caching": "True"}
    assert "sojourn_token_step_tokens" not in view.latencies  # vLLM's books whole prompts


def test_client_and_server_count_the_same(vllm):
    counts = {pair.what: (pair.client, pair.server) for pair in viewed(vllm).agreement}
    assert counts == {"finished requests": (60, 60), "prompt tokens": (6000, 6000), "output tokens": (1260, 1260)}


def test_every_account_is_told_to_be_seen_or_not_with_the_reason(vllm, sglang):
    for run, title in ((vllm, "vLLM"), (sglang, "SGLang")):
        view = viewed(run)
        assert [account.account for account in view.accounts] == [info.name for info in ACCOUNTS]
        assert view.title == title and all(account.why for account in view.accounts)
        sights = {account.account: account.visibility for account in view.accounts}
        assert sights["client.lag"] == "seen" and sights["request.queue"] == "partly"
        assert sights["request.interference"] == sights["request.stream"] == "unseen"


def test_spans_of_sglang_are_the_planned_times(sglang):
    view, life = viewed(sglang), LIVES[0]
    means = {span.name: span.mean_ms for span in view.spans}
    assert means == pytest.approx({"receive": 1, "queue": 300, "prefill": 50, "decode": 400})  # decode: e2e less TTFT
    assert view.hit_rate == pytest.approx(0.4) and view.preemptions == 0
    assert view.totals["sojourn_request_finished_total"] == 60
    assert view.latencies["sojourn_request_tpot_seconds"].mean == pytest.approx(0.02)
    assert view.outside_ms == pytest.approx(1e3 * (life.way_in_s + life.way_out_s), abs=1e-3)
    assert view.device_busy == pytest.approx(60 * 0.1 / (view.seconds * _running_share(sglang)), rel=1e-6)


def _running_share(run: RunDirectory) -> float:
    running = timeline(run)[RUNNING]
    return float((running[running.index >= START_NS] > 0).mean())


def test_ranks_that_repeat_what_others_say_count_once(tmp_path):
    """Two replicas of two ranks each; the second replica's first rank is 2. With priorities a total stands beside."""
    lives = [replace(life, engine=number % 2) for number, life in enumerate(LIVES)]
    page = SglangPage(ranks=[(0, 0), (0, 1), (1, 2), (1, 3)], priorities=True)
    run = foreign_run(tmp_path / "run", lives, page, engines=2)
    view = viewed(run)
    assert {span.name: span.requests for span in view.spans} == {
        "receive": 60,
        "queue": 60,
        "prefill": 60,
        "decode": 60,
    }
    assert view.hit_rate == pytest.approx(0.4)
    single = timeline(foreign_run(tmp_path / "single", LIVES, SglangPage()))
    assert timeline(run)[RUNNING].tolist() == single[RUNNING].tolist()


def test_engines_are_summed_and_of_their_pools_the_fullest_is_shown(tmp_path):
    lives = [replace(life, engine=number % 3 == 0) for number, life in enumerate(LIVES)]
    run = foreign_run(tmp_path / "run", lives, VllmPage(engines=2), engines=2)
    view = viewed(run)
    assert view.finished == 60 and {span.name: span.mean_ms for span in view.spans}["queue"] == pytest.approx(300)
    assert view.gauges[KV_USE].largest == 0.3  # not 0.6
    one = viewed(foreign_run(tmp_path / "one", LIVES, VllmPage()))
    assert view.gauges[WAITING] == one.gauges[WAITING] and view.gauges[RUNNING] == one.gauges[RUNNING]


def test_counters_that_a_restart_reset_go_on_where_they_were(tmp_path):
    run = foreign_run(tmp_path / "run", LIVES, VllmPage(), restart_at_s=7.001, fresh=VllmPage())
    view = viewed(run)
    assert view.restarts == 1 and view.finished == 60
    assert {span.name: span.mean_ms for span in view.spans}["queue"] == pytest.approx(300)
    assert all(value >= 0 for value in view.totals.values())


def test_what_a_restart_took_with_it_is_missing_and_not_invented(tmp_path):
    run = foreign_run(tmp_path / "run", LIVES, VllmPage(), restart_at_s=8.6, fresh=VllmPage())
    lost = sum(8.0 < life.last_s <= 8.6 for life in LIVES)  # since the last scrape
    assert lost > 0 and viewed(run).finished == 60 - lost


def test_failed_scrapes_are_counted_and_cost_no_counts(tmp_path):
    view = viewed(foreign_run(tmp_path / "run", LIVES, VllmPage(), silent=(3.0, 9.0)))
    assert view.failed_scrapes == 6 and view.longest_gap_s == 7.0 and view.finished == 60 and view.restarts == 0
    assert view.slowest_scrape_s == 0.004


def test_warm_up_is_left_out_of_the_means_and_kept_in_the_counts(tmp_path):
    lives = [replace(life, queue_s=2.0 if life.due_s < 5 else QUEUE_S) for life in LIVES]
    run = foreign_run(tmp_path / "run", lives, VllmPage())
    requests = run.requests()
    view = observe(run, requests, requests[requests.due_ns >= START_NS + 8 * S].reset_index(drop=True))
    assert {span.name: span.mean_ms for span in view.spans}["queue"] == pytest.approx(300)
    assert view.finished < 60 and view.agreement[0].client == view.agreement[0].server == 60


def test_what_the_server_counted_for_others_shows_in_the_counts(tmp_path):
    page = VllmPage()
    run = foreign_run(tmp_path / "run", LIVES, _Shared(page))
    counts = {pair.what: pair.server - pair.client for pair in viewed(run).agreement}
    assert counts == {"finished requests": 60, "prompt tokens": 6000, "output tokens": 1260}


class _Shared:
    """A page of a server that serves each of our requests' twin for somebody else."""

    def __init__(self, page: VllmPage):
        self.page = page
        self.show, self.render = page.show, page.render

    def prefilled(self, life: Life) -> None:
        self.page.prefilled(life), self.page.prefilled(life)

    def finished(self, life: Life) -> None:
        self.page.finished(life), self.page.finished(life)


def test_waiting_is_told_with_the_room_that_there_was(tmp_path):
    crowd = [Life(due_s=0.1 * n, queue_s=0.15 * n, prefill_s=0.05, decode_s=0.45) for n in range(40)]
    waiting = viewed(foreign_run(tmp_path / "run", crowd, VllmPage(), kv_use=0.4)).waiting
    assert waiting.samples >= 5 and waiting.with_kv_free == 1 and waiting.with_kv_full == 0
    full = viewed(foreign_run(tmp_path / "full", crowd, VllmPage(), kv_use=0.99)).waiting
    assert full.with_kv_free < 0.5 < full.with_kv_full


def test_timeline_has_a_point_a_scrape_and_sums_to_the_totals(vllm, sglang):
    """SGLang's series appear with their first event: what they show then is all growth."""
    for run in (vllm, sglang):
        series, view = timeline(run), viewed(run)
        assert len(series) == view.scrapes == len(scrapes.scrape_summary(run).answered_ns)
        for name, total in view.totals.items():
            assert (series[name].sum() if name in series else 0) == pytest.approx(total), name


def test_run_without_scrapes_or_of_an_unknown_server_has_no_view(tmp_path, vllm):
    nothing = foreign_run(tmp_path / "run", LIVES, VllmPage())
    (nothing.path / "scrapes.parquet").unlink()
    assert viewed(nothing) is None and timeline(nothing).empty and scrapes.scrape_summary(nothing).longest_gap_s == 0


def test_server_that_finished_nothing_shows_no_span_and_no_zero(tmp_path):
    view = viewed(foreign_run(tmp_path / "run", [], VllmPage()))
    assert view.spans == [] and view.finished == 0 and view.server_ms is None and view.latencies == {}
    assert view.hit_rate is None and view.agreement[0].client == 0


def test_view_survives_the_way_to_disk(vllm):
    view = viewed(vllm)
    assert msgspec.json.decode(msgspec.json.encode(view), type=ServerView) == view
