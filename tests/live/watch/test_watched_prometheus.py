"""A real Prometheus that scrapes a page: its raw samples are those of the page, a scrape each."""

import time

import pytest

from sojourn.interop.sources.page import rows_of
from sojourn.live.watch.prometheus import held_scrapes, interval_s, is_prometheus
from sojourn.live.watch.watcher import watch_once
from tests.dashboards.prometheus_server import scraping
from tests.metrics.foreign import VllmPage, finish, steady
from tests.metrics.live_pages import page, pages, serving

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.server,
]
OURS = b"# TYPE sojourn_request_running gauge\nsojourn_request_running 1\n"  # for `scraping`, which waits for it
BODY = page() + OURS


def samples(rows) -> set:
    return {(row["name"], tuple(sorted(row["labels"])), row["value"]) for row in rows
            if row["name"].startswith(("vllm:", "sojourn_"))}  # fmt: skip


def test_its_samples_are_those_of_the_page(tmp_path):
    with serving(pages(BODY)) as url, scraping(tmp_path, url.removeprefix("http://"), scrapes=4) as base:
        assert is_prometheus(base) and not is_prometheus(url)
        held = held_scrapes(base, 60)
        assert len(held) >= 4 and interval_s(held) == pytest.approx(1.0, abs=0.3)
        wanted = samples(rows_of(BODY, 0, 0.0))
        assert all(samples(scrape.rows) == wanted for scrape in held)
        assert held_scrapes(base, 60, 'job="nothing"') == []
        (server,) = watch_once([base], seconds=2.0).servers
    assert server.name.startswith("127.0.0.1:") and server.scrapes >= 3


def test_an_engine_that_hangs_is_stuck_by_its_scrapes(tmp_path):
    """Two engines on one page: engine 1 stands still from the first scrape on, engine 0 goes on."""
    made, begin = VllmPage(engines=2), time.monotonic()
    alive, hung = steady(400, every_s=0.2), steady(20, every_s=0.1, engine=1)
    finish(made, hung, float("-inf"), 100)
    served = [float("-inf")]

    def body(path):
        now = time.monotonic() - begin
        finish(made, alive, served[0], now)
        served[0] = now
        made.show(2, 0, 0.2, 0)
        made.show(3, 4, 0.3, 1)
        return (200, made.render()) if path == "/metrics" else (404, b"")

    with serving(body) as url, serving(pages(OURS)) as own:
        targets = [each.removeprefix("http://") for each in (url, own)]
        with scraping(tmp_path, *targets, scrapes=13) as base:
            servers = {server.source: server for server in watch_once([base], seconds=2.0).servers}
    server = servers["vllm"]
    assert server.state == "stuck" and server.headline.startswith("Stuck: engine 1 has 3 running and 4 waiting")
