"""Recorded pages of /metrics: written as they were read, and served again at the pace at which they came."""

import argparse
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.engines.servers import HOST

PATHS = ("/metrics", "/health")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@contextmanager
def page_log(path: Path) -> Iterator[Callable[[int, float, bytes], None]]:
    """A function that adds a page: when it was read, the seconds that it took, and its body."""
    with gzip.open(path, "wt", encoding="utf-8") as file:

        def add(ns: int, took_s: float, body: bytes) -> None:
            entry = {"ns": ns, "took_s": took_s, "page": body.decode("utf-8", "replace")}
            file.write(json.dumps(entry) + "\n")

        yield add


def read_pages(path: Path) -> Iterator[tuple[int, float, bytes]]:
    """When a page was read (ns of the monotonic clock), the seconds that it took, and the page; oldest first."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            yield entry["ns"], entry["took_s"], entry["page"].encode("utf-8")


@contextmanager
def served(path: Path, port: int = 0) -> Iterator[str]:
    """The address of a server whose /metrics is that of the record, second by second from now on.

    The last page stays. Everything else than /metrics and /health is answered with 404.
    """
    pages = [(ns, body) for ns, _, body in read_pages(path)]
    begin_ns = time.monotonic_ns()

    def page_now() -> bytes:
        at_ns = pages[0][0] + time.monotonic_ns() - begin_ns
        return next((body for ns, body in reversed(pages) if ns <= at_ns), pages[0][1])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path.split("?")[0]
            body = page_now() if known == "/metrics" else b""
            self.send_response(200 if known in PATHS else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # a tool that has read enough
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", type=Path, help="a file that bench.watch.cases wrote")
    parser.add_argument("--port", type=int, default=0)
    chosen = parser.parse_args()
    with served(chosen.pages, chosen.port) as url:
        print(url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
