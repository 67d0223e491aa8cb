"""Scraping: on its grid, before the first request and after the last, and honest about what failed or came late."""

import http.server
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from sojourn.interop.sources.scrapes import DURATION, UP, scrape_summary
from sojourn.loadgen.target import scrape
from sojourn.loadgen.target.endpoint import parse_base_url
from sojourn.loadgen.target.processes import free_port
from sojourn.loadgen.target.scrape import Scraper, rows_of
from sojourn.metrics.run.directory import RunDirectory

PAGE = b"# TYPE served counter\nserved_total 3\n"


class PageServer:
    """Answers GET /metrics as `answer` says: a body, or None for an error 500."""

    def __init__(self, answer: Callable[[int], bytes | None]):
        self.asked = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(handler):
                self.asked += 1
                body = answer(self.asked)
                handler.send_response(200 if body is not None else 500)
                handler.end_headers()
                handler.wfile.write(body or b"")

            def log_message(handler, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def endpoint(self):
        return parse_base_url(f"http://127.0.0.1:{self._server.server_port}")


def test_first_scrape_ends_before_start_returns_and_the_last_begins_after_stop(tmp_path):
    server = PageServer(lambda asked: PAGE)
    scraper = Scraper(server.endpoint, tmp_path, interval_s=2.0)
    assert scraper.start() and server.asked == 1
    scraper.stop()
    assert server.asked == 2 and scraper.failed == scraper.skipped == 0
    rows = RunDirectory(tmp_path).table("scrapes")
    assert sorted(rows.name) == sorted([UP, DURATION, "served_total"] * 2)
    assert rows.ns.nunique() == 2 and rows[rows.name == "served_total"].value.tolist() == [3, 3]


@pytest.mark.parametrize("answer", [lambda asked: None, lambda asked: b"", lambda asked: b"<html>not metrics</html>"])
def test_server_without_metrics_is_left_alone(tmp_path, answer):
    server = PageServer(answer)
    scraper = Scraper(server.endpoint, tmp_path, interval_s=0.01)
    assert not scraper.start()
    scraper.stop()
    assert server.asked == 1 and scraper.failed == 0 and RunDirectory(tmp_path).table("scrapes").empty
    assert not Scraper(parse_base_url(f"http://127.0.0.1:{free_port()}"), tmp_path).start()


def test_failed_scrapes_are_counted_and_recorded_as_such(tmp_path):
    server = PageServer(lambda asked: None if asked in (2, 4) else PAGE)
    scraper = Scraper(server.endpoint, tmp_path, interval_s=0.05)
    scraper.start()
    while server.asked < 6:
        time.sleep(0.01)
    scraper.stop()
    taken = scrape_summary(RunDirectory(tmp_path))
    assert scraper.failed == taken.failed == 2 and len(taken.answered_ns) == server.asked - 2


def test_page_slower_than_the_interval_skips_the_turns_that_it_missed(tmp_path, monkeypatch):
    """Planted clock: the first page of the thread takes 0.45 s, the others no time."""
    now_s, asked_at_s = [100.0], []

    def page(endpoint):
        asked_at_s.append(now_s[0])
        now_s[0] += 0.45 if len(asked_at_s) == 1 else 0.0
        return rows_of(PAGE, round(now_s[0] * 1e9), took_s=now_s[0] - asked_at_s[-1])

    class Stopping:
        def wait(self, timeout_s: float) -> bool:
            now_s[0] += timeout_s
            return len(asked_at_s) == 4

    clock = SimpleNamespace(monotonic=lambda: now_s[0], monotonic_ns=lambda: 0, time_ns=time.time_ns)
    monkeypatch.setattr(scrape, "time", clock)
    monkeypatch.setattr(scrape, "scrape", page)
    scraper = Scraper(parse_base_url("http://127.0.0.1:1"), tmp_path, interval_s=0.1)
    monkeypatch.setattr(scraper, "_stopping", Stopping())
    scraper._run()
    # The first page is read at 100.55 s: the turns of 100.2 to 100.4 s have passed, that of 100.5 s is late.
    assert asked_at_s == pytest.approx([100.1, 100.55, 100.6, 100.7, 100.8])
    assert (scraper.skipped, scraper.failed) == (3, 0)


@pytest.mark.slow
def test_real_page_slower_than_the_interval_is_not_asked_for_more_often_to_make_up(tmp_path):
    server = PageServer(lambda asked: time.sleep(0.45 if asked == 2 else 0) or PAGE)
    scraper = Scraper(server.endpoint, tmp_path, interval_s=0.1)
    began = time.monotonic()
    scraper.start()
    while server.asked < 6:
        time.sleep(0.005)
    lasted = time.monotonic() - began
    scraper.stop()
    # The second page comes at 0.55 s: turns at 0.2 to 0.4 s have passed, and the sixth request is due at 0.8 s.
    assert scraper.skipped >= 3 and lasted > 0.7
    assert scrape_summary(RunDirectory(tmp_path)).slowest_s >= 0.45


def test_rows_of_a_page_carry_its_moment_and_its_labels():
    rows = rows_of(b'a{x="1",y="\\"q\\""} 2.5\n', 77, took_s=0.25)
    assert rows[0] == {"ns": 77, "name": "a", "labels": [("x", "1"), ("y", '"q"')], "value": 2.5}
    assert [(row["name"], row["value"]) for row in rows[1:]] == [(UP, 1.0), (DURATION, 0.25)]
