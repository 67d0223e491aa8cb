"""The threads that watch: what answers with garbage, vanishes and comes back is told in a sentence, and watched on."""

import json
import time
from urllib.parse import parse_qs, urlsplit

import pytest

from sojourn.interop.sources.registry import SOURCES
from sojourn.live.watch.fetch import base_of
from sojourn.live.watch.observer import Observer
from sojourn.live.watch.watcher import Watched, Watcher, watch_once
from sojourn.metrics.errors import InputError
from tests.metrics.foreign import VllmPage, finish, steady
from tests.metrics.live_pages import observed, page, pages, serving, working


def until(condition, seconds: float = 5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda _: (404, b""), "has no /metrics (HTTP 404); SGLang needs --enable-metrics"),
        (lambda _: (200, b"<html>a = b {"), "is no Prometheus text"),
        (lambda _: (200, b"go_threads 4\n"), "no family of Sojourn, vLLM, SGLang"),
        (lambda _: (503, b""), "answers HTTP 503"),
        (lambda _: None, "no server answers"),
    ],
    ids=["without metrics", "garbage", "another program", "not ready", "closes"],
)
def test_what_cannot_be_read_is_told(answer, sentence):
    with serving(answer) as url:
        found = watch_once([url], seconds=5.0, interval_s=0.05)
    assert found.state == "unreachable" and sentence in found.headline


def test_a_server_that_vanishes_and_comes_back_is_watched_on():
    state = {"up": True}
    answer = pages(page())
    with serving(lambda path: answer(path) if state["up"] else None) as url:
        watcher = Watcher([url], interval_s=0.05).start()
        try:
            until(lambda: watcher.watch().servers[0].scrapes > 3)
            state["up"] = False
            until(lambda: watcher.watch().state == "unreachable")
            state["up"] = True
            until(lambda: watcher.watch().state != "unreachable")
            said = [change.sentence for change in watcher.changes()]
        finally:
            watcher.stop()
    assert any("no server answers" in each for each in said) and "the server answers again" in said


def test_several_servers_have_a_line_each():
    with serving(working()) as one, serving(lambda _: (404, b"")) as other:
        found = watch_once([one, f"{one}/v1", other], seconds=1.5, interval_s=0.1)
    assert [server.state for server in found.servers] == ["healthy", "unreachable"]
    assert found.state == "unreachable" and found.headline.startswith(other)


def held(path: str, now_s: float, targets=("a:1", "b:2"), *, clock_s=None, every_s=5, silent_s=0) -> tuple[int, bytes]:
    """A Prometheus that scraped engines until `now_s`, the last one until so many seconds before, and itself. Its clock
    is at `clock_s`."""
    parts = urlsplit(path)
    if parts.path != "/api/v1/query":
        return 404, b""
    asked = parse_qs(parts.query)["query"][0]
    if asked == "1":
        return 200, json.dumps({"status": "success", "data": {"resultType": "scalar", "result": [0, "1"]}}).encode()
    if asked == "time()":
        told = [now_s if clock_s is None else clock_s, "the same"]
        return 200, json.dumps({"status": "success", "data": {"resultType": "scalar", "result": told}}).encode()
    names = "|".join(f"{source.prefix}.+" for source in SOURCES)
    assert asked.startswith(f'{{__name__=~"{names}|process_start_time_seconds|process_open_fds|ray_(vllm')
    series: dict[tuple, list] = {}
    for target in targets:
        made, before = VllmPage(), float("-inf")
        for second in range(0, 24 * every_s + 1 - (silent_s if target == targets[-1] else 0), every_s):
            finish(made, steady(400, every_s=0.4, queue_s=2.0 if target == "b:2" else 0.0), before, second)
            made.show(4, 6 if target == "b:2" else 0, 0.2, 0)
            before = second
            for family in made.registry.collect():
                for sample in family.samples:
                    labels = sample.labels | {"__name__": sample.name, "instance": target, "job": "vllm"}
                    key = tuple(sorted(labels.items()))
                    series.setdefault(key, []).append([now_s - 24 * every_s + second, str(sample.value)])
    result = [{"metric": dict(key), "values": values} for key, values in series.items()]
    own = {"__name__": "process_start_time_seconds", "instance": "self", "job": "prometheus"}
    result.append({"metric": own, "values": [[now_s, "1"]]})
    return 200, json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()


