"""Redirects: followed within one server by the statuses that keep a POST, and named elsewhere."""

import http.server
import json
import threading
from contextlib import contextmanager

import pytest

from sojourn.live.watch.fetch import MOST_REDIRECTS, fetch, within_one_server
from sojourn.loadgen.client.event_log import REDIRECTED, SENT, event_files
from sojourn.loadgen.record.parse import events_by_request
from sojourn.loadgen.target.endpoint import EndpointError, get, parse_base_url, served_models
from tests.loadgen.scenarios import replay, scenario

pytestmark = pytest.mark.server
STREAM = b"".join(
    b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]}).encode() + b"\n\n"
    for text in ("a", "b")
) + b"data: [DONE]\n\n"  # fmt: skip


@contextmanager
def redirecting(answer):
    """A server that asks `answer(path)`: a status and where it leads, or None for the answer that counts."""
    seen: list[tuple[str, str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append((self.command, self.path, body))
            found = answer(self.path)
            status, where = found or (200, "")
            kind = "text/event-stream" if self.command == "POST" else "application/json"
            reply = (STREAM if self.command == "POST" else b'{"data": [{"id": "m"}]}') if found is None else b"{}"
            self.send_response(status)
            if where:
                self.send_header("Location", where)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def load(url, folder, count=2, **target):
    return replay(scenario({"process": "at_once", "count": count}, target=target), url, folder).records


@pytest.mark.parametrize("connections", ["per_request", "reuse"])
@pytest.mark.parametrize("status", [307, 308])
@pytest.mark.parametrize("absolute", [False, True], ids=["path", "address"])
def test_a_redirect_within_the_server_is_followed_with_method_and_body(tmp_path, status, absolute, connections):
    def answer(path):
        return None if path == "/other/v1?x=1" else (status, f"{url if absolute else ''}/other/v1?x=1")

    with redirecting(answer) as (url, seen):
        records = load(url, tmp_path, connections=connections)
    assert [record.status for record in records] == ["ok", "ok"] and records[0].output_tokens is None
    assert [len(record.chunk_ns) for record in records] == [2, 2]
    assert {method for method, _, _ in seen} == {"POST"} and len({body for _, _, body in seen}) <= 2
    assert sorted(path for _, path, _ in seen) == ["/other/v1?x=1"] * 2 + ["/v1/completions"] * 2
    for _, events in events_by_request(event_files(tmp_path)):
        kinds = [kind for _, _, kind, _ in events]
        assert kinds.count(SENT) <= 1 and kinds.count(REDIRECTED) in (0, 1)  # its way counts as the server's time


def test_several_redirects_in_a_row_are_followed_and_an_endless_row_is_not(tmp_path):
    def three(path):
        step = int(path.rsplit("/", 1)[1]) if path.startswith("/s/") else 0
        return (307, f"/s/{step + 1}") if step < 3 else None

    with redirecting(three) as (url, seen):
        (record,) = load(url, tmp_path, count=1)
    assert record.status == "ok" and [path for _, path, _ in seen] == ["/v1/completions", "/s/1", "/s/2", "/s/3"]
    (tmp_path / "endless").mkdir()
    with redirecting(lambda _: (307, "/again")) as (url, seen):
        (record,) = load(url, tmp_path / "endless", count=1)
    assert record.status == "error" and "HTTP 307" in record.error and len(seen) == MOST_REDIRECTS + 1


@pytest.mark.parametrize("status, where", [
    (307, "http://localhost:{port}/v1/completions"), (308, "http://127.0.0.1:1/v1/completions"),
    (307, "https://127.0.0.1:{port}/v1/completions"), (307, "//example.invalid/v1/completions"),
    (301, "/v1/other"), (302, "/v1/other"), (303, "/v1/other"),
])  # fmt: skip
def test_a_redirect_to_another_server_or_by_a_status_that_drops_the_body_is_named(tmp_path, status, where):
    with redirecting(lambda _: (status, where.format(port=url.rsplit(":", 1)[1]))) as (url, seen):
        (record,) = load(url, tmp_path, count=1)
    assert record.status == "error" and len(seen) == 1
    for said in (f"HTTP {status}", where.split("{")[0], "give the address that answers"):
        assert said in record.error


def test_what_is_asked_beside_the_load_follows_redirects_within_the_server_only():
    with redirecting(lambda path: None if path == "/b/v1/models" else (302, "/b/v1/models")) as (url, _):
        assert served_models(parse_base_url(url)) == [{"id": "m"}]
        assert fetch(f"{url}/x", 5.0) == (200, b'{"data": [{"id": "m"}]}')
    with redirecting(lambda _: (308, "http://localhost:9/v1/models")) as (url, seen):
        assert get(parse_base_url(url), "/metrics")[0] == 308 and fetch(f"{url}/x", 5.0)[0] == 308
        with pytest.raises(EndpointError, match="redirected to another server: http://localhost:9/v1/models"):
            served_models(parse_base_url(url))
        assert len(seen) == 3


def test_address_written_another_way_is_the_same_server_and_its_path_is_sent():
    def answer(path):
        return None if path == "/b" else (302, f"{url.replace('127.0.0.1', 'LOCALHOST')}/b")

    with redirecting(answer) as (url, seen):
        assert get(parse_base_url(url.replace("127.0.0.1", "localhost")), "/x")[0] == 200
        assert [path for _, path, _ in seen] == ["/x", "/b"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_post_is_not_made_a_get_by_a_redirect(status):
    with redirecting(lambda path: None if path == "/b" else (status, "/b")) as (url, seen):
        assert fetch(f"{url}/x", 5.0, b"{}")[0] == status
        assert [(method, path) for method, path, _ in seen] == [("POST", "/x")]


@pytest.mark.parametrize("location, to", [
    ("/b", "http://h:80/b"), ("b?c=1#d", "http://h:80/a/b?c=1"), ("http://h/b", "http://h/b"), ("http://H:80/", "http://H:80/"),
    ("http://h:81/b", None), ("https://h/b", None), ("http://g/b", None), ("//g/b", None), ("ftp://h/b", None),
    ("http://h:port/", None), ("http://user@h/", None),
])  # fmt: skip
def test_a_server_is_its_scheme_host_and_port(location, to):
    assert within_one_server("http://h:80/a/x", location) == to
