"""Spans of vLLM (recorded from a real server) and SGLang (as its code writes them), joined to a client's requests."""

import base64
import gzip
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from sojourn.interop.imported import otlp_receiver
from sojourn.interop.imported.otlp import PARTS, UNSEEN_ACCOUNTS, join_spans, read_joined, served_requests, summary
from sojourn.interop.imported.otlp_file import SpanData, read_spans, spans_of
from sojourn.interop.imported.otlp_receiver import Receiver
from sojourn.metrics.errors import InputError, ServerError
from sojourn.metrics.ledger import ACCOUNT_BY_NAME
from sojourn.metrics.records import ClientRecord
from sojourn.metrics.records.tables import columns
from sojourn.metrics.run.directory import REQUIRED, RunDirectory
from sojourn.metrics.run.segments import replace_table
from sojourn.metrics.run.trace_id import trace_id_of, traceparent_of

MS, S = 1_000_000, 1_000_000_000
RECORDED = Path(__file__).parent / "spans" / "vllm-0.32.0.binpb"  # 48 requests of a client, and one by hand
BEGIN_NS = 1_795_000_000 * S
PACKED = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}


def client_run(path: Path, ids: list[str], latency_ns: int = 3 * S) -> RunDirectory:
    run = RunDirectory.create(path, dict.fromkeys(REQUIRED) | {"scenario": {"name": "x"}, "engine": {}, "valid": True})
    rows = [
        ClientRecord(request_id=name, scenario="x", due_ns=S * place, sent_ns=S * place + 2 * MS,
                     first_token_ns=S * place + 50 * MS, last_byte_ns=S * place + latency_ns, status="ok", klass="chat")
        for place, name in enumerate(ids)
    ]  # fmt: skip
    replace_table(run.path / "client.parquet", columns("client", rows))
    return run


def test_vllm_s_phases_lie_within_its_end_to_end_latency():
    served = served_requests(read_spans(RECORDED))
    assert len(served) == 49 and {each.engine for each in served} == {"vLLM"}
    for each in served:
        phases = each.queue_ns + each.prefill_ns + each.decode_ns
        assert 0 < phases <= each.e2e_ns and 0 < each.ttft_ns <= each.e2e_ns
        assert each.prompt_tokens > 0 and each.output_tokens > 0


def test_spans_are_joined_by_the_request_id_that_the_client_sent_and_parts_sum_to_its_latency(tmp_path):
    served = served_requests(read_spans(RECORDED))
    ids = sorted(each.internal_id.removeprefix("cmpl-")[:-2] for each in served if each.internal_id.startswith("cmpl-"))
    run = client_run(tmp_path / "run", [*ids, "unknown-to-the-server"])
    joined = join_spans(run, read_spans(RECORDED), "spans")
    assert (joined.matched, joined.by_request_id, joined.requests) == (48, 48, 49)
    rows = read_joined(run)
    assert set(rows.request_id) == set(ids)
    for row in rows.itertuples():
        assert sum(getattr(row, part) for part in PARTS) == pytest.approx(row.latency_ns, abs=1)
    assert run.meta()["spans"]["evidence"] == "request spans"


def otlp_json(*spans: dict) -> str:
    return json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]})


def json_span(trace_id: str, name: str, begin_ms: float, end_ms: float, **attributes: object) -> dict:
    kinds = {str: "stringValue", float: "doubleValue", int: "intValue"}
    return {
        "traceId": trace_id, "spanId": "b7ad6b7169203331", "name": name,
        "startTimeUnixNano": str(BEGIN_NS + round(begin_ms * MS)),
        "endTimeUnixNano": str(BEGIN_NS + round(end_ms * MS)),
        "attributes": [
            {"key": key, "value": {kinds[type(value)]: str(value) if isinstance(value, int) else value}}
            for key, value in attributes.items()
        ],
    }  # fmt: skip


def sglang_spans(trace_id: str) -> list[dict]:
    """Of one request: root and stages, as srt/observability/trace.py and req_time_stats.py name them."""
    root = {
        "module": "sglang::request", "rid": "0f1e2d3c", "gen_ai.request.id": "0f1e2d3c", "gen_ai.latency.e2e": 0.5,
        "gen_ai.latency.time_to_first_token": 0.2, "gen_ai.latency.time_in_model_decode": 0.3,
        "gen_ai.latency.time_in_model_prefill": 0.19, "gen_ai.usage.prompt_tokens": 40,
        "gen_ai.usage.completion_tokens": 9,
    }  # fmt: skip
    return [
        json_span(trace_id, "Req 0f1e2d3c", 0, 500, **root), json_span(trace_id, "tokenize", 0, 5),
        json_span(trace_id, "prefill_waiting", 10, 130), json_span(trace_id, "prefill_forward", 130, 160),
        json_span(trace_id, "prefill_forward", 170, 195), json_span(trace_id, "decode_forward", 195, 500),
    ]  # fmt: skip