def test_a_prometheus_gives_each_server_its_verdict_at_once():
    now_s = time.time()
    with serving(lambda path: held(path, now_s)) as url:
        began = time.monotonic()
        found = watch_once([url], seconds=60.0)
        assert time.monotonic() - began < 20
    states = {server.name: server.state for server in found.servers}
    assert states == {"a:1 (vllm)": "healthy", "b:2 (vllm)": "degraded"}
    assert found.state == "degraded" and found.servers[1].findings[0].key == "batch_cap"


def test_an_engine_that_a_prometheus_scrapes_no_more_is_unreachable_at_once():
    """It scrapes every 5 s by a clock that is an hour ahead. The second one has no scrape of the last 30 s."""
    now_s = time.time() + 3600
    with serving(lambda path: held(path, now_s, silent_s=30)) as url:
        found = watch_once([url], seconds=60.0)
    states = {server.name: server.state for server in found.servers}
    assert states == {"a:1 (vllm)": "healthy", "b:2 (vllm)": "unreachable"}
    assert f"the Prometheus at {url} has no scrape of it since" in found.servers[1].headline


def test_an_engine_that_dies_behind_a_prometheus_is_unreachable_until_it_answers_again():
    moment = {"last_s": time.time(), "clock_s": time.time()}

    def answer(path):
        return held(path, moment["last_s"], ("a:1",), clock_s=moment["clock_s"], every_s=1)

    with serving(answer) as url:
        watcher = Watcher([url], interval_s=0.05, window_s=10.0).start()
        try:
            until(lambda: watcher.watch().state == "healthy")
            moment["clock_s"] += 20
            until(lambda: watcher.watch().state == "unreachable")
            moment["last_s"] += 20
            until(lambda: watcher.watch().state == "healthy")
            said = [change.sentence for change in watcher.changes()]
        finally:
            watcher.stop()
    assert any("has no scrape of it since" in each for each in said) and "the server answers again" in said


def test_a_watch_that_nobody_asked_for_too_long_stays_over():
    watcher = Watcher(["http://127.0.0.1:9"], unasked_s=0.05)
    watcher.watch()
    assert not watcher.is_over
    time.sleep(0.1)
    assert watcher.is_over
    watcher.watch()
    assert watcher.is_over


def test_what_would_have_no_effect_is_refused(tmp_path):
    with (
        serving(lambda path: held(path, time.time())) as url,
        pytest.raises(InputError, match="leave --server-run out"),
    ):
        Watcher([url], records=[tmp_path])
    with pytest.raises(InputError, match="leave --server-run out"):
        Watcher(["http://127.0.0.1:9"], records=[tmp_path], prometheus=["http://127.0.0.1:9"])
    with pytest.raises(InputError, match="leave --select out"):
        Watcher(["http://127.0.0.1:9"], select='job="vllm"')


def test_a_window_that_is_shorter_than_the_first_look_gets_its_verdict():
    observer = observed(
        steady(20, every_s=0.4), 5, lambda _: (4, 0, 0.2), observer=Observer("x", "x", {}, window_s=3.0)
    )
    watched = Watched(observer)
    (change,) = watched.judge(0)
    assert change.state == watched.shown.state == "healthy"


def test_a_redirect_to_another_server_is_not_followed():
    """Its target would get the key."""
    asked = []

    def answer(path):
        asked.append(path)
        return (404, b"") if path.startswith("/api") else (302, b"", "http://localhost:9/metrics")

    with serving(answer) as url:
        found = watch_once([url], seconds=5.0, interval_s=0.05)
    assert "answers HTTP 302" in found.headline and set(asked) == {"/api/v1/query?query=1", "/metrics"}


def test_a_page_that_redirects_within_its_server_is_read():
    """As an application does that is mounted at /metrics/."""
    pages_of = {"/metrics": (307, b"", "/metrics/"), "/metrics/": (200, page())}
    with serving(lambda path: pages_of.get(path, (404, b""))) as url:
        (server,) = watch_once([url], seconds=0.5, interval_s=0.05).servers
    assert server.source == "vllm"


def test_an_address_that_is_none_is_refused():
    assert base_of("127.0.0.1:8000/v1/") == "http://127.0.0.1:8000" == base_of("http://127.0.0.1:8000/metrics")
    for url in ("ftp://x", "http://", "http://x:99999", "http://u:p@x", "http://x?key=1"):
        with pytest.raises(InputError):
            base_of(url)
