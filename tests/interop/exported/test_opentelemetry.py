"""What a collector receives over OTLP/HTTP: everything that was promised, and never at a request's cost."""

import time
from collections.abc import Iterator
from random import Random

import msgspec
import pytest

pytest.importorskip("opentelemetry.sdk")
from sojourn.interop.exported import opentelemetry as tracing
from sojourn.interop.exported import otlp_metrics
from sojourn.interop.exported.opentelemetry import Tracer
from sojourn.interop.exported.spans import is_sampled
from sojourn.metrics.errors import ServerError
from sojourn.metrics.records import RequestRecord
from tests.interop.exported.collector import Collector, attributes
from tests.metrics.random_records import MS, random_request

PARENT_TRACE, PARENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OFFSET_NS = 1_700_000_000_000_000_000


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.02)


def tracer(url: str, ratio: float = 1.0, objectives=None, **options) -> Tracer:
    return Tracer(url, "tiny", ratio, objectives or {}, OFFSET_NS, **options)


def ok(index: int = 0, ttft_ms: float = 1, **changes) -> RequestRecord:
    written = round(ttft_ms * MS)
    base = RequestRecord(
        f"r{index}", 0, written, finish_reason="stop", first_written_ns=written, written_ns=written, token_ns=[written]
    )
    return msgspec.structs.replace(base, **changes)


def test_children_hang_on_the_root_and_the_root_on_its_caller(collector):
    traced = tracer(collector.url)
    request = msgspec.structs.replace(random_request(Random(1)), traceparent=f"00-{PARENT_TRACE}-{PARENT_SPAN}-01")
    traced.observe(request, {"gen_ai.request.max_tokens": 7, "gen_ai.request.stop_sequences": ["a", "b"]})
    traced.close()
    (root,) = collector.roots
    assert collector.paths == {"/v1/traces"}
    assert root.trace_id.hex() == PARENT_TRACE and root.parent_span_id.hex() == PARENT_SPAN
    assert root.name == "chat tiny" and attributes(root)["gen_ai.request.max_tokens"] == 7
    children = [span for span in collector.spans if span is not root]
    assert {child.parent_span_id for child in children} == {root.span_id}
    assert {child.trace_id for child in children} == {root.trace_id}
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)


def test_durations_sum_to_the_ledger_and_times_are_of_the_wall_clock(collector):
    traced = tracer(collector.url)
    request = next(found for seed in range(99) if (found := random_request(Random(seed))).token_ns)
    traced.observe(request, {})
    traced.close()
    (root,) = collector.roots
    assert root.start_time_unix_nano == OFFSET_NS + request.arrived_ns
    children = [span for span in collector.spans if span is not root]
    spent = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in children)
    assert spent == sum(request.ledger)
    assert all(event.time_unix_nano >= OFFSET_NS for event in root.events) and len(root.events) >= 3


def test_ratio_keeps_exactly_the_trace_ids_below_it(collector):
    traced = tracer(collector.url, ratio=0.25, rng=Random(5))
    rng = Random(5)
    expected = sum(is_sampled(rng.getrandbits(128) or 1, 0.25) for _ in range(200))
    for index in range(200):
        traced.observe(ok(index), {})
    traced.close()
    assert len(collector.roots) == traced.decisions["head"] == expected
    assert all(is_sampled(int.from_bytes(root.trace_id, "big"), 0.25) for root in collector.roots)
    assert traced.decisions["left_out"] == 200 - expected and 30 < expected < 70


@pytest.mark.parametrize(("flags", "ratio", "kept"), [("01", 0.0, 1), ("00", 1.0, 0)])
def test_caller_that_decided_is_followed_whatever_the_ratio(collector, flags, ratio, kept):
    traced = tracer(collector.url, ratio=ratio)
    traced.observe(ok(traceparent=f"00-{PARENT_TRACE}-{PARENT_SPAN}-{flags}"), {})
    traced.close()
    assert len(collector.roots) == traced.decisions["head"] == kept


def test_missed_objective_and_error_are_kept_whatever_the_ratio(collector):
    traced = tracer(collector.url, ratio=0.0, objectives={"all": {"ttft_ms": 100.0}})
    for index in range(40):
        traced.observe(ok(index, ttft_ms=150 if index % 4 == 0 else 50), {})
    traced.observe(ok(99, finish_reason=None, error="the core died"), {})
    unsampled = f"00-{PARENT_TRACE}-{PARENT_SPAN}-00"
    traced.observe(ok(100, ttft_ms=300, traceparent=unsampled), {})
    traced.observe(ok(101, ttft_ms=3, traceparent=unsampled), {})
    traced.close()
    found = {attributes(root)["sojourn.request_id"]: root for root in collector.roots}
    assert set(found) == {f"r{index}" for index in (*range(0, 40, 4), 99, 100)}
    assert traced.decisions == {"head": 0, "objective": 11, "error": 1, "left_out": 31}
    missed = attributes(found["r4"])["sojourn.missed_objectives"]
    assert [value.string_value for value in missed.values] == ["ttft_ms"]
    assert found["r99"].status.code == found["r99"].status.STATUS_CODE_ERROR
    assert found["r99"].status.message == "the core died"