def test_sglang_s_queue_and_prefill_are_its_stages_and_it_is_joined_by_traceparent(tmp_path):
    run = client_run(tmp_path / "run", ["a", "b"], latency_ns=520 * MS)
    file = tmp_path / "spans.jsonl"
    file.write_text("\n".join(otlp_json(*sglang_spans(trace_id_of(name))) for name in ("a", "b")))
    joined = join_spans(run, read_spans(file), file.name)
    assert (joined.engine, joined.by_traceparent, joined.by_request_id) == ("SGLang", 2, 0)
    rows = read_joined(run)
    assert list(rows.queue_ns) == [120 * MS] * 2 and list(rows.prefill_ns) == [55 * MS] * 2
    assert list(rows.decode_ns) == [300 * MS] * 2 and list(rows.server_rest_ns) == [25 * MS] * 2
    assert list(rows.client_lag_ns) == [2 * MS] * 2 and list(rows.outside_ns) == [18 * MS] * 2


def test_part_that_no_span_tells_is_unseen_and_not_0(tmp_path):
    run = client_run(tmp_path / "run", ["a"])
    file = tmp_path / "spans.json"
    file.write_text(otlp_json(sglang_spans(trace_id_of("a"))[0]))  # SGLang without its stages
    join_spans(run, read_spans(file), file.name)
    views = {view.part: view for view in summary(read_joined(run))}
    assert views["queue"].mean_ms is None and views["prefill"].mean_ms is None
    assert views["decode"].mean_ms == pytest.approx(300)


def test_excess_of_late_requests_is_that_of_the_part_that_grew(tmp_path):
    ids = [f"r{number}" for number in range(20)]
    run = client_run(tmp_path / "run", ids)
    sent = run.table("client")
    sent.loc[18:, "last_byte_ns"] += 2 * S
    replace_table(run.path / "client.parquet", columns("client", [ClientRecord(**row) for row in _rows(sent)]))
    spans = []
    for place, name in enumerate(ids):
        late = 2.0 if place >= 18 else 0.0
        told = {"gen_ai.latency.e2e": 2.9 + late, "gen_ai.latency.time_in_queue": 0.1 + late,
                "gen_ai.latency.time_in_model_prefill": 0.3, "gen_ai.latency.time_in_model_decode": 2.5,
                "gen_ai.request.id": f"chatcmpl-{name}"}  # fmt: skip
        spans.append(json_span("1" * 32, "llm_request", 0, 1, **told))
    file = tmp_path / "spans.json"
    file.write_text(otlp_json(*spans))
    assert join_spans(run, read_spans(file), "spans").by_request_id == 20
    excess = {view.part: view.excess_share for view in summary(read_joined(run))}
    assert excess["queue"] == pytest.approx(1, abs=1e-6) and excess["prefill"] == pytest.approx(0, abs=1e-6)


def _rows(sent) -> list[dict]:
    kept = ("request_id", "scenario", "due_ns", "sent_ns", "first_token_ns", "last_byte_ns", "status", "klass")
    return [{key: row[key] for key in kept} for row in sent.to_dict("records")]


def test_json_and_protobuf_of_the_same_spans_are_the_same(tmp_path):
    messages = read_spans(RECORDED)[:3]
    encoded = [
        {"traceId": span.trace_id, "spanId": base64.b64encode(bytes.fromhex(span.span_id)).decode(), "name": span.name,
         "startTimeUnixNano": span.begin_ns, "endTimeUnixNano": str(span.end_ns),
         "attributes": [{"key": key, "value": _json_value(value)} for key, value in span.attributes.items()]}
        for span in messages
    ]  # fmt: skip
    file = tmp_path / "spans.json"
    file.write_text(otlp_json(*encoded))
    assert read_spans(file) == messages


