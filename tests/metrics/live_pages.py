"""Live servers with a known truth: planned requests, a page a second, as `tests.metrics.foreign` makes them."""

import http.server
import threading
from collections.abc import Callable
from contextlib import contextmanager

from sojourn.interop.sources.page import rows_of
from sojourn.live.watch.observer import Observer
from tests.metrics.foreign import START_NS, Life, S, VllmPage, finish, steady

Gauges = Callable[[float], tuple[int, int, float]]  # second → running, waiting, KV use


def observed(
    lives: list[Life], seconds: int, gauges: Gauges, objectives: dict[str, float] | None = None,
    page: VllmPage | None = None, observer: Observer | None = None,
) -> Observer:  # fmt: skip
    """A server that was scraped once a second from second 0 on."""
    page, before = page or VllmPage(), float("-inf")
    observer = observer or Observer("http://x", "x", objectives or {}, window_s=60.0)
    for second in range(seconds + 1):
        finish(page, lives, before, second)
        page.show(*gauges(second), 0)
        ns = START_NS + second * S
        observer.add(ns, rows_of(page.render(), ns, 0.004))
        before = second
    return observer


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
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def pages(body):
    return lambda path: (200, body) if path == "/metrics" else (404, b"")


def page(waiting: int = 0, seconds: float = 30.0) -> bytes:
    made = VllmPage()
    finish(made, steady(60, every_s=0.4), float("-inf"), seconds)
    made.show(2, waiting, 0.2, 0)
    return made.render()
