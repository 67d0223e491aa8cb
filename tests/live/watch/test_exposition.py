"""What a watch exports for a Prometheus: its findings with the series that they were found in."""

import socket
import urllib.error
import urllib.request

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from sojourn.live.watch import prometheus
from sojourn.live.watch.document import Watch
from sojourn.live.watch.exposition import FAMILIES, FINDING, STATE, page, serve
from sojourn.metrics.catalog.catalog import METRIC_BY_NAME
from sojourn.metrics.errors import ServerError
from tests.metrics.foreign import VllmPage, steady
from tests.metrics.live_pages import observed


def watch_of(*names: str) -> Watch:
    server = observed(steady(100, every_s=0.4, queue_s=2.0), 40, lambda _: (4, 6, 0.2)).watched()
    servers = [structs.replace(server, name=name) for name in names]
    return Watch(at="", state=server.state, headline=server.headline, servers=servers)


def vllm_families() -> list:
    """What the page of that vLLM has."""
    return list(text_string_to_metric_families(VllmPage().render().decode()))


def samples(body: bytes) -> list:
    return [each for family in text_string_to_metric_families(body.decode()) for each in family.samples]


def test_a_finding_has_the_labels_of_its_server_its_confidence_and_its_series():
    watch = watch_of("http://10.0.0.7:8000", 'a"b:1 (pods)')
    found = [each for each in samples(page(watch)) if each.name == FINDING]
    first = watch.servers[0].findings[0]
    assert first.key == "batch_cap"
    mine = next(each for each in found if each.labels["finding"] == "batch_cap" and "job" not in each.labels)
    assert mine.value == pytest.approx(first.confidence)
    assert (mine.labels["instance"], mine.labels["title"], mine.labels["object"]) == (
        "10.0.0.7:8000", first.title, first.object
    )  # fmt: skip
    series = mine.labels["series"].split(", ")
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:time_to_first_token_seconds"} <= {*series}
    assert {*series} <= {each.name for each in vllm_families()}
    assert {(each.labels["instance"], each.labels["job"]) for each in found if "job" in each.labels} == {
        ('a"b:1', "pods")
    }
    assert len(found) == sum(len(server.findings) for server in watch.servers)
    assert [each.labels["state"] for each in samples(page(watch)) if each.name == STATE] == ["degraded"] * 2


def test_every_family_of_the_table_is_one_of_the_catalogue():
    assert {name for families in FAMILIES.values() for name in families} <= METRIC_BY_NAME.keys()


def test_a_watch_of_a_prometheus_leaves_out_what_a_watch_exports(monkeypatch):
    asked = []
    monkeypatch.setattr(prometheus, "_answer", lambda base, query, *_: asked.append(query) or [])
    prometheus.held_scrapes("http://p", 30)
    assert '__name__!~"sojourn_watch_.+"' in asked[0] and STATE.startswith(prometheus.WATCH)


def test_a_watch_without_an_answer_has_no_sample():
    assert samples(page(Watch(at="", state="cannot tell", headline="", servers=[]))) == []


def test_it_is_served_on_this_host_alone_and_a_taken_port_is_a_sentence():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = serve(port, lambda: watch_of("a:1"))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert FINDING.encode() in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/")
        with pytest.raises(ServerError, match="--metrics-port"):
            serve(port, lambda: watch_of("a:1"))
    finally:
        server.shutdown()
        server.server_close()
