"""A real server's other faces: vLLM's names on its page, and traces at a collector."""

import subprocess

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("opentelemetry.sdk")

from pydantic import ValidationError

from sojourn.engine.config import EngineConfig, complaint
from tests.engine.server_process import post, serving, wait_for
from tests.interop.exported.collector import Collector, attributes
from tests.metrics.vllm_families import DASHBOARDS, OTHERS

pytestmark = pytest.mark.server

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory, collector):
    """Samples nothing, and has an objective that nothing can meet in time but what asks for one token."""
    tracing = ("--otlp-endpoint", collector.url, "--trace-sample-ratio", "0", "--objective-tpot-ms", "0.000001")
    with serving(tmp_path_factory.mktemp("faces"), "tiny-model", "--compat", "vllm", *tracing) as running:
        yield running


def families(server) -> dict:
    page = httpx.get(f"{server.url}/metrics").text
    return {family.name: family for family in text_string_to_metric_families(page)}


def test_every_family_of_vllm_s_dashboards_fills(server):
    prompt = list(range(40, 80))
    for _ in range(2):  # the second one finds its prefix
        assert post(server, prompt=prompt, max_tokens=8, ignore_eos=True).status_code == 200
    found = families(server)
    assert {name for name in found if name.startswith("vllm:")} == {f"vllm:{name}" for name in DASHBOARDS | OTHERS}

    def total(name: str, suffix: str = "") -> float:
        family = found[f"vllm:{name}"]
        return sum(sample.value for sample in family.samples if sample.name == f"vllm:{name}{suffix}")

    for name, kind in DASHBOARDS.items():
        if kind == "histogram":
            assert total(name, "_count") > 0, name
        elif kind == "counter":
            assert total(name, "_total") > 0, name
    assert total("inter_token_latency_seconds", "_count") == 14
    assert total("generation_tokens", "_total") == 16
    assert total("prompt_tokens", "_total") == total("prefix_cache_queries", "_total") == 80
    assert total("prefix_cache_hits", "_total") == 32  # two full blocks; the last token is always computed
    phases = [total(f"request_{phase}_time_seconds", "_sum") for phase in ("queue", "prefill", "decode")]
    assert 0 < sum(phases) < total("e2e_request_latency_seconds", "_sum")


def test_missed_objective_arrives_as_a_trace_under_its_caller(server, collector):
    begun = len(collector.roots)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-00", "x-request-id": "mine"}
    body = {"model": "tiny-model", "prompt": "The", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5}
    httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True}, headers=headers, timeout=30)
    httpx.post(f"{server.url}/v1/completions", json=body | {"max_tokens": 1}, headers=headers, timeout=30)
    wait_for(lambda: "mine" in {attributes(root)["sojourn.request_id"] for root in collector.roots[begun:]})
    (root,) = [root for root in collector.roots if attributes(root)["sojourn.request_id"] == "mine"]
    assert (root.name, root.trace_id.hex(), root.parent_span_id.hex()) == ("text_completion tiny-model", TRACE, SPAN)
    known = attributes(root)
    assert known["gen_ai.request.temperature"] == 0.5 and known["gen_ai.usage.output_tokens"] == 5
    assert known["gen_ai.request.stream"] is True
    events = {event.name: event.time_unix_nano for event in root.events}
    order = ("encoded", "queued", "first_scheduled", "first_token", "first_written", "last_token")
    assert [events[name] for name in order[:4]] == sorted(events[name] for name in order[:4])
    assert set(order) == set(events)
    children = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert {"token.encode", "compute.prefill", "compute.decode"} <= {child.name for child in children}
    spent = sum(child.end_time_unix_nano - child.start_time_unix_nano for child in children)
    lasted = root.end_time_unix_nano - root.start_time_unix_nano
    assert abs(spent - lasted) <= 1_000_000  # closure


def test_page_tells_what_became_of_the_traces(server, collector):
    def counted(name: str, **labels: str) -> float:
        samples = families(server)[f"sojourn_telemetry_{name}"].samples
        return next(sample.value for sample in samples if labels.items() <= sample.labels.items())

    kept = counted("traces", decision="objective")
    assert kept >= 1 and counted("traces", decision="head") == 0
    wait_for(lambda: counted("trace_exports", outcome="exported") == kept)


@pytest.mark.prometheus
def test_promtool_finds_no_fault_in_a_server_s_own_names(server):
    page = httpx.get(f"{server.url}/metrics").text
    own = "".join(f"{line}\n" for line in page.splitlines() if "vllm:" not in line)
    assert own.count("\n") > 1000
    done = subprocess.run(["promtool", "check", "metrics"], input=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"compat": "sglang"}, "compat='sglang' is not valid: input should be 'none' or 'vllm'"),
        ({"otlp_endpoint": "127.0.0.1:4318"}, "give the collector's address, such as http://127.0.0.1:4318"),
        ({"otlp_endpoint": "http://collector?x=1"}, "give the collector's address"),
        (
            {"trace_sample_ratio": 0.5},
            "nothing is sent, as otlp_endpoint is not set",
        ),
        ({"otlp_metrics": True}, "nothing is sent, as otlp_endpoint is not set"),
        ({"otlp_endpoint": "http://a:1", "trace_sample_ratio": 1.5}, "trace_sample_ratio=1.5 is not valid"),
        ({"telemetry": "off", "compat": "vllm"}, "telemetry=off leaves no records"),
        ({"telemetry": "off", "otlp_endpoint": "http://a:1"}, "telemetry=off leaves no records"),
    ],
)
def test_setting_that_cannot_be_honoured_is_refused_with_a_sentence(settings, sentence):
    with pytest.raises(ValidationError) as refused:
        EngineConfig(model="tiny-model", **settings)
    assert sentence in complaint(refused.value)
