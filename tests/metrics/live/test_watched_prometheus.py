"""A real Prometheus that scrapes a page: its raw samples are those of the page, a scrape each."""

import pytest

from metrics.live.prometheus import held_scrapes, interval_s, is_prometheus
from metrics.live.watcher import watch_once
from metrics.sources.page import rows_of
from tests.dashboards.prometheus_server import scraping
from tests.metrics.live_pages import page, pages, serving

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.server,
]
BODY = page() + b"# TYPE sojourn_request_running gauge\nsojourn_request_running 1\n"


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
