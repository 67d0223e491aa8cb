"""Live servers with a known truth: planned requests and their pages, as `tests.metrics.foreign` makes them."""

import http.server
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count

from sojourn.interop.sources.page import rows_of
from sojourn.live.watch.observer import Observer
from tests.metrics.foreign import START_NS, Life, S, VllmPage, finish, steady

Gauges = Callable[[float], tuple[int, int, float]]  # second → running, waiting, KV use

EVERY_S = 2


def observed(
    lives: list[Life], seconds: int, gauges: Gauges, objectives: dict[str, float] | None = None,
    page: VllmPage | None = None, observer: Observer | None = None,
) -> Observer:  # fmt: skip
    """A server that was scraped every other second from second 0 on."""
    shown = tuple(gauges(second) for second in range(0, seconds + 1, EVERY_S))
    observer = observer or Observer("http://x", "x", objectives or {}, window_s=60.0)
    for ns, rows in _scrapes(tuple(lives), shown) if page is None else _scraped(page, lives, shown):
        observer.add(ns, rows)
    return observer


@cache
def _scrapes(lives: tuple[Life, ...], shown: tuple[tuple[int, int, float], ...]) -> list[tuple[int, list[dict]]]:
    """Of a fresh page of vLLM; several tests ask for the same ones."""
    return list(_scraped(VllmPage(), lives, shown))


def _scraped(page: VllmPage, lives: Sequence[Life], shown: Sequence[tuple[int, int, float]]):
    before = float("-inf")
    for second, gauges in zip(count(step=EVERY_S), shown, strict=False):
        finish(page, lives, before, second)
        page.show(*gauges, 0)
        ns = START_NS + second * S
        yield ns, rows_of(page.render(), ns, 0.004)
        before = second


@contextmanager
def serving(answer):
    """An HTTP server that answers a path by (status, body), or with where a redirect leads; None closes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = answer(self.path)
            if found is None:
                self.close_connection = True
                return
            self.send_response(found[0])
            if len(found) > 2:
                self.send_header("Location", found[2])
            self.end_headers()
            self.wfile.write(found[1])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def pages(body):
    return lambda path: (200, body) if path == "/metrics" else (404, b"")


def working():
    """Answers as a server that ends ten requests per second."""
    made, began, seen = VllmPage(), time.monotonic(), [float("-inf")]
    lives = steady(600, every_s=0.1)

    def answer(path):
        now = time.monotonic() - began + 5.0
        finish(made, lives, seen[0], now)
        made.show(2, 0, 0.2, 0)
        seen[0] = now
        return (200, made.render()) if path == "/metrics" else (404, b"")

    return answer


def page(waiting: int = 0, seconds: float = 30.0) -> bytes:
    made = VllmPage()
    finish(made, steady(60, every_s=0.4), float("-inf"), seconds)
    made.show(2, waiting, 0.2, 0)
    return made.render()