def _json_value(value: object) -> dict:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "is empty"), (b'{"resourceMetrics": []}', "no file of OTLP traces"),
     (b"no protobuf \xff", "no file of OTLP"),
     (b'{"resourceSpans": []}', "holds no span"), (b"{nonsense", "no file of OTLP traces")],
)  # fmt: skip
def test_file_that_holds_no_traces_is_refused_with_a_sentence(tmp_path, content, sentence):
    file = tmp_path / "x"
    file.write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        read_spans(file)


def test_spans_of_another_load_are_refused(tmp_path):
    with pytest.raises(InputError, match="is among the 1 of"):
        join_spans(client_run(tmp_path / "run", ["other"]), read_spans(RECORDED), "spans")
    with pytest.raises(InputError, match="no span of a request of vLLM or SGLang"):
        join_spans(client_run(tmp_path / "run2", ["a"]), [_plain_span()], "spans")


def test_fewer_spans_do_not_replace_more(tmp_path):
    served = [each for each in served_requests(read_spans(RECORDED)) if each.internal_id.startswith("cmpl-")]
    run = client_run(tmp_path / "run", [each.internal_id.removeprefix("cmpl-")[:-2] for each in served])
    join_spans(run, read_spans(RECORDED), "all")
    whole = (run.path / "spans.parquet").read_bytes()
    few = [span for span in read_spans(RECORDED) if span.trace_id == served[0].trace_id]
    with pytest.raises(InputError, match=r"stays, for it has spans of 48 requests \(all\) and few of 1;"):
        join_spans(run, few, "few")
    assert (run.path / "spans.parquet").read_bytes() == whole and run.meta()["spans"]["source"] == "all"
    assert join_spans(run, read_spans(RECORDED), "again").matched == 48


def _plain_span() -> SpanData:
    return SpanData(
        trace_id="1" * 32, span_id="2" * 16, parent_id="", name="GET /", begin_ns=1, end_ns=2, attributes={}
    )


def test_unseen_accounts_are_accounts_of_the_ledger():
    assert set(UNSEEN_ACCOUNTS) <= set(ACCOUNT_BY_NAME)


def test_traceparent_is_one_of_w3c_with_the_trace_of_the_request():
    version, trace_id, span_id, flags = traceparent_of("r1").split("-")
    assert (version, trace_id, flags) == ("00", trace_id_of("r1"), "01") and len(trace_id) == 32 and len(span_id) == 16


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
def test_receiver_keeps_what_opentelemetry_s_exporter_posts(tmp_path, compression):
    file = tmp_path / "spans.binpb"
    receiver = Receiver(0, file)
    try:
        provider = TracerProvider()
        exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{receiver.port}/v1/traces", compression=compression)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        for number in range(3):
            provider.get_tracer("x").start_span(f"span {number}", attributes={"number": number}).end()
        provider.shutdown()
        assert receiver.messages == 3 and receiver.refused == 0
    finally:
        receiver.close()
    assert [(span.name, span.attributes["number"]) for span in read_spans(file)] == [(f"span {n}", n) for n in range(3)]


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [("/v1/metrics", {"Content-Type": "application/x-protobuf"}, b"x", 404),
     ("/v1/traces", {"Content-Type": "application/json"}, b"{}", 415),
     ("/v1/traces", PACKED, b"no gzip", 400), ("/v1/traces", PACKED, gzip.compress(b"x")[:-4], 400),
     ("/v1/traces", PACKED, 2 * gzip.compress(b"x"), 400), ("/v1/traces", PACKED, gzip.compress(bytes(1001)), 413)],
    ids=["another path", "JSON", "no gzip", "cut off", "two members", "too large"],
)  # fmt: skip
def test_receiver_refuses_what_is_no_whole_protobuf_of_traces(tmp_path, monkeypatch, path, headers, body, status):
    monkeypatch.setattr(otlp_receiver, "LARGEST_BODY", 1000)
    receiver = Receiver(0, tmp_path / "spans")
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{receiver.port}{path}", body, headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=5)
        assert refused.value.code == status and receiver.refused == 1 and receiver.messages == 0
    finally:
        receiver.close()


def test_receiver_of_a_taken_port_is_a_sentence(tmp_path):
    first = Receiver(0, tmp_path / "a")
    try:
        with pytest.raises(ServerError, match="choose another"):
            Receiver(first.port, tmp_path / "b")
    finally:
        first.close()


def test_one_message_without_its_length_is_read(tmp_path):
    content = RECORDED.read_bytes()
    length = int.from_bytes(content[:4], "big")
    file = tmp_path / "one"
    file.write_bytes(content[4 : 4 + length])
    assert read_spans(file) == spans_of(content[4 : 4 + length])