def test_collector_that_refuses_is_counted_and_told_of_once(caplog):
    angry = Collector(status=400)
    traced = tracer(angry.url)
    for index in range(3):
        traced.observe(ok(index), {})
        give_up = time.monotonic() + 10
        while sum(traced.exports.values()) <= index and time.monotonic() < give_up:
            time.sleep(0.01)
    traced.close()
    angry.close()
    (told,) = caplog.messages
    assert told.startswith(f"{angry.url} takes no traces")
    assert angry.posts and traced.exports == {"exported": 0, "dropped": 0, "refused": 3}


def test_collector_that_is_down_fills_the_queue_and_no_request_waits(monkeypatch):
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.2)
    traced = tracer("http://127.0.0.1:9", capacity=10)
    begin = time.monotonic()
    for index in range(300):
        traced.observe(ok(index), {})
    assert time.monotonic() - begin < 2  # 300 times nothing
    traced.close()
    assert traced.exports["exported"] == 0
    # All are accounted for but one batch, if the exporter still tries to send it.
    lost = traced.exports["dropped"] + traced.exports["refused"]
    assert 300 - tracing.BATCH_REQUESTS <= lost <= 300 and traced.exports["dropped"] >= 280


def test_address_may_name_the_path_already(collector):
    traced = tracer(f"{collector.url}/v1/traces/")
    traced.observe(ok(), {})
    traced.close()
    assert collector.paths == {"/v1/traces"} and traced.exports["exported"] == 1


def test_missing_package_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ServerError, match=r"otlp_endpoint needs .* pip install '\.\[otel\]'"):
        tracer("http://127.0.0.1:9")


def test_histograms_hold_every_request_whatever_is_sampled(collector):
    traced = tracer(collector.url, ratio=0.0, metrics=True)
    rng = Random(7)
    requests = [random_request(rng) for _ in range(300)] + [ok(finish_reason="abort"), ok(error="the core died")]
    for request in requests:
        traced.observe(request, {"gen_ai.operation.name": "text_completion"})
    traced.close()
    assert collector.paths == {"/v1/traces", "/v1/metrics"}  # of failures and missed objectives there are spans
    assert set(collector.metrics) == {each.name for each in otlp_metrics.HISTOGRAMS}
    for histogram in otlp_metrics.HISTOGRAMS:
        metric = collector.metrics[histogram.name]
        expected = [
            seconds[histogram.name] for each in requests
            if histogram.name in (seconds := otlp_metrics.observation(each, "tiny", {})[0])
        ]  # fmt: skip
        points = metric.histogram.data_points
        assert metric.unit == "s" and all(tuple(each.explicit_bounds) == histogram.bounds_s for each in points)
        assert sum(each.count for each in points) == len(expected) > 0
        assert sum(each.sum for each in points) == pytest.approx(sum(expected))
        assert {attributes(each)["gen_ai.operation.name"] for each in points} == {"text_completion"}
    kinds = {
        attributes(each).get("error.type")
        for each in collector.metrics[otlp_metrics.DURATION.name].histogram.data_points
    }
    assert kinds == {None, "aborted", "server_error"}
    for successful in (otlp_metrics.TTFT, otlp_metrics.TPOT):
        assert not any(
            "error.type" in attributes(each) for each in collector.metrics[successful.name].histogram.data_points
        )


def test_the_latencies_of_a_span_are_those_of_its_record(collector):
    traced = tracer(collector.url)
    requests = [msgspec.structs.replace(random_request(Random(n)), request_id=str(n)) for n in range(40)]
    for request in requests:
        traced.observe(request, {})
    traced.close()
    told = {attributes(root)["sojourn.request_id"]: attributes(root) for root in collector.roots}
    for request in requests:
        of = told[request.request_id]
        end = request.written_ns or request.finished_ns
        assert of["gen_ai.latency.e2e"] == pytest.approx((end - request.arrived_ns) / 1e9)
        if request.token_ns and request.scheduled_ns is not None:
            first = of["gen_ai.latency.time_in_model_prefill"] + of["gen_ai.latency.time_in_model_decode"]
            assert first == pytest.approx(of["gen_ai.latency.time_in_model_inference"])


def test_histograms_are_off_where_nobody_asks(collector):
    traced = tracer(collector.url)
    traced.observe(ok(), {})
    traced.close()
    assert collector.paths == {"/v1/traces"}
